"""What stands in the place of the broadcasts, and in the place of Megatron's forward step where that has to be known.

Up to 0.17 Megatron's function asks the iterator; then the replacement does. From 0.18 on the script's get_batch asks
it, on the reading rank alone, moves each field to the device and passes the dict to a pure function that no longer
knows which iterator it came from. There the schedules' `forward_step` is wrapped: the script is handed a Turn, whose
`next` goes through the ring, and on the other ranks the pure function takes that Turn's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from headrace.adapters.megatron import mindspeed
from headrace.adapters.megatron.fields import Boundaries
from headrace.adapters.megatron.places import Place, replace_everywhere
from headrace.adapters.megatron.shared import SharedBatches
from headrace.adapters.megatron.stages import here, keys_needed, megatron_args, rules_here, stage_here
from headrace.errors import ConfigError
from headrace.packing import Stage

_last: list[Boundaries] = []


def boundaries() -> Boundaries:
    """Where the documents of the micro batch that this rank took last end. ConfigError before the first."""
    if not _last:
        raise ConfigError("no micro batch has been taken yet: boundaries() is of the last one")
    return _last[0]


class Taken(dict[str, Any]):
    """A micro batch that has gone through the ring, while the script's get_batch moves its fields to the device."""

    def __init__(self, fields: dict[str, Any]) -> None:
        super().__init__(fields)
        self.fields = fields
        """As they were: what belongs on the host stays there."""


class Turn:
    """The iterator that a script's forward_step is handed for one micro batch."""

    def __init__(self, path: BatchPath, data_iterator: Any) -> None:
        self._path, self._data_iterator = path, data_iterator

    def __iter__(self) -> Turn:
        return self

    def __next__(self) -> Taken:
        return Taken(self._path.take(self._data_iterator))


class BatchPath:
    """The replacement for one place. Asks Megatron where it is at the first micro batch."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._shared: SharedBatches | None = None
        self._turn: Turn | None = None

    def put_in_place(self) -> None:
        """From here on every module that knows Megatron's function has this one."""
        takes_iterator = self._place.takes == "data_iterator"
        replacement: Callable[..., Any] = self._from_iterator if takes_iterator else self._from_batch
        replace_everywhere(self._place.original, wraps(self._place.original)(_plain(replacement)))
        if not takes_iterator:
            self._wrap_forward_step()
        if self._place.is_mindspeed:
            mindspeed.stop_folding(replace_everywhere)

    def take(self, data_iterator: Any) -> dict[str, Any]:
        """The next micro batch of this rank."""
        taken = self.shared.take(data_iterator)
        _last[:] = [taken["boundaries"]]
        return taken

    @property
    def shared(self) -> SharedBatches:
        if self._shared is None:
            args = megatron_args()
            where = here(args, is_mindspeed=self._place.is_mindspeed)
            rules = rules_here(where, args, is_mindspeed=self._place.is_mindspeed)
            self._shared = SharedBatches(where, rules)
        return self._shared

    def _from_iterator(self, data_iterator: Any, mtp_on_this_rank: bool = False) -> Any:
        """megatron.training.utils.get_batch_on_this_tp_rank, and MindSpeed-LLM's."""
        taken = self.take(data_iterator)
        stage: Stage = "mtp" if mtp_on_this_rank and self.shared.where.pp_size > 1 else self.shared.where.stage
        batch = self._for_stage(taken, stage)
        if not self._place.is_mindspeed:
            return batch
        actual_seq_len = mindspeed.announce(taken["boundaries"], taken.get("position_ids"), megatron_args())
        return (batch, actual_seq_len) if self._place.returns_pair else batch

    def _from_batch(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """megatron.core.utils.get_batch_on_this_tp_rank."""
        given = self._place.signature.bind(*args, **kwargs)
        given.apply_defaults()
        said = given.arguments
        batch = said["batch"]
        if isinstance(batch, Taken):
            taken = batch.fields
        elif said["tp_rank"] == 0:  # a loop without Megatron's schedules: the batch is on the device already
            taken = self.take(iter([batch]))
        else:
            taken = self.take(None) if self._turn is None else next(self._turn).fields
        stage = stage_here(
            said["pipeline_model_parallel_size"],
            is_first=said["is_pipeline_first_stage"],
            is_last=said["is_pipeline_last_stage"],
            has_prediction=said["mtp_on_this_rank"],
        )
        return self._for_stage(taken, stage)

    def _for_stage(self, taken: dict[str, Any], stage: Stage) -> dict[str, Any]:
        """The keys of Megatron's dict in its order, None where the stage has no use for a field."""
        schedule = self.shared.where.schedule
        keys = keys_needed(stage, schedule, megatron_args(), is_mindspeed=self._place.is_mindspeed)
        return {key: taken.get(key) if key in keys | {"local_cp_size"} else None for key in self._place.keys}

    def _wrap_forward_step(self) -> None:
        from megatron.core.pipeline_parallel import schedules

        original = schedules.forward_step

        @wraps(original)
        def forward_step(forward_step_func: Any, data_iterator: Any, *args: Any, **kwargs: Any) -> Any:
            self._turn = turn = Turn(self, data_iterator)
            try:
                return original(forward_step_func, turn, *args, **kwargs)
            finally:
                self._turn = None

        replace_everywhere(original, forward_step)


def _plain(method: Callable[..., Any]) -> Callable[..., Any]:
    """A function: bound methods take no attributes from `wraps`."""

    def get_batch_on_this_tp_rank(*args: Any, **kwargs: Any) -> Any:
        return method(*args, **kwargs)

    return get_batch_on_this_tp_rank
