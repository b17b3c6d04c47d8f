"""What the writer needs to know of a source: the next batch's shape, and how to write it into a slot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
import numpy as np

from headrace.spec import BatchSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """What a batch is, beyond its arrays. Host integers travel in the slot's descriptor, the rest in its metadata."""

    consumed_samples: int
    """Samples of the whole job that are consumed once this batch is: what a checkpoint holds."""
    max_seqlen: int = 0
    num_documents: int = 0
    num_loss_tokens: int = 0
    num_valid_tokens: int = 0
    lengths: tuple[int, ...] = ()
    """First dimension of each ragged field, in the order of the spec."""
    digest: int = 0
    """CRC-32 of the arrays where several hosts must agree, else 0."""
    metadata: Metadata = field(default_factory=lambda: Metadata())

    @property
    def counts(self) -> tuple[int, ...]:
        """As they stand in the slot's descriptor; Batch reads them by these places."""
        return (
            self.consumed_samples,
            self.max_seqlen,
            self.num_documents,
            self.num_loss_tokens,
            self.num_valid_tokens,
            int(self.metadata.source_state is not None),
            self.digest,
        )


class Metadata(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is not worth an integer: decoded only by who asks."""

    samples: tuple[int, ...] = ()
    """Numbers of the samples in the micro batch, in the order of its rows."""
    extra: dict[str, Any] = {}
    """The source's keys that are not arrays."""
    source_state: bytes | None = None
    """The source's own state after this batch, pickled."""


class Production(Protocol):
    """One run through the data of one shard. Used by one thread."""

    def advance(self) -> BatchSpec | None:
        """Prepare the next batch and say what it is made of; None at the end of the data. May take long, may raise."""

    def write(self, arrays: Mapping[str, np.ndarray]) -> Written:
        """Write the prepared batch into arrays of its spec, at full capacity. May be called twice for one batch."""

    def close(self) -> None:
        """Let go of files and workers. Called once, also after an error."""
