"""What does packing cost, beside copying the same bytes? The measuring body of `headrace bench pack`.

Isolates: token rows in memory to the fields of one batch in memory that was touched before. No disk, no ring.
Held fixed: one row per batch, one thread, every flag on. Contenders take turns within each round (the order rotates),
and each call of whichever contender writes the next of the same slots, 44 MB together: more than a core's own caches
hold, as in a feed, where a whole step passes before a slot is written again.
A context-parallel view (cp_view, cp_memcpy) reads one of as many finished batches and writes memory of its own; its
ns_per_token counts the tokens of the whole batch, so that it adds to those of packing.
How it can mislead: memcpy reads one finished batch again and again, so its source is warmer than a real one's; without
Megatron's slow turns in between, all others run up to twice as fast (their slots then stay in the last cache), with the
same ratios among them. Megatron's loop costs documents x tokens: its ratio means little without the document count, so
rows of three kinds are packed (long, web-like and short documents) and the summary names the ratio of each.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.bench.pack_contenders import (
    Contender,
    Slots,
    cp_contenders,
    headrace_contender,
    make_slots,
    megatron_contender,
    memcpy_contender,
    numpy_contender,
    one_torch_thread,
)
from headrace.errors import ConfigError
from headrace.measure.environment import capture_environment
from headrace.measure.statistics import median, p99, ratio_interval
from headrace.packing import batch_spec
from headrace.store import TokenStore

RECORD_VERSION = 1
ISOLATES = "token rows in memory to one batch in memory touched before: no disk, no ring"

SEQ_LENGTHS = (4096, 32768, 131072)
WORKING_SET_BYTES = 44_000_000
NUM_ROWS = 8
"""Different token rows in turn, so that no branch predictor learns one by heart."""

# Web text: C4 holds 156 billion tokens in 365 million documents, 427 each (Dodge et al., EMNLP 2021, table 1), with a
# long tail. A lognormal of median 200 and this sigma has that mean.
SYNTHETIC_MEDIAN_TOKENS = {"synthetic": 200, "short": 60}
"""short: 128 tokens each, as of questions with their answers."""
SYNTHETIC_SIGMA = 1.23
SYNTHETIC_VOCABULARY = 16_384
SYNTHETIC_EOD = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Text:
    """Rows [1, S + 1] of one origin, with the id that ends their documents."""

    origin: str
    rows: tuple[npt.NDArray[Any], ...]
    eod: int

    @property
    def seq_length(self) -> int:
        return int(self.rows[0].shape[1]) - 1

    @property
    def documents_per_row(self) -> list[int]:
        """Segments of each row, its end included."""
        return [int((row[0, :-2] == self.eod).sum()) + 1 for row in self.rows]


def run(
    corpus_prefix: str | None = None,
    *,
    seq_lengths: Sequence[int] = SEQ_LENGTHS,
    num_rounds: int = 120,
    num_warmup_rounds: int = 5,
    working_set_bytes: int = WORKING_SET_BYTES,
    eod: int | None = None,
    seed: int = 1234,
    clock: Callable[[], int] = time.perf_counter_ns,
) -> dict[str, Any]:
    """Times every contender `num_rounds` times per sequence length; the record is JSON-able.

    Rows come from the store at `corpus_prefix` (`eod` None: the id its documents end with) and, always, from synthetic
    long-tailed documents of two lengths, so that two machines can be compared without a corpus. `clock` returns
    nanoseconds. `summary` holds ratios of medians at the longest length, of the corpus where there is one, and None
    where a contender is missing; `skipped` says why. `megatron_over_pack_at_N_documents` is that ratio for each kind of
    rows, by the mean number of documents in one. Raises ConfigError for a corpus without documents that end alike.
    """
    if num_rounds < 1 or num_warmup_rounds < 0 or not seq_lengths or min(seq_lengths) < 1:
        raise ConfigError(
            f"num_rounds and seq_lengths must be at least 1 and num_warmup_rounds at least 0, got {num_rounds}, "
            f"{list(seq_lengths)} and {num_warmup_rounds}"
        )
    rows: list[dict[str, Any]] = []
    skipped: dict[str, str] = {}
    for seq_length in seq_lengths:
        texts = [synthetic_text(seq_length, seed, origin=origin) for origin in SYNTHETIC_MEDIAN_TOKENS]
        if corpus_prefix is not None:
            texts.insert(0, corpus_text(corpus_prefix, seq_length, seed, eod))
        slots = make_slots(seq_length, max(2, working_set_bytes // batch_spec("megatron", 1, seq_length).nbytes))
        with one_torch_thread():
            for text in texts:
                rows += time_text(text, slots, num_rounds, num_warmup_rounds, clock, skipped)
    return {
        "version": RECORD_VERSION,
        "isolates": ISOLATES,
        "working_set_bytes": working_set_bytes,
        "environment": asdict(capture_environment()),
        "rows": rows,
        "skipped": skipped,
        "summary": summarise(rows),
    }


def synthetic_text(seq_length: int, seed: int, *, origin: str = "synthetic") -> Text:
    """Documents whose lengths are lognormal, in uint16; `origin` is a key of SYNTHETIC_MEDIAN_TOKENS."""
    median_tokens = SYNTHETIC_MEDIAN_TOKENS[origin]
    random = np.random.default_rng(seed)
    rows = []
    for _ in range(NUM_ROWS):
        row = random.integers(1, SYNTHETIC_VOCABULARY, (1, seq_length + 1)).astype(np.uint16)
        # The mean is twice the median: ten times as many documents as there will be, always more than enough.
        lengths = random.lognormal(np.log(median_tokens), SYNTHETIC_SIGMA, 5 * seq_length // median_tokens + 40)
        ends = np.cumsum(lengths.astype(np.int64) + 1)
        row[0, ends[ends <= seq_length]] = SYNTHETIC_EOD
        rows.append(row)
    return Text(origin=origin, rows=tuple(rows), eod=SYNTHETIC_EOD)


def corpus_text(prefix: str, seq_length: int, seed: int, eod: int | None) -> Text:
    """Rows of consecutive documents of a token store, each row from a random document on."""
    with TokenStore(prefix) as store:
        if store.num_tokens == 0:
            raise ConfigError(f"{prefix} holds no tokens to pack")
        random = np.random.default_rng(seed)
        rows = []
        for _ in range(NUM_ROWS):
            sequence, parts, missing = int(random.integers(store.num_sequences)), [], seq_length + 1
            while missing > 0:
                parts.append(store.read(sequence)[:missing])
                missing -= parts[-1].size
                sequence = (sequence + 1) % store.num_sequences
            rows.append(np.concatenate(parts)[None])
        return Text(origin="corpus", rows=tuple(rows), eod=end_of_documents(store) if eod is None else eod)


def end_of_documents(store: TokenStore) -> int:
    """The id that the documents of a store end with."""
    lasts = {int(store.read(i)[-1]) for i in range(min(store.num_sequences, 64)) if store.lengths[i]}
    if len(lasts) != 1:
        raise ConfigError(f"the documents of this store end with {len(lasts)} different ids; say which one is `eod`")
    return lasts.pop()


def time_text(
    text: Text,
    slots: Slots,
    num_rounds: int,
    num_warmup_rounds: int,
    clock: Callable[[], int],
    skipped: dict[str, str],
) -> list[dict[str, Any]]:
    """One result per contender. Adds to `skipped` those that cannot run here."""
    mean_documents = float(np.mean(text.documents_per_row))
    nbytes = 28 * text.seq_length + 4 * round(mean_documents + 1)
    finished = make_slots(text.seq_length, len(slots.fields))
    contenders: dict[str, Contender] = {
        "headrace": headrace_contender(text.rows, text.eod, slots),
        "memcpy": memcpy_contender(nbytes, slots),
        "numpy": numpy_contender(text.rows, text.eod, slots),
        **cp_contenders(text.rows, text.eod, finished),
    }
    try:
        contenders["megatron"] = megatron_contender(text.rows, text.eod)
    except ImportError as error:
        skipped["megatron"] = f"{error}; pip install 'headrace[bench]'"
    values_ns = take_turns(contenders, len(slots.fields), num_warmup_rounds + num_rounds, clock)
    results = []
    for name, values in values_ns.items():
        values_us = [value / 1e3 for value in values]
        measured = values_us[num_warmup_rounds:]
        results.append(
            {
                "contender": name,
                "text": text.origin,
                "micro_batch_size": 1,
                "seq_length": text.seq_length,
                "mean_documents": mean_documents,
                "dtype": text.rows[0].dtype.name,
                "output_bytes": nbytes,
                "num_slots": len(slots.fields),
                "median_us": median(measured),
                "p99_us": p99(measured),
                "ns_per_token": (median(measured) or 0.0) * 1e3 / text.seq_length,
                "values_us": measured,
                "warmup_us": values_us[:num_warmup_rounds],
            }
        )
    return results


def take_turns(
    contenders: dict[str, Contender], num_slots: int, num_rounds: int, clock: Callable[[], int]
) -> dict[str, list[int]]:
    """Nanoseconds of each call. Every call of a round packs the same row; whoever is next gets the next slot."""
    names = list(contenders)
    values: dict[str, list[int]] = {name: [] for name in names}
    slot = 0
    for number in range(num_rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            contender, row = contenders[name], number % NUM_ROWS
            start = clock()
            contender(row, slot)
            values[name].append(clock() - start)
            slot = (slot + 1) % num_slots
    return values


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Ratios of medians with 95 % intervals over paired rounds, and what a context-parallel view adds per token."""
    longest = max(row["seq_length"] for row in rows)
    at_length = [row for row in rows if row["seq_length"] == longest]
    origin = at_length[0]["text"]
    found = {row["contender"]: row for row in at_length if row["text"] == origin}
    summary: dict[str, Any] = {
        "seq_length": longest,
        "text": origin,
        "mean_documents": at_length[0]["mean_documents"],
    }
    for name, above, below in (
        ("pack_over_memcpy", "headrace", "memcpy"),
        ("megatron_over_pack", "megatron", "headrace"),
        ("numpy_over_pack", "numpy", "headrace"),
        ("cp_view_over_memcpy", "cp_view", "cp_memcpy"),
    ):
        if above in found and below in found:
            ratio = ratio_interval(found[above]["values_us"], found[below]["values_us"])
            summary |= {name: ratio.estimate, f"{name}_interval": [ratio.low, ratio.high]}
        else:
            summary |= {name: None, f"{name}_interval": [None, None]}
    summary["cp_view_ns_per_token"] = found["cp_view"]["ns_per_token"] if "cp_view" in found else None
    medians = {(row["text"], row["contender"]): row["median_us"] for row in at_length}
    for row in at_length:
        if row["contender"] == "megatron":
            name = f"megatron_over_pack_at_{row['mean_documents']:.0f}_documents"
            summary[name] = row["median_us"] / medians[row["text"], "headrace"]
    return summary
