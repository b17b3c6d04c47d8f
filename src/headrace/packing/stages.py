"""What each pipeline stage needs of a batch. Names are Megatron's.

| stage  | needs                                                                                             |
|--------|---------------------------------------------------------------------------------------------------|
| only   | everything                                                                                        |
| first  | tokens, position_ids                                                                              |
| middle | nothing but where documents end: attention needs that on every stage (NVIDIA/Megatron-LM#4092)    |
| last   | labels, loss_mask                                                                                 |
| mtp    | a stage with prediction layers, wherever it is: it embeds tokens and computes a loss: everything  |

First and last also take an explicit attention mask, all stages the boundaries when documents are packed. Under
DualPipeV the first stage holds the last chunk of layers too, so first and last need everything; MindSpeed-LLM's middle
stages then take the positions of packed documents and the mask as well.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, get_args

from headrace.errors import ConfigError

Stage = Literal["only", "first", "middle", "last", "mtp"]
Schedule = Literal["1f1b", "dualpipev"]

TOKEN_KEYS = ("tokens", "labels", "loss_mask", "position_ids")
_OF_STAGE = {
    "only": TOKEN_KEYS,
    "mtp": TOKEN_KEYS,
    "first": ("tokens", "position_ids"),
    "middle": (),
    "last": ("labels", "loss_mask"),
}


def stage_keys(
    stage: Stage,
    *,
    packed: bool = True,
    attention_mask: bool = False,
    cp_size: int = 1,
    schedule: Schedule = "1f1b",
) -> tuple[str, ...]:
    """The keys that a stage needs, in Megatron's order; empty where it needs no batch at all.

    `packed`: documents have boundaries. `attention_mask`: the batch has an explicit one. ConfigError for an unknown
    stage or schedule.
    """
    if stage not in _OF_STAGE or schedule not in get_args(Schedule):
        raise ConfigError(
            f"stage must be one of {', '.join(_OF_STAGE)} and schedule one of {', '.join(get_args(Schedule))}, "
            f"got {stage!r} and {schedule!r}"
        )
    keys = set(_OF_STAGE[stage])
    takes_mask = stage != "middle"
    if schedule == "dualpipev":
        keys |= set(TOKEN_KEYS) if stage != "middle" else {"position_ids"} if packed else set()
        takes_mask = True
    if attention_mask and takes_mask:
        keys.add("attention_mask")
    if packed:
        keys |= {"cu_seqlens", "max_seqlen"} | ({"cu_seqlens_padded"} if cp_size > 1 else set())
    order = (*TOKEN_KEYS, "attention_mask", "cu_seqlens", "cu_seqlens_padded", "max_seqlen")
    return tuple(key for key in order if key in keys)


def stage_of(pp_rank: int, pp_size: int, *, virtual_rank: int = 0, virtual_size: int = 1) -> Stage:
    """The stage that a chunk of layers is: chunk `virtual_rank` of `virtual_size` on rank `pp_rank` of `pp_size`.

    With virtual stages the first chunk of the first rank embeds and the last chunk of the last rank computes the loss;
    all others are middle, also on the first and last rank.
    """
    if not 0 <= pp_rank < pp_size or not 0 <= virtual_rank < virtual_size:
        raise ConfigError(
            f"pp_rank must lie in [0, pp_size) and virtual_rank in [0, virtual_size), got {pp_rank} of {pp_size} and "
            f"{virtual_rank} of {virtual_size}"
        )
    first = pp_rank == 0 and virtual_rank == 0
    last = pp_rank == pp_size - 1 and virtual_rank == virtual_size - 1
    if first and last:
        return "only"
    return "first" if first else "last" if last else "middle"


def stages_of(pp_rank: int, pp_size: int, *, virtual_size: int) -> tuple[Stage, ...]:
    """The stages of all chunks of a rank, in the order of its chunks: what `View.stage` takes for virtual stages."""
    return tuple(
        stage_of(pp_rank, pp_size, virtual_rank=virtual_rank, virtual_size=virtual_size)
        for virtual_rank in range(virtual_size)
    )


def keys_of_stages(stages: Iterable[Stage], *, schedule: Schedule = "1f1b") -> frozenset[str]:
    """Everything that one process holding these stages may need, whatever the batch is."""
    return frozenset(
        key
        for stage in stages
        for key in stage_keys(stage, packed=True, attention_mask=True, cp_size=2, schedule=schedule)
    )
