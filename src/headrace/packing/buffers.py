"""Memory for parts that are copies, used in turn: allocating it for each batch would cost a page fault per 4 KB."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

Array = TypeVar("Array")

MAX_SHAPES = 64
"""Shapes remembered per turn; beyond it the memory of them is dropped and begins anew."""


class Buffers(Generic[Array]):
    """`num_turns` sets of named arrays. What one turn handed out is overwritten when its turn comes again."""

    def __init__(self, num_turns: int, wrap: Callable[[Any], Array]) -> None:
        self._wrap = wrap
        self._backing: list[dict[str, npt.NDArray[Any]]] = [{} for _ in range(num_turns)]
        self._views: list[dict[tuple[str, tuple[int, ...]], tuple[npt.NDArray[Any], Array]]] = [
            {} for _ in range(num_turns)
        ]
        self._turn = 0

    def next_turn(self) -> None:
        self._turn = (self._turn + 1) % len(self._backing)

    def array(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> tuple[npt.NDArray[Any], Array]:
        """An array of this turn for its owner to fill, and what `wrap` makes of it: the same again for the same shape.

        A name keeps its dtype.
        """
        views = self._views[self._turn]
        found = views.get((name, shape))
        if found is None:
            if len(views) >= MAX_SHAPES:
                views.clear()
            count = math.prod(shape)
            backing = self._backing[self._turn].get(name)
            if backing is None or backing.size < count or backing.dtype != dtype:
                # A quarter more, because lengths of padded documents differ from batch to batch.
                backing = self._backing[self._turn][name] = np.empty(count + count // 4, dtype)
                views.clear()  # those of the smaller memory would keep it alive
            view = backing[:count].reshape(shape)
            found = views[(name, shape)] = (view, self._wrap(view))
        return found
