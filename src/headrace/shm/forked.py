"""What a forked child may do with its parent's end of a ring: nothing, and it is told so.

A DataLoader worker inherits mappings and descriptors. Were it to close the ring, or merely to leave it, the parent's
ring would end. So both ends register here and are disowned in every child; the parent notices nothing.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from headrace.errors import ConfigError, HeadraceError


class Unusable:
    """Stands where the native end was: every use raises. The ready path needs no check of its own that way."""

    def __init__(self, error: Callable[[], HeadraceError]) -> None:
        self._error = error

    def __getattr__(self, name: str) -> Any:
        raise self._error()


class _Owned(Protocol):
    def disown(self, instead: Unusable) -> None:
        """Runs in a forked child: put `instead` in the place of the native end. Must not raise."""


_owned: weakref.WeakSet[_Owned] = weakref.WeakSet()


def register(end: _Owned) -> None:
    """Have `end` disowned in every child that this process forks while it lives."""
    _owned.add(end)


def _disown_all() -> None:
    parent = os.getppid()
    instead = Unusable(
        lambda: ConfigError(f"this feed belongs to process {parent}; a forked child cannot use it, make one there")
    )
    for end in list(_owned):
        end.disown(instead)


os.register_at_fork(after_in_child=_disown_all)
