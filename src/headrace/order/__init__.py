"""Which tokens make sample i. Integers only: nothing here reads a token, and nothing here knows a store.

sample.py         what a sample is made of, and what an order must answer
split.py          the part of a corpus a split takes
sample_index.py   documents in order -> where each sample starts
plan.py           the rules, and how many epochs and samples follow
megatron.py       MegatronOrder: GPTDataset's order for a seed
index_cache.py    index arrays on disk, shared with Megatron
draw.py           which corpus of a blend comes next
blend.py          BlendedOrder: samples drawn from several corpora by weight
best_fit.py       BestFitOrder: whole documents in rows, none split unless longer than a row
epochs.py         EpochOrder: a finite order again and again, shuffled anew
permutation.py    a shuffle that needs no memory
elastic.py        ElasticOrder: samples in a computed order, O(1) memory and start
elastic_blend.py  ElasticBlend: corpora by weight, O(1) per sample
shard.py          which samples a data rank takes, from any point on, for any number of ranks
balance_cost.py   what a row costs, from the lengths of its documents
balance.py        dealing out the samples of a step by cost, and the bound nobody can beat
balanced_shard.py BalancedShard: a data rank's share of balanced steps
"""

from headrace.order.balance import StepShape, deal, lowest_slowest_rank, step_cost
from headrace.order.balance_cost import DEFAULT_ATTENTION_COST, cost_of, laid_out_lengths, measured_attention_cost
from headrace.order.balanced_shard import BalancedShard, Dealing, turn_of
from headrace.order.best_fit import BestFitOrder
from headrace.order.blend import BlendedOrder, blend_megatron, parse_blend, requested_per_corpus
from headrace.order.elastic import ElasticOrder
from headrace.order.elastic_blend import ElasticBlend
from headrace.order.epochs import EpochOrder
from headrace.order.index_cache import IndexCache, MegatronNames
from headrace.order.megatron import MegatronOrder
from headrace.order.plan import OrderRules
from headrace.order.sample import Part, SampleOrder
from headrace.order.shard import Shard
from headrace.order.split import split_range

__all__ = [
    "DEFAULT_ATTENTION_COST",
    "BalancedShard",
    "BestFitOrder",
    "BlendedOrder",
    "Dealing",
    "ElasticBlend",
    "ElasticOrder",
    "EpochOrder",
    "IndexCache",
    "MegatronNames",
    "MegatronOrder",
    "OrderRules",
    "Part",
    "SampleOrder",
    "Shard",
    "StepShape",
    "blend_megatron",
    "cost_of",
    "deal",
    "laid_out_lengths",
    "lowest_slowest_rank",
    "measured_attention_cost",
    "parse_blend",
    "requested_per_corpus",
    "split_range",
    "step_cost",
    "turn_of",
]
