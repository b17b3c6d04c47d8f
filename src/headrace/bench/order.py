"""How long until it is known which tokens make which sample? The measuring body of `headrace bench order`.

Two rows of figures per sequence length, on the same corpus and seed, equal results checked in every round:

    sample_index  from the shuffled documents to the start of each sample: megatron-core's C++ helper (build_sample_idx)
                  beside build_sample_index; ours includes taking documents and lengths apart again
    whole         from the lengths to all three index arrays, as GPTDataset builds them without a cache on disk

Beside them a blend drawn (blend_draw.py), and for the order that builds nothing the first batch of a run that is
continued (elastic_start.py).

Isolates: integers in memory to integers in memory; no disk, no token. Held fixed: one process, one thread, one epoch.
How it can mislead: documents are synthetic (lognormal lengths as of web text); the helper looks lengths up at random,
so its time depends on what the cache holds, and the ratio on documents per sample, which each row states.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib import import_module
from typing import Any

import numpy as np

from headrace.bench.blend_draw import NUM_CORPORA, drawers
from headrace.bench.elastic_start import first_batches
from headrace.bench.pack import SYNTHETIC_MEDIAN_TOKENS, SYNTHETIC_SIGMA
from headrace.errors import ConfigError, HeadraceError
from headrace.measure.environment import capture_environment
from headrace.measure.statistics import RatioInterval, median, p99, ratio_interval
from headrace.order import OrderRules
from headrace.order.megatron import build_index_arrays, shuffled_documents
from headrace.order.plan import IntArray, OrderPlan, plan_order
from headrace.order.sample_index import build_sample_index

RECORD_VERSION = 1
ISOLATES = "document lengths in memory to index arrays in memory: no disk, no token"

NUM_DOCUMENTS = 1_000_000
SEQUENCE_LENGTHS = (512, 2048, 4096, 32768)
SUMMARY_SEQUENCE_LENGTH = 4096

Contender = Callable[[], tuple[IntArray, ...]]


def run(
    *,
    num_documents: int = NUM_DOCUMENTS,
    sequence_lengths: Sequence[int] = SEQUENCE_LENGTHS,
    num_rounds: int = 20,
    num_warmup_rounds: int = 2,
    num_elastic_documents: int = 0,
    num_drawn_samples: int = 0,
    seed: int = 1234,
    clock: Callable[[], int] = time.perf_counter_ns,
) -> dict[str, Any]:
    """Times every contender `num_rounds` times per sequence length, in turns; the record is JSON-able.

    `summary`: at 4096 tokens, or else the longest length, `helper_over_headrace` is the ratio of medians for the sample
    index alone and `megatron_over_headrace` for all index arrays, each with its 95 % interval over paired rounds;
    `lowest_` is the smallest over all sequence lengths; `drawing_helper_over_headrace` the ratio for a blend of
    `num_drawn_samples`, None if that is 0. None where megatron-core is missing, and `skipped` says so.
    `elastic_first_batch_ms` is the median start of a continued run over an index of `num_elastic_documents`, None if
    that is 0; to be below 50. `clock` returns nanoseconds.
    """
    if num_documents < 1 or num_rounds < 1 or num_warmup_rounds < 0 or not sequence_lengths:
        raise ConfigError(
            f"num_documents and num_rounds must be at least 1, num_warmup_rounds at least 0, and sequence_lengths not "
            f"empty, got {num_documents}, {num_rounds}, {num_warmup_rounds} and {list(sequence_lengths)}"
        )
    random = np.random.default_rng(seed)
    drawn = random.lognormal(np.log(SYNTHETIC_MEDIAN_TOKENS["synthetic"]), SYNTHETIC_SIGMA, num_documents)
    lengths = np.maximum(1, drawn).astype(np.int32)
    megatron, skipped = _megatron()
    rows: list[dict[str, Any]] = []
    for sequence_length in sequence_lengths:
        rules = OrderRules(sequence_length=sequence_length, seed=seed)
        plan = plan_order(lengths, rules)
        for what, contenders in _contenders(lengths, rules, plan, megatron).items():
            values = _take_turns(contenders, num_warmup_rounds + num_rounds, clock)
            rows += _rows(
                what,
                values,
                num_warmup_rounds,
                sequence_length=sequence_length,
                num_documents=num_documents,
                num_samples=plan.num_samples,
                documents_per_sample=num_documents / plan.num_samples,
            )
    if num_drawn_samples:
        contenders = drawers(num_drawn_samples, seed=seed, helpers=megatron and megatron[0])
        values = _take_turns(contenders, num_warmup_rounds + num_rounds, clock)
        rows += _rows("drawing", values, num_warmup_rounds, num_corpora=NUM_CORPORA, num_samples=num_drawn_samples)
    resumed = first_batches(num_documents=num_elastic_documents, num_rounds=num_rounds, seed=seed, clock=clock)
    return {
        "version": RECORD_VERSION,
        "isolates": ISOLATES,
        "environment": asdict(capture_environment()),
        "rows": rows + resumed["rows"],
        "skipped": skipped,
        "summary": _summarise(rows, sequence_lengths) | resumed["summary"],
    }


def _rows(what: str, values: dict[str, list[float]], num_warmup_rounds: int, **sizes: float) -> list[dict[str, Any]]:
    """One row per contender; sizes that have no meaning for `what` are None."""
    nothing = {"sequence_length": None, "num_documents": None, "documents_per_sample": None}
    return [
        {"what": what, "contender": name}
        | nothing
        | sizes
        | {
            "median_us": median(values_us[num_warmup_rounds:]),
            "p99_us": p99(values_us[num_warmup_rounds:]),
            "values_us": values_us[num_warmup_rounds:],
            "warmup_us": values_us[:num_warmup_rounds],
        }
        for name, values_us in values.items()
    ]


def _megatron() -> tuple[tuple[Any, Any] | None, dict[str, str]]:
    """megatron-core's helpers and GPTDataset module, or the reason why they are missing."""
    try:
        return (
            import_module("megatron.core.datasets.helpers"),
            import_module("megatron.core.datasets.gpt_dataset"),
        ), {}
    except ImportError as error:
        return None, {"megatron": f"{error}; pip install headrace[bench]"}


