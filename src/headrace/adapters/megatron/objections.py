"""What a rank that only reads has to say against a run: to the rank that writes, which ends the run for all in band.

The ring knows no way back, and a rank that raised by itself would leave the others in a collective of the model that
nobody completes. So the rank that objects goes on with the batches it is given, and all of them stop at the same one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

LOOK_AGAIN_S = 1.0
"""Between two looks of the writing rank. One costs a request to the job's store, 0.1 ms on one host."""

log = logging.getLogger("headrace")


class Objections:
    """Of one group's ranks, through the store that torch.distributed was started with: no collective."""

    def __init__(self, ranks: tuple[int, ...], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._key = f"headrace/megatron/objection/{'-'.join(map(str, ranks))}"
        self._clock = clock
        self._next_look_s = clock()
        self._has_objected = False

    def raise_one(self, sentence: str) -> None:
        """Say it once; the batches go on until the writing rank has heard it."""
        if not self._has_objected:
            self._has_objected = True
            log.warning("%s", sentence)
            _store().set(self._key, sentence)

    def heard(self) -> str | None:
        """On the writing rank: what another one has said. Looks at most once in LOOK_AGAIN_S."""
        now_s = self._clock()
        if now_s < self._next_look_s:
            return None
        self._next_look_s = now_s + LOOK_AGAIN_S
        store = _store()
        if not store.check([self._key]):
            return None
        sentence = store.get(self._key).decode()
        store.delete_key(self._key)  # it ends this ring, not the next one of the group
        return str(sentence)


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()
