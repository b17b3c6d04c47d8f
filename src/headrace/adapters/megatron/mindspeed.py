"""What only MindSpeed-LLM has: setters through which its attention learns where documents end.

Names as in mindspeed_llm/training/utils.py and mindspeed/utils.py (MindSpeed-LLM c77308a1, MindSpeed 028de58c), looked
up only if these modules are loaded. Read, not run: there is no Ascend device and no MindSpeed here.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from headrace.adapters.megatron.fields import Boundaries
from headrace.errors import ConfigError
from headrace.packing import moved_boundaries, positions_after_moving

_HOMES = (
    "mindspeed_llm.training.utils",
    "mindspeed.core.context_parallel.get_batch_utils",
    "mindspeed.utils",
    "mindspeed.core.pipeline_parallel.dualpipev.dualpipev_schedules",
)


def announce(boundaries: Boundaries, position_ids: torch.Tensor | None, args: Any) -> list[int] | list[list[int]]:
    """Set what attention reads, and return it: ends as host ints, one list per prediction depth if there are any."""
    actual_seq_len: list[int] | list[list[int]] = list(boundaries.actual_seq_len)
    if args.mtp_num_layers:
        cu_seqlens = np.array([0, *boundaries.actual_seq_len], np.int32)
        per_depth = [
            moved_boundaries(cu_seqlens, depth, seq_length=args.seq_length)[1:].tolist()
            for depth in range(args.mtp_num_layers + 1)
        ]
        if args.reset_position_ids and position_ids is not None and _is_announced_by_depth():
            _announce_depths(cu_seqlens, per_depth[1:], tuple(position_ids.shape))
        actual_seq_len = per_depth
    _named("set_actual_seq_len")(actual_seq_len)
    if args.reset_position_ids and position_ids is not None:
        _named("set_position_ids")(position_ids.transpose(0, 1).contiguous())  # [S, B], as rotary embedding takes them
    return actual_seq_len


class EndsOfDepths:
    """Stands for MindSpeed-LLM's shared memory beside the positions of the prediction depths.

    There the first rank of a tensor-parallel group writes the ends that it finds for a depth and the others read them;
    here every rank has them, exact, in the order of the depths.
    """

    def __init__(self, ends: Sequence[list[int]]) -> None:
        self._ends = cycle(ends)

    def write(self, actual_seq_len: Any) -> None:
        """Nothing: what it would carry is known."""

    def read(self) -> list[int]:
        """Of the next depth."""
        return next(self._ends)


def _is_announced_by_depth() -> bool:
    """MindSpeed-LLM does it on the stage that its DualPipeV schedule calls the one that post-processes."""
    is_post_process = _find("get_post_process_flag")
    return _find("set_mtp_position_ids") is not None and is_post_process is not None and bool(is_post_process())


def _announce_depths(cu_seqlens: npt.NDArray[np.int32], ends: Sequence[list[int]], shape: tuple[int, ...]) -> None:
    """Positions of depth 1 and following: int64 [B, S] on the host, as MindSpeed-LLM has them, but on every rank."""
    positions = [
        torch.from_numpy(positions_after_moving(np.empty(shape, np.int64), depth, cu_seqlens=cu_seqlens))
        for depth in range(1, len(ends) + 1)
    ]
    _named("set_mtp_position_ids")((positions, EndsOfDepths(ends)))


def stop_folding(replace_everywhere: Callable[[Any, Any], int]) -> None:
    """recompute_valid_actual_seq_len takes documents of one token for padding and joins them to the next document, so
    that both see each other. The boundaries that come from here are exact, so they stay as they are."""
    original = _find("recompute_valid_actual_seq_len")
    if original is None:
        return
    parameters = list(inspect.signature(original).parameters)
    index = parameters.index("actual_seq_len") if "actual_seq_len" in parameters else 0
    returns_tensor = index == 0  # (actual_seq_len, micro_batch_size): callers go on with .tolist()

    def recompute_valid_actual_seq_len(*args: Any, **kwargs: Any) -> Any:
        actual_seq_len = kwargs["actual_seq_len"] if "actual_seq_len" in kwargs else args[index]
        return torch.as_tensor(actual_seq_len) if returns_tensor else actual_seq_len

    replace_everywhere(original, recompute_valid_actual_seq_len)


def _find(name: str) -> Any:
    return next((found for home in _HOMES if (found := getattr(sys.modules.get(home), name, None))), None)


def _named(name: str) -> Any:
    found = _find(name)
    if found is None:
        raise ConfigError(f"this MindSpeed-LLM has no {name} in {', '.join(_HOMES)}: not a version known here")
    return found
