"""What this rank is, as Megatron's parallel state and arguments say: asked once the process groups exist."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from headrace.adapters.megatron.fields import Rules
from headrace.errors import ConfigError
from headrace.packing import Schedule, Stage, keys_of_stages


@dataclass(frozen=True, kw_only=True, slots=True)
class Here:
    """This rank in its replica."""

    ranks: tuple[int, ...]
    """Its tensor-parallel group, job-wide numbers."""
    tp_rank: int
    dp_rank: int
    dp_size: int
    pp_size: int
    stage: Stage
    """Of the rank; a chunk of layers on it may need less."""
    schedule: Schedule
    device: torch.device
    in_flight: int
    """Micro batches that this rank may still need when it takes the next."""


def megatron_args() -> Any:
    """Megatron's own global arguments."""
    return sys.modules["megatron.training"].get_args()


def here(args: Any, *, is_mindspeed: bool) -> Here:
    """Asks megatron.core.parallel_state. ConfigError for what is not supported."""
    from megatron.core import parallel_state as mpu

    pp_size = mpu.get_pipeline_model_parallel_world_size()
    if is_mindspeed and mpu.get_context_parallel_world_size() > 1:
        raise ConfigError(
            "--enable-share-memory with MindSpeed-LLM does not support context parallelism: --context-parallel-size "
            f"must be 1, got {mpu.get_context_parallel_world_size()}"
        )
    return Here(
        ranks=tuple(dist.get_process_group_ranks(mpu.get_tensor_model_parallel_group())),
        tp_rank=mpu.get_tensor_model_parallel_rank(),
        dp_rank=mpu.get_data_parallel_rank(),
        dp_size=mpu.get_data_parallel_world_size(),
        pp_size=pp_size,
        stage=stage_here(
            pp_size,
            is_first=mpu.is_pipeline_first_stage(),
            is_last=mpu.is_pipeline_last_stage(),
            # MindSpeed-LLM's prediction layers are always on the last stage.
            has_prediction=is_mindspeed and bool(args.mtp_num_layers) and mpu.is_pipeline_last_stage(),
        ),
        schedule="dualpipev" if getattr(args, "schedules_method", None) == "dualpipev" else "1f1b",
        device=_device(),
        in_flight=_in_flight(args, pp_size),
    )


def stage_here(pp_size: int, *, is_first: bool, is_last: bool, has_prediction: bool) -> Stage:
    """The stage in the sense of headrace.packing.stages, in the order in which Megatron asks."""
    if pp_size == 1:
        return "only"
    if has_prediction:
        return "mtp"
    return "first" if is_first else "last" if is_last else "middle"


def keys_needed(stage: Stage, schedule: Schedule, args: Any, *, is_mindspeed: bool) -> frozenset[str]:
    """Megatron's names of the fields that a stage takes, for any batch."""
    keys = keys_of_stages((stage,), schedule=schedule)
    if is_mindspeed:  # every stage's rotary embedding takes global positions, and a mask where there is one
        keys |= {"attention_mask"} | ({"position_ids"} if args.reset_position_ids else set())
    return keys


def rules_here(where: Here, args: Any, *, is_mindspeed: bool) -> Rules:
    """For all micro batches of this rank. Prediction layers may sit on one chunk of several: then everything is
    written, and each call picks its part."""
    may_predict = where.pp_size > 1 and bool(getattr(args, "mtp_num_layers", None))
    stage: Stage = "mtp" if may_predict else where.stage
    is_sft = getattr(args, "sft", False) or getattr(args, "dataloader_inter_document_masking", False)
    return Rules(
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        has_fixed_shape=not (is_sft or getattr(args, "variable_seq_lengths", False)),
        shares_positions=bool(args.reset_position_ids) or bool(is_sft),
        eod=_eod(),
        keys=keys_needed(stage, where.schedule, args, is_mindspeed=is_mindspeed),
    )


def _eod() -> int | None:
    """The tokenizer's; None where there is no tokenizer, or it has none."""
    try:
        eod = sys.modules["megatron.training"].get_tokenizer().eod
    except (AttributeError, AssertionError, NotImplementedError):
        return None
    return None if eod is None else int(eod)


def _device() -> torch.device:
    if not torch.accelerator.is_available():
        return torch.device("cpu")
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    return torch.device(kind.type, torch.get_device_module(kind).current_device())


def _in_flight(args: Any, pp_size: int) -> int:
    """An upper bound of the micro batches between forward and backward, and one more for what is being taken.

    megatron/core/pipeline_parallel/schedules.py: a rank warms up with at most 2 * (pp_size - 1) + (chunks - 1) * group
    forward passes; 1F1B and DualPipeV need fewer than 2 * pp_size.
    """
    if pp_size == 1:
        return 1
    num_chunks = getattr(args, "virtual_pipeline_model_parallel_size", None) or 1
    group = max(getattr(args, "microbatch_group_size_per_vp_stage", None) or pp_size, pp_size)
    return 2 * pp_size + (num_chunks - 1) * group + 2
