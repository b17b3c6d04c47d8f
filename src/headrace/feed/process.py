"""The feeder process: `python -m headrace.feed.process headrace-feeder FD`. See feeder.py for who starts it.

It ends when its data end, when all its readers have left, when one of them died, or when the rank that started it died.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import socket
import sys
import threading
from pathlib import Path

from headrace.errors import HeadraceError
from headrace.feed.feeder import NAME, Charge
from headrace.feed.hosting import bring_up, this_process
from headrace.feed.production import Production
from headrace.feed.shard import open_shard
from headrace.position import Position
from headrace.shm.handover import Door
from headrace.shm.peers import start_time
from headrace.shm.ring_writer import EverybodyLeft


def main() -> int:
    with open(int(sys.argv[2]), "rb") as file:
        file.seek(0)
        charge: Charge = pickle.load(file)
    settle_in(charge)
    listener = socket.socket(fileno=charge.listener_fd)
    door = Door(listener=listener, nonce=charge.nonce)
    me = this_process("the feeder", None)

    def make_production(position: Position) -> Production:
        sys.path[:] = charge.sys_path
        source = pickle.loads(charge.source)
        return open_shard(source, position, data_rank=charge.data_rank, data_size=charge.data_size, seed=charge.seed)

    try:
        host = bring_up(door, charge.config, make_production, expected=charge.expected, me=me)
    except Exception:
        return 1  # every rank has been told
    try:
        while not host.producer.finished:
            host.producer.produce()
    except EverybodyLeft:
        return 0
    except HeadraceError:
        return 1  # a rank died or nobody moved: the ranks see the same and say so
    finally:
        host.close()
    return 0


def settle_in(charge: Charge) -> None:
    """Be found in `ps`, leave Ctrl-C to the ranks, do not preempt them, and end with the rank that started us."""
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(NAME)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Under the normal policy a writer that wakes up preempts the rank on its own core and copies there: 180 us per
    # batch became 108 us with this, 570 us became 106 us for 3.7 MB.
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    threading.Thread(target=_end_with_parent, args=(charge,), daemon=True).start()


def _end_with_parent(charge: Charge) -> None:
    """Also when the main thread is inside the user's source, which may never return."""
    if charge.parent_pidfd is not None:
        poll = select.poll()
        poll.register(charge.parent_pidfd, select.POLLIN)
        poll.poll()
    else:
        started = start_time(charge.parent_pid)
        while start_time(charge.parent_pid) == started and os.getppid() == charge.parent_pid:
            select.select([], [], [], 0.1)
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
