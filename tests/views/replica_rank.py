"""One rank of a TP x CP x PP replica: its rank in the environment, the corpus and the meeting as arguments.

Takes its view of every batch from the one feed of the replica and compares it with what the index functions say of the
whole batch, read here once more.
"""

from __future__ import annotations

import json
import os
import sys

import numpy as np
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from headrace import PackedTokens
from headrace.packing import View, document_index, moved_left, pad_boundaries, padded_source, stage_keys, stage_of
from headrace.torch import Feed

TP, CP, PP, NUM_BATCHES = 2, 2, 2, 6


def main(corpus: str, meeting: str) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=int(os.environ["RANK"]), world_size=TP * CP * PP
    )
    mesh = init_device_mesh("cpu", (PP, CP, TP), mesh_dim_names=("pp", "cp", "tp"))
    pp_rank, cp_rank, _ = mesh.get_coordinate()
    stage = stage_of(pp_rank, PP)
    # The last stage holds a prediction layer.
    depth = 1 if stage == "last" else 0
    view = View(cp_rank=cp_rank, cp_size=CP, stage=stage, mtp_depth=depth)
    source = PackedTokens(corpus, seq_length=64, micro_batch_size=2)
    reference = source.open_batches()
    count = feeder = 0
    with Feed(source, group=mesh, view=view) as feed:
        for count, batch in enumerate(feed, 1):
            assert_part({name: np.array(field) for name, field in batch.items()}, reference[count - 1], view)
            feeder = feed.stats().writer_pid
            if count == NUM_BATCHES:
                break
        bytes_per_slot = feed.stats().slot_bytes
    facts = [None] * dist.get_world_size()
    dist.all_gather_object(facts, (count, feeder, bytes_per_slot))
    assert len(set(facts)) == 1, f"one feeder, one ring, as many batches for everybody: {facts}"
    assert count == NUM_BATCHES
    print(json.dumps({"rank": dist.get_rank(), "stage": stage, "fields": sorted(batch)}))
    dist.destroy_process_group()


def assert_part(part: dict, whole: dict, view: View) -> None:
    """`part` is what document_index, moved_left and stage_keys say of `whole`."""
    cu_seqlens = whole["cu_seqlens"]
    padded = pad_boundaries(cu_seqlens, CP)
    source = padded_source(cu_seqlens, padded)[document_index(padded, CP, view.cp_rank)]
    keys = stage_keys("mtp" if view.mtp_depth else view.stages[0], cp_size=CP)
    mtp = {f"mtp_{name}" for name in keys if name in ("tokens", "labels", "loss_mask", "position_ids")}
    assert set(part) == set(keys) | (mtp if view.mtp_depth else set()), sorted(part)
    assert part["cu_seqlens"].tolist() == cu_seqlens.tolist()
    assert part["cu_seqlens_padded"].tolist() == padded.tolist()
    assert part["max_seqlen"] == np.diff(padded).max()
    for name in ("tokens", "labels", "loss_mask"):
        fields = {name: whole[name]}
        if view.mtp_depth:
            fields[f"mtp_{name}"] = moved_left(whole[name], 1, cu_seqlens=cu_seqlens)
        for key, field in fields.items():
            if key in part:
                assert np.array_equal(part[key].ravel(), np.where(source < 0, 0, field.ravel()[source])), key
    if "position_ids" in part:
        within = np.arange(padded[-1]) - np.repeat(padded[:-1], np.diff(padded))
        assert np.array_equal(part["position_ids"].ravel(), within[document_index(padded, CP, view.cp_rank)])


if __name__ == "__main__":
    main(*sys.argv[1:])
