"""Which samples a data rank takes: Megatron's sequential sampler (MegatronPretrainingSampler), as arithmetic.

Samples are dealt out in order: each turn takes micro_batch_size * data_size of them, and rank r gets the r-th run of
micro_batch_size. So the state of a whole run is one integer, the number of samples consumed by all ranks together
(Megatron's consumed_train_samples), and it may be continued with another number of ranks or another micro batch.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """One data rank's share. All ranks with the same `data_rank` (a TP x CP x PP group) read the same samples."""

    micro_batch_size: int = 1
    data_rank: int = 0
    data_size: int = 1

    def __post_init__(self) -> None:
        if self.micro_batch_size < 1:
            raise ConfigError(f"`micro_batch_size` must be at least 1, got {self.micro_batch_size}")
        if not 0 <= self.data_rank < self.data_size:
            raise ConfigError(f"`data_rank` must lie in [0, data_size), got {self.data_rank} of {self.data_size}")

    @property
    def samples_per_turn(self) -> int:
        """Samples that all ranks together consume with one micro batch each."""
        return self.micro_batch_size * self.data_size

    def num_micro_batches(self, num_samples: int, *, consumed_samples: int = 0) -> int:
        """Micro batches left of `num_samples`, the same number for every rank: an incomplete last turn is dropped."""
        _require_position(consumed_samples)
        return max(0, num_samples - consumed_samples) // self.samples_per_turn

    def micro_batch(self, number: int, *, consumed_samples: int = 0) -> range:
        """The samples of this rank's micro batch `number`, counted from where `consumed_samples` have been consumed."""
        _require_position(consumed_samples)
        start = consumed_samples + number * self.samples_per_turn + self.data_rank * self.micro_batch_size
        return range(start, start + self.micro_batch_size)


def _require_position(consumed_samples: int) -> None:
    if consumed_samples < 0:
        raise ConfigError(f"`consumed_samples` must not be negative, got {consumed_samples}")
