"""Stand-in: the batch path as core_v0.18.0 has it in megatron.core.utils, a function of the batch alone."""

import megatron.core.utils
import torch
from megatron.training import get_args


def get_batch_on_this_tp_rank(
    batch,
    is_sft,
    is_hybrid_cp,
    create_attention_mask_in_dataloader,
    broadcast_src_rank,
    broadcast_group,
    cp_size,
    tp_rank,
    micro_batch_size,
    seq_length,
    mtp_on_this_rank,
    pipeline_model_parallel_size=1,
    is_pipeline_first_stage=False,
    is_pipeline_last_stage=False,
):
    """One broadcast per field that the stage needs."""
    assert not getattr(get_args(), "enable_share_memory", False), "the adapter replaces this function"
    whole = pipeline_model_parallel_size == 1 or mtp_on_this_rank
    first, last = whole or is_pipeline_first_stage, whole or is_pipeline_last_stage

    def shared(name, dtype, is_needed):
        if not is_needed:
            return None
        field = batch[name] if tp_rank == 0 else torch.empty((micro_batch_size, seq_length), dtype=dtype)
        torch.distributed.broadcast(field, broadcast_src_rank, group=broadcast_group)
        return field

    tokens = shared("tokens", torch.int64, first)
    labels = shared("labels", torch.int64, last)
    loss_mask = shared("loss_mask", torch.float32, last)
    position_ids = shared("position_ids", torch.int64, first)
    batch = {
        "tokens": tokens,
        "labels": labels,
        "loss_mask": loss_mask,
        "position_ids": position_ids,
        "attention_mask": None,
        "cu_seqlens": None,
        "cu_seqlens_padded": None,
        "max_seqlen": None,
        "local_cp_size": None,
        "hybrid_cp_group": None,
    }
    return batch


megatron.core.utils.get_batch_on_this_tp_rank = get_batch_on_this_tp_rank
