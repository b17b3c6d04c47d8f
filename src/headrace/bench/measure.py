"""What does measuring cost? The measuring body of `headrace bench measure`.

Three questions. What is one span beside the two clock readings it cannot do without? What does each call of the toolkit
cost when a step of a model has just emptied the caches? And does a real training loop become slower: a small
transformers model on the CPU, forward, backward and AdamW, with everything on that `measure.start()` turns on (hooks,
counts, operations, one JSON line per step, a window every ten steps)? The same once more for a model of many modules.

Isolates: spans around nothing; single calls behind a step; and one loop with and without the toolkit. Held fixed: one
process, one thread, the same batch, the same weights and optimizer state. A measured and a plain step form a pair, next
to each other, in alternating order, each timed by itself: a slow minute falls on both. Every tenth measured step also
delivers a window. So the slowdown is estimated in two layers, the median difference of the pairs without a window and
that of the pairs with one, nine to one; its interval resamples rounds of `WINDOWS_PER_ROUND` windows.
How it can mislead: the cost per step is fixed (`excess_us`), so a step of a few milliseconds makes it look larger than
in any real training. A median does not see what befalls fewer than half of the steps: `loop_slowdown_mean` beside it is
the ratio of all the time, which one preemption moves. The toolkit's own caches are colder here than in a loop that is
always measured, because a plain step lies between two measured ones. CPU time of the thread knows nothing of waiting,
and is steadier where others run, too, but not of the caches they share.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from headrace.errors import ConfigError
from headrace.measure.clock import Clock
from headrace.measure.environment import capture_environment
from headrace.measure.statistics import MIN_BLOCKS, expanded_tail, median, p99, ratio_of_sums
from headrace.measure.step import Step

if TYPE_CHECKING:
    from headrace.bench.measure_loop import Model, Pairs

RECORD_VERSION = 2
"""2: rows and slowdown of paired steps (version 1: of blocks of ten steps); rows of cold calls."""
ISOLATES = "spans around nothing, single calls behind a step, and one training loop with and without the toolkit"

SPAN_TARGET_US = 1.0
SLOWDOWN_TARGET = 0.005

LOG_EVERY = 10
WINDOWS_PER_ROUND = 4
COLD_STEPS_PER_ROUND = 3
RESAMPLES = 2000
CALLS_PER_STEP = {"span": 4.0, "count": 1.0, "end of a step": 1.0}
"""Of a loop with hooks: data, forward, backward, optimizer. A window comes once in LOG_EVERY steps."""


def run(
    *,
    num_rounds: int = 40,
    num_warmup_rounds: int = 1,
    spans_per_round: int = 2000,
    windows_per_round: int = WINDOWS_PER_ROUND,
    log_every: int = LOG_EVERY,
    clock: Clock = time.perf_counter_ns,
) -> dict[str, Any]:
    """Time spans `num_rounds` times, calls behind a step, and pairs of steps in `num_rounds` rounds; JSON-able.

    A round holds `windows_per_round` windows of `log_every` pairs (of the model of many modules: one window).
    `summary`: `span_us` is the median cost of one span, `clock_pair_us` that of the two bare readings beside it,
    `end_us` that of ending a step. `excess_us` is what measuring adds to a step, `loop_slowdown` the same as a share of
    the plain step, with 95 % intervals; `..._cpu` by the CPU time of the thread, `loop_slowdown_mean` the ratio of all
    the time; `many_modules_...` are these figures of the model of many modules. `clock` returns nanoseconds. Raises
    ConfigError for numbers below one.
    """
    if min(num_rounds, spans_per_round, windows_per_round, log_every) < 1 or num_warmup_rounds < 0:
        raise ConfigError(
            f"rounds, spans and windows must be at least 1, got {num_rounds}, {spans_per_round} and {windows_per_round}"
        )
    from headrace.bench.measure_loop import cold_calls, in_pairs, model_of_many_modules, one_thread, small_model

    spans = span_rounds(num_warmup_rounds + num_rounds, spans_per_round, clock)
    rows = [row("call", name, values, num_warmup_rounds) for name, values in spans.items()]
    summary: dict[str, Any] = {
        "span_us": rows[1]["median_us"],
        "clock_pair_us": rows[0]["median_us"],
        "end_us": rows[2]["median_us"],
        "span_target_us": SPAN_TARGET_US,
        "loop_slowdown_target": SLOWDOWN_TARGET,
    }
    clocks: dict[str, Clock] = {"wall": clock, "cpu": time.thread_time_ns}
    with one_thread():
        model = small_model()
        cold = cold_calls(model, num_steps=max(log_every, COLD_STEPS_PER_ROUND * num_rounds), log_every=log_every)
        rows += [row("call behind a step", name, values, 1) for name, values in cold.items()]
        for each, windows in ((model, windows_per_round), (model_of_many_modules(), 1)):
            pairs_per_round = windows * log_every
            num_pairs = (num_warmup_rounds + num_rounds) * pairs_per_round
            pairs = in_pairs(each, num_pairs=num_pairs, log_every=log_every, clocks=clocks)
            rows += loop_rows(each, pairs, num_warmup_rounds * pairs_per_round)
            figures = loop_figures(pairs, num_warmup_rounds * pairs_per_round, pairs_per_round)
            if each is not model:
                figures = {f"many_modules_{name}": value for name, value in figures.items()}
                figures["many_modules"] = each.num_modules
            summary |= figures
    return {
        "version": RECORD_VERSION,
        "isolates": ISOLATES,
        "environment": asdict(capture_environment()),
        "calls_per_step": CALLS_PER_STEP | {"end of a window": 1 / log_every},
        "rows": rows,
        "skipped": {},
        "summary": summary,
    }


def loop_rows(model: Model, pairs: Pairs, num_warmup: int) -> list[dict[str, Any]]:
    """Both sides by each clock."""
    return [
        row(f"step of {model.name}, {kind} time", side, values[kind], num_warmup)
        for kind in pairs.plain
        for side, values in (("plain", pairs.plain), ("measured", pairs.measured))
    ]


def loop_figures(pairs: Pairs, num_warmup: int, pairs_per_round: int) -> dict[str, Any]:
    """Step time, excess and slowdown of one loop, each with its interval."""
    figures: dict[str, Any] = {}
    for kind, suffix in (("wall", ""), ("cpu", "_cpu")):
        plain, measured = (
            np.array(side[kind][num_warmup:]).reshape(-1, pairs.log_every) for side in (pairs.plain, pairs.measured)
        )
        figures |= excess_figures(plain, measured, pairs_per_round // pairs.log_every, suffix)
        if kind == "wall":
            sums = [
                np.array([[block.sum(), block.size] for block in np.split(side, len(side))])
                for side in (measured, plain)
            ]
            ratio = ratio_of_sums(*sums)
            figures["loop_slowdown_mean"] = minus_one(ratio.estimate)
            figures["loop_slowdown_mean_interval"] = [minus_one(ratio.low), minus_one(ratio.high)]
    return figures


def excess_figures(
    plain: npt.NDArray[np.float64], measured: npt.NDArray[np.float64], windows_per_round: int, suffix: str
) -> dict[str, Any]:
    """What a measured step takes longer, from [windows, steps of a window] microseconds of both sides.

    The last step of a window reports it. Whole rounds are resampled, so that what lasts for some seconds counts once.
    """
    rounds = np.arange(len(plain)).reshape(-1, windows_per_round)
    random = np.random.default_rng(0)
    draws = [rounds[random.integers(len(rounds), size=len(rounds))].ravel() for _ in range(RESAMPLES)]
    drawn = np.array([excess_us(plain[draw], measured[draw]) for draw in draws])
    step_us = float(np.median(plain))
    found = excess_us(plain, measured)
    interval: list[float | None] = [None, None]
    if len(rounds) >= MIN_BLOCKS:
        tail = expanded_tail(0.95, len(rounds))
        interval = [float(edge) for edge in np.quantile(drawn, (tail, 1.0 - tail))]
    return {
        f"step_us{suffix}": step_us,
        f"excess_us{suffix}": found,
        f"excess_us{suffix}_interval": interval,
        f"loop_slowdown{suffix}": found / step_us,
        f"loop_slowdown{suffix}_interval": [None if edge is None else edge / step_us for edge in interval],
    }


def excess_us(plain: npt.NDArray[np.float64], measured: npt.NDArray[np.float64]) -> float:
    """Median difference of pairs in the two layers, weighted by how many steps they are."""
    excess = measured - plain
    share = 1.0 / excess.shape[1]
    with_window = share * float(np.median(excess[:, -1]))
    return with_window + ((1.0 - share) * float(np.median(excess[:, :-1])) if excess.shape[1] > 1 else 0.0)


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
