"""What does measuring cost? The measuring body of `headrace bench measure`.

Two questions. What is one span beside the two clock readings it cannot do without? And does a real training loop
become slower: a small transformers model on the CPU, forward, backward and AdamW, with everything on that
`measure.start()` turns on (hooks, counts, operations, one JSON line per step, a window every ten steps)?

Isolates: spans around nothing; and one loop with and without the toolkit. Held fixed: one process, one thread, the same
batch. Blocks with and without take turns in one run (the order alternates), hooks are put on and taken off outside of
the timed part (ten steps per block, or the caches that they leave cold would count), and the slowdown is a ratio of
paired blocks with its interval.
How it can mislead: the cost per step is fixed (some 30 us), so steps of a few milliseconds make it look larger than in
any real training; and on a shared machine the interval of the slowdown is wider than the slowdown. The slowdown in CPU
time of the loop's thread stands beside it: it knows nothing of waiting, and is steadier where others run, too.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from headrace.errors import ConfigError
from headrace.measure.environment import capture_environment
from headrace.measure.model_config import shape_from_transformers
from headrace.measure.statistics import median, p99, ratio_interval
from headrace.measure.step import Step

RECORD_VERSION = 1
ISOLATES = "spans around nothing, and one training loop with and without the toolkit"

SPAN_TARGET_US = 1.0
SLOWDOWN_TARGET = 0.005

Clock = Callable[[], int]


def run(
    *,
    num_rounds: int = 40,
    num_warmup_rounds: int = 3,
    spans_per_round: int = 2000,
    steps_per_block: int = 10,
    clock: Clock = time.perf_counter_ns,
) -> dict[str, Any]:
    """Time spans and the loop `num_rounds` times each; the record is JSON-able.

    `summary`: `span_us` is the median cost of one span, `clock_pair_us` that of the two bare readings beside it,
    `end_us` that of ending a step; `loop_slowdown` is measured / plain - 1 of the medians of paired blocks with its
    95 % interval, `loop_slowdown_cpu` the same in CPU time of the thread. `clock` returns nanoseconds.
    Raises ConfigError for numbers below one.
    """
    if min(num_rounds, spans_per_round, steps_per_block) < 1 or num_warmup_rounds < 0:
        raise ConfigError(
            f"rounds, spans and steps must be at least 1, got {num_rounds}, {spans_per_round} and {steps_per_block}"
        )
    total = num_warmup_rounds + num_rounds
    spans = span_rounds(total, spans_per_round, clock)
    loop = loop_rounds(total, steps_per_block, {"wall": clock, "cpu": time.thread_time_ns})
    rows = [row("call", name, values, num_warmup_rounds) for name, values in spans.items()]
    for kind, contenders in loop.items():
        rows += [row(f"step, {kind} time", name, values, num_warmup_rounds) for name, values in contenders.items()]
    return {
        "version": RECORD_VERSION,
        "isolates": ISOLATES,
        "environment": asdict(capture_environment()),
        "rows": rows,
        "skipped": {},
        "summary": summarise(spans, loop, num_warmup_rounds),
    }


def row(what: str, contender: str, values_us: list[float], num_warmup_rounds: int) -> dict[str, Any]:
    """One contender's raw values, the warm-up kept apart."""
    counting = values_us[num_warmup_rounds:]
    return {
        "what": what,
        "contender": contender,
        "median_us": median(counting),
        "p99_us": p99(counting),
        "values_us": counting,
        "warmup_us": values_us[:num_warmup_rounds],
    }


def summarise(
    spans: dict[str, list[float]], loop: dict[str, dict[str, list[float]]], num_warmup_rounds: int
) -> dict[str, Any]:
    """The figures, with the intervals of the two slowdowns."""
    summary: dict[str, Any] = {
        "span_us": median(spans["span"][num_warmup_rounds:]),
        "clock_pair_us": median(spans["perf_counter_ns pair"][num_warmup_rounds:]),
        "end_us": median(spans["end of a step"][num_warmup_rounds:]),
        "step_us": median(loop["wall"]["plain"][num_warmup_rounds:]),
        "span_target_us": SPAN_TARGET_US,
        "loop_slowdown_target": SLOWDOWN_TARGET,
    }
    for kind, name in (("wall", "loop_slowdown"), ("cpu", "loop_slowdown_cpu")):
        measured, plain = (loop[kind][one][num_warmup_rounds:] for one in ("measured", "plain"))
        ratio = ratio_interval(measured, plain)
        summary[name] = minus_one(ratio.estimate)
        summary[f"{name}_interval"] = [minus_one(ratio.low), minus_one(ratio.high)]
    return summary


def minus_one(ratio: float | None) -> float | None:
    """A ratio as the part that is more or less."""
    return None if ratio is None else ratio - 1.0


def span_rounds(num_rounds: int, calls: int, clock: Clock) -> dict[str, list[float]]:
    """Microseconds per call of each contender, in turns."""
    step = Step()
    contenders: dict[str, Callable[[int], None]] = {
        "perf_counter_ns pair": clock_pairs,
        "span": lambda count: spans_around_nothing(step, count),
        "end of a step": lambda count: ends(step, count),
    }
    values: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(num_rounds):
        names = list(contenders)
        for name in names if number % 2 else reversed(names):
            start = clock()
            contenders[name](calls)
            values[name].append((clock() - start) / 1e3 / calls)
    return values


def clock_pairs(count: int) -> None:
    """The two readings any timer needs."""
    read = time.perf_counter_ns
    for _ in range(count):
        start = read()
        read() - start


def spans_around_nothing(step: Step, count: int) -> None:
    """Enter and leave a span."""
    span = step.forward
    for _ in range(count):
        with span:
            pass


def ends(step: Step, count: int) -> None:
    """End a step: its books are closed and divided into phases."""
    for _ in range(count):
        step.end()


def loop_rounds(num_rounds: int, steps_per_block: int, clocks: dict[str, Clock]) -> dict[str, dict[str, list[float]]]:
    """Microseconds per step of the loop by each clock, plain and measured, in turns of one block each."""
    import torch

    from headrace.torch import measure

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    model, batch = small_model()
    optimizer = torch.optim.AdamW(model.parameters())

    def train(run: measure.Run | None) -> None:
        batches = [batch] * steps_per_block
        for tokens in batches if run is None else run.batches(batches):
            if run is not None:
                run.count(samples=len(tokens), tokens=tokens.numel())
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    values: dict[str, dict[str, list[float]]] = {kind: {"plain": [], "measured": []} for kind in clocks}
    with tempfile.TemporaryDirectory() as folder:
        run = measure.start(
            records=Path(folder),
            print_line=None,
            log_metrics=lambda metrics, step: None,
            shape=shape_from_transformers(model.config),
        )
        for number in range(num_rounds):
            for name in ("plain", "measured") if number % 2 else ("measured", "plain"):
                measured = run if name == "measured" else None
                detach = measure.attach(run.step, model, [optimizer], end=run.end) if measured else None
                run.step.begin()
                starts = {kind: clock() for kind, clock in clocks.items()}
                train(measured)
                for kind, clock in clocks.items():
                    values[kind][name].append((clock() - starts[kind]) / 1e3 / steps_per_block)
                if detach is not None:
                    detach()
        run.close()
    torch.set_num_threads(threads)
    return values


def small_model() -> tuple[Any, Any]:
    """A transformers Llama of a step of some ten milliseconds on one core, and one batch of tokens [4, 64]."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024, hidden_size=128, intermediate_size=384, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, use_cache=False,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).train(), torch.randint(0, 1024, (4, 64))
