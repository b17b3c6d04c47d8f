"""The report as one HTML file that needs nothing else: charts, their library and the data are inside.

The page forbids itself every request (Content-Security-Policy), follows the reader's light or dark theme and can be
switched, and reads on a phone. The document it was made from lies in it as JSON (`#document`).
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cache
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path, PurePath
from typing import Any

import msgspec

from headrace.errors import ConfigError
from headrace.report.summary import (
    FREE_PARTS,
    WATERFALL_PARTS,
    Json,
    check_document,
    extent,
    flat_breakdown,
    link_headline,
    mean_per_rank,
    milliseconds,
    notes_of,
    quantity,
    rank_headline,
    reasons,
    share,
    wait_steps,
)

NEEDED_PACKAGES = ("jinja2", "altair", "vl_convert")
MISSING = "the HTML report needs {}, which is not installed: pip install 'headrace[report]'"

MAX_NAMES = 8
"""Files or folders that are named as read; a large job has thousands."""

BREAKDOWN_COLUMNS = {
    "e2e_us": "step",
    "computing_us": "computing",
    "communication_us": "communication",
    "overlapped_us": "hidden",
    "communication_not_overlapped_us": "exposed",
    "free_us": "free",
    "bubble_us": "bubble",
    "preparing_us": "preparing",
}


def write_html(path: Path, document: Json) -> None:
    """Write the page. Raises ConfigError when the `report` extra is missing or the file cannot be written, FormatError
    for a document of another version."""
    check_document(document)
    page = render(document)
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from error


def require_packages() -> None:
    """ConfigError, with the command that helps, unless the `report` extra is installed; imports nothing."""
    for name in NEEDED_PACKAGES:
        if find_spec(name) is None:
            raise ConfigError(MISSING.format(name))


def render(document: Json) -> str:
    """The whole page as text. Raises ConfigError when the `report` extra is missing."""
    try:
        import jinja2

        from headrace.report.charts import make_charts

        bundle = _vega_bundle()
    except ImportError as error:
        raise ConfigError(MISSING.format(error.name)) from error
    charts = make_charts(document)
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters |= {"ms": milliseconds, "embed": _embedded_json}
    environment.globals |= {"share": share, "quantity": quantity, "reasons": reasons}
    folder = files("headrace.report")
    page: str = environment.from_string((folder / "page.html").read_text(encoding="utf-8")).render(
        document=document,
        date=_date(document),
        sources=_sources(document),
        rank_headline=rank_headline(document),
        link_headline=link_headline(document),
        wait_extent=extent(wait_steps(document)),
        charts=charts,
        specs={name: chart.spec for name, chart in charts.items()},
        breakdown=mean_per_rank(flat_breakdown(document), (*BREAKDOWN_COLUMNS, *FREE_PARTS)),
        breakdown_columns=BREAKDOWN_COLUMNS,
        free_parts=FREE_PARTS,
        waterfall=mean_per_rank(document["waterfall"], (*WATERFALL_PARTS, "e2e_us")),
        waterfall_parts=WATERFALL_PARTS,
        notes=notes_of(document, most_ranks=16),
        style=(folder / "page.css").read_text(encoding="utf-8"),
        script=(folder / "page.js").read_text(encoding="utf-8"),
        vega=bundle,
    )
    return page


@cache
def _vega_bundle() -> str:
    """Vega, Vega-Lite and vega-embed in one script, of the version Altair writes for. No network is needed."""
    import altair
    import vl_convert

    version = ".".join(altair.SCHEMA_VERSION.removeprefix("v").split(".")[:2])
    script: str = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", vl_version=version)
    return script.replace("</script", "<\\/script")


def _date(document: Json) -> str:
    """When the analysis was made: as its file says, else now."""
    made = datetime.fromisoformat(document["date"]) if "date" in document else datetime.now(UTC)
    return f"{made.astimezone(UTC):%Y-%m-%d %H:%M} UTC"


def _sources(document: Json) -> list[str]:
    """What was read, by folder: `traces: rank_0.json, rank_1.json`."""
    log = document["training_log"]
    paths = [log["source"]] if log is not None else [entry["source"] for entry in document["inputs"]]
    by_folder: dict[str, list[str]] = {}
    for path in map(PurePath, dict.fromkeys(paths)):
        by_folder.setdefault("" if path.parent == PurePath() else f"{path.parent}: ", []).append(path.name)
    return _first([f"{folder}{', '.join(_first(names))}" for folder, names in by_folder.items()]) or ["nothing"]


def _first(names: Sequence[str]) -> list[str]:
    """The first of many, and how many more there are."""
    return [*names[:MAX_NAMES], *([f"{len(names) - MAX_NAMES} more"] if len(names) > MAX_NAMES else [])]


def _embedded_json(value: Any) -> str:
    """JSON that may stand inside a script element: no `</` can end it."""
    return msgspec.json.encode(value).decode().replace("<", "\\u003c").replace("\u2028", "\\u2028")
