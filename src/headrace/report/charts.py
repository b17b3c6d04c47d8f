"""The charts of the HTML report, as Vega-Lite specifications made with Altair. Colours that depend on the theme (text,
grid, heat) are left to the page; colours that carry a meaning are fixed here and readable on both backgrounds."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import mean
from typing import Any

import altair as alt

from headrace.report.summary import FREE_PARTS, WATERFALL_PARTS, Json, flat_breakdown, mean_per_rank

MAX_RANKS = 64
"""More bars than this are no chart any more; the ranks that wait least are kept, they are the interesting ones."""
MAX_STEPS = 120
MAX_COLLECTIVES = 15
ROW_PX = 22

COMPUTING = "computing"
EXPOSED = "exposed communication"
COLOURS = {
    COMPUTING: "#3d7fc1",
    EXPOSED: "#e0803a",
    "waiting for data": "#8e6bbf",
    "host not launching": "#c94f6d",
    "launched, not started": "#4f9d8f",
    "copies": "#8a8f98",
    "unknown": "#b9bec5",
}
KIND_COLOURS = {"transfer": "#3d7fc1", "waiting": "#e0803a"}
WATERFALL_COLOURS = {
    "matrix units": "#3d7fc1",
    "other kernels": "#79aedb",
    "copies": "#8a8f98",
    "exposed communication": "#e0803a",
    "bubble": "#d9b13b",
    "idle": "#c94f6d",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """One chart and what a reader who cannot see it is told."""

    name: str
    title: str
    description: str
    spec: dict[str, Any]


def make_charts(document: Json) -> dict[str, Chart]:
    """By name: breakdown, waits, collectives, links, waterfall; those without data are left out."""
    made = (
        _breakdown(document),
        _waits(document),
        _collectives(document),
        _links(document),
        _waterfall(document),
    )
    return {chart.name: chart for chart in made if chart is not None}


def _breakdown(document: Json) -> Chart | None:
    parts = {"computing_us": COMPUTING, "communication_not_overlapped_us": EXPOSED, **FREE_PARTS}
    means = _kept(mean_per_rank(flat_breakdown(document), parts))
    values = [
        {"rank": _label(rank), "part": name, "order": place, "ms": round(row[key] / 1000, 3)}
        for rank, row in means.items()
        for place, (key, name) in enumerate(parts.items())
        if row[key]
    ]
    if not values:
        return None
    seen = [name for name in parts.values() if any(value["part"] == name for value in values)]
    chart = (
        alt.Chart(alt.Data(values=values), width="container", height=_height(len(means)))
        .mark_bar()
        .encode(
            x=alt.X("ms:Q", title="ms per step", stack="zero"),
            y=alt.Y("rank:N", title="rank", sort=[_label(rank) for rank in means]),
            color=alt.Color(
                "part:N",
                title=None,
                sort=seen,
                scale=alt.Scale(domain=seen, range=[COLOURS[name] for name in seen]),
                legend=alt.Legend(orient="top", labelLimit=220),
            ),
            order=alt.Order("order:Q"),
            tooltip=["rank:N", "part:N", alt.Tooltip("ms:Q", format=",.3f")],
        )
    )
    return _chart("breakdown", "Where a step's time goes", f"Stacked bars for {len(means)} ranks, ms per step.", chart)


def _waits(document: Json) -> Chart | None:
    rows = document["waits"]
    if len(rows) > MAX_RANKS:
        rows = sorted(rows, key=lambda row: row["wait_us"])[:MAX_RANKS]
    steps = sorted({int(step) for row in rows for step in row["by_step_us"] if step.isdigit()})[-MAX_STEPS:]
    values = [
        {"rank": _label(row["rank"]), "step": step, "ms": round(row["by_step_us"].get(str(step), 0.0) / 1000, 3)}
        for row in rows
        for step in steps
    ]
    if not values:
        return None
    ranks = [_label(row["rank"]) for row in rows]
    chart = (
        alt.Chart(alt.Data(values=values), width="container", height=_height(len(rows)))
        .mark_rect()
        .encode(
            x=alt.X("step:O", title="step", axis=alt.Axis(labelAngle=0, labelOverlap="greedy")),
            y=alt.Y("rank:N", title="rank", sort=ranks),
            color=alt.Color("ms:Q", title="waited, ms", legend=alt.Legend(orient="top", gradientLength=160)),
            tooltip=["rank:N", "step:O", alt.Tooltip("ms:Q", format=",.3f")],
        )
    )
    said = f"Waiting time, {len(rows)} ranks by {len(steps)} steps: a strong row waits, a pale one is waited for."
    return _chart("waits", "Who waits, step by step", said, chart)


def _collectives(document: Json) -> Chart | None:
    slowest = document["collectives"]["slowest"][:MAX_COLLECTIVES]
    values = []
    for place, row in enumerate(slowest):
        step = "" if row["step"] is None else f" in step {row['step']}"
        name = f"{place + 1}. {row['kind']}{step}"
        waited = row["longest_us"] - row["transfer_us"]
        for part, us in (("transfer", row["transfer_us"]), ("waiting", waited)):
            values.append({"collective": name, "part": part, "ms": round(us / 1000, 3), "bytes": row["num_bytes"]})
    if not values:
        return None
    chart = (
        alt.Chart(alt.Data(values=values), width="container", height=_height(len(slowest)))
        .mark_bar()
        .encode(
            x=alt.X("ms:Q", title="ms on the rank that took longest", stack="zero"),
            y=alt.Y("collective:N", title=None, sort=None, axis=alt.Axis(labelLimit=180)),
            color=alt.Color(
                "part:N",
                title=None,
                scale=alt.Scale(domain=list(KIND_COLOURS), range=list(KIND_COLOURS.values())),
                legend=alt.Legend(orient="top"),
            ),
            tooltip=["collective:N", "part:N", alt.Tooltip("ms:Q", format=",.3f"), alt.Tooltip("bytes:Q", format=",")],
        )
    )
    return _chart("collectives", "The slowest collectives", f"The {len(slowest)} longest, transfer and waiting.", chart)


def _links(document: Json) -> Chart | None:
    links = document["slow_link"]["links"]
    values = [
        {
            "from": _label(link["src"]),
            "to": _label(link["dst"]),
            "GB/s": link["bandwidth_gb_s"],
            "share": round(link["bandwidth_gb_s"] / link["expected_gb_s"], 4),
            "over": link["transport"],
            "slow": link["slow"],
        }
        for link in links
        if link["judged"] and link["expected_gb_s"]
    ]
    if not values:
        return None
    ends = sorted({link[end] for link in links for end in ("src", "dst")})
    order = [_label(rank) for rank in ends]
    base = alt.Chart(
        alt.Data(values=values), width="container", height=_height(len({value["from"] for value in values}))
    ).encode(
        x=alt.X("to:N", title="to rank", sort=order, axis=alt.Axis(labelAngle=0, orient="top")),
        y=alt.Y("from:N", title="from rank", sort=order),
    )
    cells = base.mark_rect().encode(
        color=alt.Color(
            "share:Q",
            title="of the median of its kind",
            scale=alt.Scale(domain=[0.4, 0.8, 1.0], range=["#c94f6d", "#e9c46a", "#4f9d8f"], clamp=True),
            legend=alt.Legend(orient="top", format=".0%", gradientLength=160),
        ),
        tooltip=["from:N", "to:N", "over:N", alt.Tooltip("GB/s:Q", format=".2f"), alt.Tooltip("share:Q", format=".0%")],
    )
    numbers = base.mark_text(fontSize=10, color="#101418").encode(text=alt.Text("GB/s:Q", format=".1f"))
    return _chart(
        "links", "Links", f"Matrix of {len(values)} links, GB/s, coloured by share of their kind.", cells + numbers
    )


def _waterfall(document: Json) -> Chart | None:
    rows = document["waterfall"]
    whole = mean(row["e2e_us"] for row in rows) if rows else 0
    if not whole:
        return None
    values, at = [], 0.0
    for place, (key, name) in enumerate(WATERFALL_PARTS.items()):
        part = mean(row[key] for row in rows) / whole
        values.append({"part": name, "order": place, "from": at, "until": at + part, "share": round(part, 5)})
        at += part
    names = list(WATERFALL_PARTS.values())
    base = alt.Chart(alt.Data(values=values), width="container", height=_height(len(values))).encode(
        y=alt.Y("part:N", title=None, sort=names, axis=alt.Axis(labelLimit=180)),
    )
    bars = base.mark_bar().encode(
        x=alt.X(
            "from:Q", title="share of the step, mean over ranks and steps", axis=alt.Axis(format=".0%", tickCount=5)
        ),
        x2="until:Q",
        color=alt.Color(
            "part:N",
            legend=None,
            scale=alt.Scale(domain=names, range=[WATERFALL_COLOURS[name] for name in names]),
        ),
        tooltip=["part:N", alt.Tooltip("share:Q", format=".1%")],
    )
    labels = base.mark_text(align="left", dx=4).encode(x="until:Q", text=alt.Text("share:Q", format=".1%"))
    said = ", ".join(f"{value['part']} {value['share']:.1%}" for value in values)
    return _chart("waterfall", "What the device's time goes to", said, bars + labels)


def _kept(means: dict[Any, Json]) -> dict[Any, Json]:
    if len(means) <= MAX_RANKS:
        return means
    ordered = sorted(means.items(), key=lambda item: item[1]["communication_not_overlapped_us"] or 0)
    return dict(ordered[:MAX_RANKS])


def _height(num_rows: int) -> int:
    """In px, as a number: with a height in steps Vega-Lite warns that it cannot fit it to the page."""
    return ROW_PX * num_rows


def _label(rank: object) -> str:
    return "?" if rank is None else str(rank)


def _chart(name: str, title: str, description: str, chart: Any) -> Chart:
    spec = chart.properties(description=description).to_dict()
    return Chart(name=name, title=title, description=description, spec=spec)
