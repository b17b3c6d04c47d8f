"""Token rows to the fields of a batch (labels, loss mask, positions, boundaries), and the parts that ranks take.

rules.py             what the user decides
layouts.py           what frameworks call the fields, and what their labels mean
boundaries.py        where documents end                     conventions.py  how others write that down
packer.py            the call into native/pack.c
view.py              what one rank takes of a batch          cutting.py      taking it
context_parallel.py  which tokens                            prediction.py   of which prediction depth
stages.py            which fields                            buffers.py      memory for copies
supervised.py        targets of their own, as in chats       masks.py        a dense attention mask
"""

from headrace.packing.boundaries import actual_seq_len_from_cu_seqlens, cu_seqlens_from_actual_seq_len
from headrace.packing.context_parallel import (
    document_index,
    local_boundaries,
    pad_boundaries,
    padded_source,
    row_chunks,
    row_index,
)
from headrace.packing.conventions import check_boundaries, read_boundaries
from headrace.packing.cutting import Cutter, is_needed, take_view
from headrace.packing.layouts import LAYOUTS, batch_spec
from headrace.packing.masks import dense_mask
from headrace.packing.packer import PackCounts, Packer, pack
from headrace.packing.prediction import moved_boundaries, moved_left, positions_after_moving
from headrace.packing.rules import PackRules
from headrace.packing.stages import Schedule, Stage, keys_of_stages, stage_keys, stage_of, stages_of
from headrace.packing.supervised import example_of_turns
from headrace.packing.view import View

__all__ = [
    "LAYOUTS",
    "Cutter",
    "PackCounts",
    "PackRules",
    "Packer",
    "Schedule",
    "Stage",
    "View",
    "actual_seq_len_from_cu_seqlens",
    "batch_spec",
    "check_boundaries",
    "cu_seqlens_from_actual_seq_len",
    "dense_mask",
    "document_index",
    "example_of_turns",
    "is_needed",
    "keys_of_stages",
    "local_boundaries",
    "moved_boundaries",
    "moved_left",
    "pack",
    "pad_boundaries",
    "padded_source",
    "positions_after_moving",
    "read_boundaries",
    "row_chunks",
    "row_index",
    "stage_keys",
    "stage_of",
    "stages_of",
    "take_view",
]