def _contenders(
    lengths: IntArray, rules: OrderRules, plan: OrderPlan, megatron: tuple[Any, Any] | None
) -> dict[str, dict[str, Contender]]:
    """By what is built and by whom. One epoch over the whole corpus."""
    documents = shuffled_documents(lengths, plan.documents, 1, np.random.RandomState(rules.seed))

    def our_sample_index() -> tuple[IntArray, ...]:
        document_index = documents["number"].copy()
        sample_index = build_sample_index(
            documents["length"],
            sequence_length=rules.sequence_length,
            num_samples=plan.num_samples,
            extra=rules.extra,
        )
        return document_index, sample_index

    def our_arrays() -> tuple[IntArray, ...]:
        return build_index_arrays(lengths, rules, plan_order(lengths, rules))

    if megatron is None:
        return {"sample_index": {"headrace": our_sample_index}, "whole": {"headrace": our_arrays}}
    helpers, gpt_dataset = megatron
    document_index = documents["number"].copy()
    indices = np.arange(len(lengths), dtype=np.int32)

    def helper() -> tuple[IntArray, ...]:
        return document_index, helpers.build_sample_idx(
            lengths, document_index, rules.sequence_length, 1, plan.tokens_per_epoch, True, rules.add_extra_token
        )

    def its_arrays() -> tuple[IntArray, ...]:
        # The steps of GPTDataset._build_document_sample_shuffle_indices for one epoch.
        tokens_per_epoch = int(np.sum(lengths[indices]))
        random = np.random.RandomState(rules.seed)
        shuffled = gpt_dataset._build_document_index(indices, 1, random, False)
        sample_index = helpers.build_sample_idx(
            lengths.copy(), shuffled, rules.sequence_length, 1, tokens_per_epoch, True, rules.add_extra_token
        )
        num_samples = len(sample_index) - 1
        return shuffled, sample_index, gpt_dataset._build_shuffle_index(num_samples, num_samples, random)

    return {
        "sample_index": {"headrace": our_sample_index, "megatron": helper},
        "whole": {"headrace": our_arrays, "megatron": its_arrays},
    }


def _take_turns(contenders: dict[str, Contender], num_rounds: int, clock: Callable[[], int]) -> dict[str, list[float]]:
    """Microseconds of each call, the order rotating from round to round; unequal results end the bench."""
    names = list(contenders)
    values: dict[str, list[float]] = {name: [] for name in names}
    for number in range(num_rounds):
        first = number % len(names)
        results = []
        for name in names[first:] + names[:first]:
            start = clock()
            results.append(contenders[name]())
            values[name].append((clock() - start) / 1e3)
        reference = results[0]
        for result in results[1:]:
            if not all(map(np.array_equal, result, reference)):
                raise HeadraceError(f"{' and '.join(names)} built different index arrays; their times compare nothing")
    return values


def _summarise(rows: list[dict[str, Any]], sequence_lengths: Sequence[int]) -> dict[str, Any]:
    summary_length = SUMMARY_SEQUENCE_LENGTH if SUMMARY_SEQUENCE_LENGTH in sequence_lengths else max(sequence_lengths)
    summary: dict[str, Any] = {"sequence_length": summary_length}
    for name, what, length in (
        ("helper_over_headrace", "sample_index", summary_length),
        ("megatron_over_headrace", "whole", summary_length),
        ("drawing_helper_over_headrace", "drawing", None),
    ):
        ratios = _ratios([row for row in rows if row["what"] == what])
        here = ratios.get(length)
        summary[name] = here.estimate if here else None
        summary[f"{name}_interval"] = [here.low, here.high] if here else [None, None]
        if length is not None:
            estimates = [ratio.estimate for ratio in ratios.values() if ratio.estimate is not None]
            summary[f"lowest_{name}"] = min(estimates, default=None)
    return summary


def _ratios(rows: list[dict[str, Any]]) -> dict[int | None, RatioInterval]:
    """Megatron's time over ours by sequence length; empty without Megatron."""
    values = {(row["sequence_length"], row["contender"]): row["values_us"] for row in rows}
    return {
        length: ratio_interval(theirs, values[length, "headrace"])
        for (length, contender), theirs in values.items()
        if contender == "megatron"
    }
