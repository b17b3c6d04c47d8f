"""A corpus again and again, each epoch whole and in an order of its own.

Megatron repeats a corpus inside one order (`num_samples`): its epochs are shuffled together, so a document may come a
second time before another came once, and another run length is another order. Here epoch e is the one-epoch order
for seed + e: every epoch reads every document once, and a longer run starts like a shorter one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from headrace.errors import ConfigError
from headrace.order.megatron import MegatronOrder
from headrace.order.plan import IntArray, OrderRules
from headrace.order.sample import Part


class EpochOrder:
    """`num_epochs` one-epoch orders end to end. See SampleOrder for what it answers.

    Every epoch has the same number of samples, so sample i belongs to epoch i // samples_per_epoch. An epoch's order is
    built when it is first asked for (30 ms per million documents), and kept while it is one of the last two.
    """

    def __init__(self, lengths: IntArray, rules: OrderRules, *, num_epochs: int) -> None:
        if num_epochs < 1:
            raise ConfigError(f"`num_epochs` must be at least 1, got {num_epochs}")
        if rules.num_samples is not None:
            raise ConfigError(f"with `num_epochs`, `num_samples` must be None, got {rules.num_samples}")
        self.rules = rules
        self.num_epochs = num_epochs
        self._lengths = lengths
        self._orders = {0: MegatronOrder(lengths, rules)}
        self.samples_per_epoch = len(self._orders[0])

    @property
    def row_tokens(self) -> int:
        """Tokens of a full sample."""
        return self.rules.sequence_length + self.rules.extra

    def __len__(self) -> int:
        """Number of samples of all epochs."""
        return self.num_epochs * self.samples_per_epoch

    def parts(self, sample: int) -> Sequence[Part]:
        """The parts of one sample, see SampleOrder."""
        if not 0 <= sample < len(self):
            raise IndexError(f"sample {sample} of {len(self)}")
        epoch, inside = divmod(sample, self.samples_per_epoch)
        return self._order_of(epoch).parts(inside)

    def _order_of(self, epoch: int) -> MegatronOrder:
        if (order := self._orders.get(epoch)) is None:
            seed = (self.rules.seed + epoch) % 2**32
            order = MegatronOrder(self._lengths, replace(self.rules, seed=seed))
            # Two, because a micro batch may reach over the end of an epoch.
            latest = next(reversed(self._orders))
            self._orders = {latest: self._orders[latest], epoch: order}
        return order
