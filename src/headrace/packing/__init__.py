"""Token rows to the fields of a batch: labels, loss mask, positions, document boundaries, in one pass.

rules.py       what the user decides
layouts.py     what frameworks call the fields, and what their labels mean
boundaries.py  where documents end
packer.py      the call into native/pack.c
"""

from headrace.packing.boundaries import actual_seq_len_from_cu_seqlens, cu_seqlens_from_actual_seq_len
from headrace.packing.layouts import LAYOUTS, batch_spec
from headrace.packing.packer import PackCounts, Packer, pack
from headrace.packing.rules import PackRules

__all__ = [
    "LAYOUTS",
    "PackCounts",
    "PackRules",
    "Packer",
    "actual_seq_len_from_cu_seqlens",
    "batch_spec",
    "cu_seqlens_from_actual_seq_len",
    "pack",
]
