"""Processes of a ring, started and led by a test. Real ones: subprocess, real signals, never multiprocessing."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ACTOR = Path(__file__).with_name("actor.py")
# Everything here takes milliseconds; a starved machine may need seconds. Beyond this it hangs, which is the fault.
PATIENCE_S = 60.0


class Raised(Exception):
    """What an actor's call raised: `kind` is the class's name, `numbers` its attributes."""

    def __init__(self, kind: str, text: str, numbers: dict[str, Any]) -> None:
        self.kind, self.text, self.numbers = kind, text, numbers
        super().__init__(f"{kind}: {text}")


class Died(Exception):
    """The actor ended instead of answering. `status` is negative for a signal."""

    def __init__(self, status: int) -> None:
        self.status = status
        super().__init__(f"exit status {status}")


class Actor:
    """One process. `actor.publish(count=3)` calls and waits; `actor.begin_call("next")` and `actor.answer()` do not."""

    def __init__(
        self,
        role: str,
        *,
        script: Path = ACTOR,
        environment: dict[str, str] | None = None,
        prefix: tuple[str, ...] = (),
    ) -> None:
        # Without a name: nothing is left of it when whoever runs the tests is killed. Closed in bury.
        self.log = tempfile.TemporaryFile()  # noqa: SIM115
        self.process = subprocess.Popen(
            [*prefix, sys.executable, str(script), role],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            pass_fds=(self.log.fileno(),) if script == ACTOR else (),
            env=os.environ | {"HEADRACE_TEST_LOG_FD": str(self.log.fileno())} | (environment or {}),
        )
        self._pid: int | None = None

    @property
    def pid(self) -> int:
        """The process's id as it sees itself; behind a prefix such as unshare, not the one of `process`."""
        if self._pid is None:
            self._pid = int(self.answer())
        return self._pid

    def begin_call(self, name: str, *args: Any, **kwargs: Any) -> None:
        assert self.pid, "the first line says that it is up"
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps({"call": name, "args": args, "kwargs": kwargs}) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise Died(self.process.wait(PATIENCE_S)) from None

    def answer(self) -> Any:
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], PATIENCE_S)
        if not ready:
            raise TimeoutError(f"no answer from {self.process.args} in {PATIENCE_S:g} s")
        line = self.process.stdout.readline()
        if not line:
            raise Died(self.process.wait(PATIENCE_S))
        answer = json.loads(line)
        if "error" in answer:
            raise Raised(answer["error"], answer["text"], answer["numbers"])
        return answer["result"]

    def is_waiting(self) -> bool:
        """No answer yet."""
        return not select.select([self.process.stdout], [], [], 0)[0]

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.begin_call(name, *args, **kwargs)
            return self.answer()

        return call

    def reports(self) -> list[str]:
        """What it has logged so far. It need not be able to answer."""
        log = self.log.fileno()
        # Its place in the file is the actor's as well: it must not be moved.
        return os.pread(log, os.fstat(log).st_size, 0).decode().splitlines()

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)

    def kill(self) -> float:
        """SIGKILL, and when (monotonic seconds)."""
        at = time.monotonic()
        self.process.kill()
        return at

    def bury(self) -> str:
        """End it whatever it does; returns what it wrote to stderr."""
        self.process.kill()
        _, errors = self.process.communicate()
        self.log.close()
        return errors


class Company:
    """One host and N readers with a ring between them."""

    def __init__(self, **how: Any) -> None:
        self.actors: list[Actor] = []
        self._how = how

    def add(self, role: str, **how: Any) -> Actor:
        actor = Actor(role, **(self._how | how))
        self.actors.append(actor)
        return actor

    def assemble(
        self, num_readers: int, *, slot_bytes: int = 4096, max_slot_bytes: int = 1 << 26, **config: Any
    ) -> tuple[Actor, list[Actor]]:
        host = self.add("host")
        readers = [self.add("reader") for _ in range(num_readers)]
        invitation = host.listen()
        for index, reader in enumerate(readers):
            reader.knock(invitation, index)
        host.admit(num_readers)
        host.open(slot_bytes=slot_bytes, max_slot_bytes=max_slot_bytes, **config)
        for reader in readers:
            reader.begin_call("enter", **config)
        host.welcome()
        for reader in readers:
            reader.answer()
        return host, readers

    def disband(self) -> str:
        """End everybody; returns everything they wrote to stderr."""
        for actor in self.actors:
            actor.process.kill()  # first all, so that nobody has time to report the death of another
        return "".join(actor.bury() for actor in self.actors)


def until_asleep(actor: Actor) -> None:
    """Return once the actor's process sleeps: it is inside the wait that it was sent into."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        stat = Path(f"/proc/{actor.process.pid}/stat").read_text().rpartition(")")[2].split()
        wait_channel = Path(f"/proc/{actor.process.pid}/wchan").read_text()
        if stat[0] == "S" and "futex" in wait_channel:
            return
        time.sleep(0.002)
    raise TimeoutError("it never went to sleep in the ring")


def until_reported(actor: Actor) -> str:
    """The first thing that the actor logs."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        if reports := actor.reports():
            return reports[0]
        time.sleep(0.01)
    raise TimeoutError("it never logged anything")


def raised_by(actor: Actor) -> Raised:
    """What the call that the actor is in raises."""
    try:
        result = actor.answer()
    except Raised as error:
        return error
    raise AssertionError(f"it should have raised, and returned {result}")
