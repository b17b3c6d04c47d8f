"""One analysis document, made by hand: the report is tested without any reader or rule."""

from __future__ import annotations

import copy
from typing import Any

import pytest


def lanes(rank: int, step: int, *, computing: float = 60_000.0) -> dict[str, Any]:
    return {
        "rank": rank,
        "step": step,
        "computing_us": computing,
        "communication_us": 95_000.0 - computing,
        "communication_not_overlapped_us": 90_000.0 - computing,
        "overlapped_us": 5_000.0,
        "free_us": 10_000.0,
        "e2e_us": 100_000.0,
        "overlap_percent": 12.5,
        "matrix_us": computing / 2,
        "bubble_us": 0.0,
        "preparing_us": 500.0,
        "copies_us": 2_000.0,
        "idle_us": 9_000.0,
        "free": {
            "exposed_copies_us": 1_000.0,
            "data_us": 2_000.0,
            "host_launch_us": 4_000.0,
            "kernel_wait_us": 2_500.0,
            "unknown_us": 500.0,
        },
    }


def waterfall(rank: int, step: int) -> dict[str, Any]:
    return {
        "rank": rank, "step": step, "matrix_us": 30_000.0, "vector_us": 30_000.0, "copies_us": 1_000.0,
        "exposed_communication_us": 29_000.0, "bubble_us": 1_000.0, "free_us": 9_000.0, "e2e_us": 100_000.0,
    }  # fmt: skip


def link(src: int, dst: int, speed: float, *, slow: bool = False, judged: bool = True) -> dict[str, Any]:
    return {
        "src": src, "dst": dst, "transport": "HCCS", "bandwidth_gb_s": speed,
        "expected_gb_s": 15.0 if judged else None, "slow": slow, "judged": judged,
        "size_mb": 60.0, "ranks_are_local": False,
    }  # fmt: skip


def make_document(num_ranks: int = 4, steps: tuple[int, ...] = (2, 3, 4)) -> dict[str, Any]:
    ranks = list(range(num_ranks))
    slow = {
        "verdict": "card", "rank": 2, "traced": True, "what": "rank 2 is late by 40.0 ms per step", "sure": "high",
        "lateness_us_per_step": 40_000.0, "share_of_step": 0.4, "steps_late": 3, "num_steps": 3, "also_late": [],
        "disproved_by": "swap the card </script><b>", "evidence": {"rule": "waits"},
    }  # fmt: skip
    links = [link(0, n, 15.0) for n in range(1, 4)] + [link(0, 4, 7.0, slow=True), link(0, 5, 0.02, judged=False)]
    return {
        "format": "headrace-analysis",
        "version": 1,
        "ranks": ranks,
        "world_size": num_ranks,
        "steps": list(steps),
        "slow_rank": slow,
        "slow_link": {"verdict": "slow", "what": "0->4 is slow", "disproved_by": "swap the cable", "links": links},
        "named_rules": [
            {
                "name": "wait_ratio_spread_0.2", "valid": False, "why_not": "needs all ranks", "accuses": 1,
                "value": 0.57, "threshold": 0.2, "unit": "difference of ratios", "detail": {"0": 0.6},
            }
        ],
        "breakdown": [lanes(r, s, computing=60_000.0 + 20_000 * (r == 2)) for r in ranks for s in steps],
        "totals": [],
        "published": [],
        "waterfall": [waterfall(r, s) for r in ranks for s in steps],
        "launch_delay": [
            {"rank": r, "num_launches": 100, "p50_us": 5.0, "p90_us": 9.0, "p99_us": 20.0, "max_us": 99.0}
            for r in ranks
        ],
        "waits": [
            {
                "rank": r, "wait_us": 0.0 if r == 2 else 90_000.0, "waited_for": {} if r == 2 else {"2": 90_000.0},
                "by_step_us": {str(s): 0.0 if r == 2 else 30_000.0 for s in steps}, "by_duration_us": 0.0,
            }
            for r in ranks
        ],
        "collectives": {
            "groups": [],
            "cannot_pair": [{"rank": 0, "count": 3, "why": "no group"}],
            "kinds": [
                {
                    "group": "dp", "ranks": ranks, "kind": "all_reduce", "count": 9, "total_us": 270_000.0,
                    "waited_us": 200_000.0, "median_busbw_gb_s": 12.3,
                }
            ],
            "slowest": [
                {
                    "kind": "all_reduce", "group": "dp", "step": 3, "num_bytes": 4096, "transfer_us": 2_000.0,
                    "longest_us": 42_000.0, "waited_us": 120_000.0, "algbw_gb_s": 1.0, "busbw_gb_s": 1.5,
                    "duration_us": {str(r): 2_000.0 if r == 2 else 42_000.0 for r in ranks},
                }
            ],
        },
        "clock_offsets": [],
        "training_log": None,
        "skipped_events": 5,
        "unmatched_collectives": 7,
        "inputs": [{"rank": r, "source": "t", "notes": ["a note about <i>this</i> rank"]} for r in ranks],
        "notes": ["the whole job was traced"],
    }  # fmt: skip


TRAINING_LOG = {
    "source": "log.json", "num_steps": 20, "warm_up_steps": 1, "step_time_median_s": 5.54, "step_time_s": [5.54],
    "published_tflops_per_device": 67.0, "num_devices": 8, "peak_memory_mb": [27_000.0], "global_batch_size": 64,
    "tokens_per_s": 47_316.0, "tflops_per_device": 66.0,
}  # fmt: skip


def empty_document() -> dict[str, Any]:
    document = make_document(0, ())
    undecided = {"verdict": "undecidable", "rank": None, "traced": None, "sure": None, "what": "cannot say"}
    unknown = {"lateness_us_per_step": None, "share_of_step": None, "steps_late": None, "evidence": {}}
    document["slow_rank"] |= undecided | unknown
    document["slow_link"] |= {"verdict": "undecidable", "links": []}
    document["collectives"] = {"groups": [], "cannot_pair": [], "kinds": [], "slowest": []}
    return document | {"world_size": None, "skipped_events": 0, "unmatched_collectives": 0, "notes": []}


@pytest.fixture
def document() -> dict[str, Any]:
    return copy.deepcopy(make_document())
