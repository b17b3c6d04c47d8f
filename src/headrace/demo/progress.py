"""How far a run is, for people: a bar where there is a terminal, a line per phase where there is none."""

from __future__ import annotations

import sys
from contextlib import suppress
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

LINE_BEGIN = "demo: "
"""Of what is said where there is no terminal."""


class Progress:
    """A bar over a known number of steps, on standard error. `visible=False` for all ranks but one."""

    def __init__(self, description: str, total: int, *, visible: bool = True) -> None:
        console = Console(stderr=True)
        self._bar = Bar(
            TextColumn("{task.description:<40}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not (visible and console.is_terminal),
        )
        self._task = self._bar.add_task(description, total=total)
        self._writes_lines = visible and not console.is_terminal
        self._phase = description

    def begin(self, description: str) -> None:
        """A phase that takes a while before its first step."""
        self._tell(description)
        self._bar.update(self._task, description=description)

    def advance(self, description: str) -> None:
        """One step further."""
        self._tell(description)
        self._bar.update(self._task, advance=1, description=description)

    def move_to(self, description: str, done: int, total: int) -> None:
        """Another stage, or another place in it."""
        self._tell(description)
        self._bar.update(self._task, completed=done, total=total, description=description)

    def _tell(self, description: str) -> None:
        if self._writes_lines and description != self._phase:
            with suppress(OSError):  # nobody reads it any more
                print(f"{LINE_BEGIN}{description}", file=sys.stderr, flush=True)
        self._phase = description

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.stop()
