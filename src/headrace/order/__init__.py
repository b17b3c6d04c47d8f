"""Which tokens make sample i. Integers only: nothing here reads a token, and nothing here knows a store.

sample.py        what a sample is made of, and what an order must answer
split.py         the part of a corpus a split takes
sample_index.py  documents in order -> where each sample starts
plan.py          the rules, and how many epochs and samples follow
megatron.py      MegatronOrder: GPTDataset's order for a seed
index_cache.py   index arrays on disk, shared with Megatron
draw.py          which corpus of a blend comes next
blend.py         BlendedOrder: samples drawn from several corpora by weight
best_fit.py      BestFitOrder: whole documents in rows, none split unless longer than a row
epochs.py        EpochOrder: a finite order again and again, shuffled anew
shard.py         which samples a data rank takes, from any point on, for any number of ranks
"""

from headrace.order.best_fit import BestFitOrder
from headrace.order.blend import BlendedOrder, blend_megatron, parse_blend, requested_per_corpus
from headrace.order.epochs import EpochOrder
from headrace.order.index_cache import IndexCache, MegatronNames
from headrace.order.megatron import MegatronOrder
from headrace.order.plan import OrderRules
from headrace.order.sample import Part, SampleOrder
from headrace.order.shard import Shard
from headrace.order.split import split_range

__all__ = [
    "BestFitOrder",
    "BlendedOrder",
    "EpochOrder",
    "IndexCache",
    "MegatronNames",
    "MegatronOrder",
    "OrderRules",
    "Part",
    "SampleOrder",
    "Shard",
    "blend_megatron",
    "parse_blend",
    "requested_per_corpus",
    "split_range",
]
