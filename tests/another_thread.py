"""Does a native call let other Python threads run?"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable


def runs_beside(call: Callable[[], object], *, most_calls: int) -> bool:
    """Whether one of so many calls lets a waiting thread in. Without release of the GIL none ever does."""
    started, blocked, ran = threading.Event(), threading.Lock(), []
    blocked.acquire()

    def wait_and_say_so() -> None:
        started.set()
        with blocked:
            ran.append(True)

    interval = sys.getswitchinterval()
    # No thread is made to give up the GIL by the interpreter: it moves on only if its holder lets go.
    sys.setswitchinterval(1000)
    thread = threading.Thread(target=wait_and_say_so)
    try:
        thread.start()
        started.wait()
        blocked.release()
        assert not ran, "releasing a lock does not release the GIL"
        for _ in range(most_calls):
            call()
            if ran:
                break
        was_let_in = bool(ran)
        thread.join()
    finally:
        sys.setswitchinterval(interval)
    return was_let_in
