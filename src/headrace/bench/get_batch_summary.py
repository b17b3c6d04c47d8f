"""From the rows of `headrace bench get-batch` to ratios, and to the figures that were to be reached.

Who wins is said for every row, whoever it is; a ratio has a 95 % interval over paired blocks, or none with the reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.bench.figure import Figure, as_records
from headrace.measure.statistics import ratio_interval, verdict

Row = dict[str, Any]

OWN = "headrace"


def summarise(rows: Sequence[Row]) -> dict[str, Any]:
    """`ratios` of all rows against headrace's, `others_win` where a contender is faster, and the design's `figures`."""
    found = ratios(rows)
    return {
        "ratios": found,
        "others_win": [one for one in found if one["verdict"] == "worse"],
        "figures": as_records(figures(rows)),
    }


def ratios(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """get_batch of each other contender over headrace's: above 1, headrace is faster."""
    result = []
    for row in rows:
        own = lookup(rows, OWN, row["tp"], row["micro_batch_size"], row["seq_length"], row["pace_ms"])
        if row["contender"] == OWN or own is None:
            continue
        interval = ratio_interval(row["block_medians_us"], own["block_medians_us"])
        result.append(
            {
                "over_headrace": row["contender"],
                "tp": row["tp"],
                "micro_batch_size": row["micro_batch_size"],
                "seq_length": row["seq_length"],
                "pace_ms": row["pace_ms"],
                "ratio": row["group_median_us"] / own["group_median_us"],
                "low": interval.low,
                "high": interval.high,
                "verdict": verdict(interval, better="higher"),
                "reason": interval.reason,
            }
        )
    return result


def figures(rows: Sequence[Row]) -> list[Figure]:
    """The figures of the design that this bench can answer."""
    found = [
        Figure(
            what=f"get_batch over broadcast (gloo), TP={tp}, 1 x {seq_length}, 5 ms steps",
            target=target,
            reached_by="at least",
            value=quotient(rows, "broadcast", "group_median_us", tp, seq_length, 5.0),
        )
        for tp, seq_length, target in ((4, 131072, 250.0), (4, 4096, 100.0), (2, 4096, 80.0))
    ]
    found += [
        Figure(
            what=f"get_batch over lean iceoryx2, TP={row['tp']}, {row['micro_batch_size']} x {row['seq_length']}, "
            f"{row['pace_ms']:g} ms steps",
            target=1.0,
            reached_by="at least",
            value=quotient(
                rows,
                "iceoryx2",
                "group_median_us",
                row["tp"],
                row["seq_length"],
                row["pace_ms"],
                row["micro_batch_size"],
            ),
        )
        for row in rows
        if row["contender"] == "iceoryx2"
    ]
    found += [
        Figure(
            what=f"feeder at 5 ms steps, TP={row['tp']}, 1 x 4096, in cores",
            target=0.1,
            reached_by="at most",
            value=row["writer_cpu"],
        )
        for row in rows
        if (row["contender"], row["micro_batch_size"], row["seq_length"], row["pace_ms"]) == (OWN, 1, 4096, 5.0)
    ]
    found += [
        Figure(
            what=f"{what} over replicated's, TP={row['tp']}, {row['micro_batch_size']} x {row['seq_length']}",
            target=1.2 / row["tp"],  # "about one part in TP"
            reached_by="at most",
            value=None if row[key] is None else row[key] / row_of_replicated[key],
        )
        for row in rows
        if row["contender"] == OWN and row["pace_ms"] == max(one["pace_ms"] for one in rows)
        if (row_of_replicated := beside(rows, row, "replicated")) is not None
        for what, key in (("host memory", "host_rss_mb"), ("bytes read", "bytes_read_per_step"))
    ]
    return found


def quotient(
    rows: Sequence[Row], other: str, key: str, tp: int, seq_length: int, pace_ms: float, micro_batch_size: int = 1
) -> float | None:
    """The other's value over headrace's; None if either is missing."""
    theirs = lookup(rows, other, tp, micro_batch_size, seq_length, pace_ms)
    own = lookup(rows, OWN, tp, micro_batch_size, seq_length, pace_ms)
    if theirs is None or own is None:
        return None
    return float(theirs[key] / own[key])


def beside(rows: Sequence[Row], row: Row, contender: str) -> Row | None:
    """The row of another contender in the same case at the same pace."""
    return lookup(rows, contender, row["tp"], row["micro_batch_size"], row["seq_length"], row["pace_ms"])


def lookup(
    rows: Sequence[Row], contender: str, tp: int, micro_batch_size: int, seq_length: int, pace_ms: float
) -> Row | None:
    """The one row with these keys."""
    wanted = (contender, tp, micro_batch_size, seq_length, pace_ms)
    keys = ("contender", "tp", "micro_batch_size", "seq_length", "pace_ms")
    return next((row for row in rows if tuple(row[key] for key in keys) == wanted), None)
