"""The signature and the keys of core_v0.18.0's pure function."""


def get_batch_on_this_tp_rank(
    batch,
    tp_rank,
    mtp_on_this_rank,
    pipeline_model_parallel_size=1,
    is_pipeline_first_stage=False,
    is_pipeline_last_stage=False,
):
    batch = {
        "tokens": None,
        "labels": None,
        "loss_mask": None,
        "position_ids": None,
        "attention_mask": None,
        "cu_seqlens": None,
        "cu_seqlens_padded": None,
        "max_seqlen": None,
        "local_cp_size": None,
        "hybrid_cp_group": None,
    }
    return batch  # noqa: RET504
