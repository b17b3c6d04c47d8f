"""One data rank's share of balanced steps: Shard, with the samples of each step dealt out by cost.

Places are Shard's: the job's state is still the number of samples consumed, counted place by place. What differs is
which sample lies where inside a step, so between two steps exactly the samples below that number are consumed, and
inside one all places below it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from headrace.errors import ConfigError, FormatError
from headrace.order.balance import StepShape, deal
from headrace.order.shard import Shard


@dataclass(frozen=True, kw_only=True, slots=True)
class Dealing:
    """What decides how a step is dealt out. Inside a step, a checkpoint fits only a job with an equal one."""

    data_size: int
    micro_batches_per_step: int
    micro_batch_size: int
    attention_cost: float

    def __post_init__(self) -> None:
        if self.micro_batches_per_step < 1:
            raise ConfigError(f"`micro_batches_per_step` must be at least 1, got {self.micro_batches_per_step}")
        if not 0 <= self.attention_cost < 2**20:
            raise ConfigError(f"`attention_cost` is a small number, not negative, got {self.attention_cost}")

    @property
    def shape(self) -> StepShape:
        """A whole step."""
        return StepShape(
            data_size=self.data_size,
            micro_batches=self.micro_batches_per_step,
            micro_batch_size=self.micro_batch_size,
        )

    @property
    def terms(self) -> str:
        """As a sentence names it."""
        return (
            f"data_size {self.data_size}, micro_batches_per_step {self.micro_batches_per_step}, micro_batch_size "
            f"{self.micro_batch_size}, attention_cost {self.attention_cost:g}"
        )


def turn_of(state: Mapping[str, Any] | None, dealing: Dealing | None) -> int:
    """How many micro batches into its step a checkpoint with this state is. `dealing` None: this job does not balance.

    `state` is what BalancedShard.state_after gave, None between two steps, where every job may continue. ConfigError
    if it is of a step that this job would deal out otherwise: samples would come twice, others not at all. FormatError
    for what state_after never gave.
    """
    if state is None:
        return 0
    try:
        turn, then = int(state["turn"]), Dealing(**state["dealing"])
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(f"the feed's state is damaged: it is none of a balanced step: {error}") from error
    if then != dealing:
        now = "does not balance" if dealing is None else f"deals out with {dealing.terms}"
        raise ConfigError(
            f"the checkpoint was taken after {turn} of {then.micro_batches_per_step} micro batches of a balanced step, "
            f"dealt out with {then.terms}; this job {now}. Continue with the former, or from a checkpoint between steps"
        )
    return turn


class BalancedShard:
    """Micro batches of one data rank from `consumed_samples` on, `turn` micro batches into a step.

    `cost(sample)` is asked for every sample of a step, once, when its first micro batch is: the same integers in every
    process, or ranks would read one sample twice. The last step has as many turns as there are samples for.
    """

    def __init__(
        self,
        dealing: Dealing,
        cost: Callable[[int], int],
        *,
        data_rank: int,
        num_samples: int,
        consumed_samples: int = 0,
        turn: int = 0,
    ) -> None:
        self._shard = Shard(micro_batch_size=dealing.micro_batch_size, data_rank=data_rank, data_size=dealing.data_size)
        self._dealing, self._shape = dealing, dealing.shape
        self._cost = cost
        self._turn = turn
        self._origin = consumed_samples - turn * self._shard.samples_per_turn
        if self._origin < 0 or not 0 <= turn < dealing.micro_batches_per_step:
            raise ConfigError(f"{consumed_samples} consumed samples cannot end {turn} micro batches into a step")
        self._num_turns = self._shard.num_micro_batches(num_samples, consumed_samples=self._origin)
        self._dealt: tuple[int, Sequence[int]] = (-1, ())

    def __len__(self) -> int:
        """Micro batches left, the same number for every rank: an incomplete last turn is dropped."""
        return self._num_turns - self._turn

    def state_after(self, number: int) -> dict[str, Any] | None:
        """What a checkpoint needs beside the samples consumed once micro batch `number` is; None between two steps.

        The same on every rank: plain numbers.
        """
        turn = (self._turn + number + 1) % self._dealing.micro_batches_per_step
        return {"turn": turn, "dealing": asdict(self._dealing)} if turn else None

    def micro_batch(self, number: int) -> tuple[int, ...]:
        """The samples of micro batch `number`."""
        step, turn = divmod(self._turn + number, self._shape.micro_batches)
        first = self._origin + step * self._shape.num_samples
        order = self._order_of(step, first)
        return tuple(first + order[place] for place in self._shape.places(turn, self._shard.data_rank))

    def _order_of(self, step: int, first: int) -> Sequence[int]:
        if self._dealt[0] != step:
            turns = min(self._shape.micro_batches, self._num_turns - step * self._shape.micro_batches)
            shape = replace(self._shape, micro_batches=turns)
            costs = [self._cost(sample) for sample in range(first, first + shape.num_samples)]
            self._dealt = (step, deal(costs, shape))
        return self._dealt[1]
