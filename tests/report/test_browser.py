"""The page in headless Chromium: it draws, says nothing on the console, asks for nothing, and fits a phone."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from .conftest import make_document

CHROMIUM = Path("/usr/bin/chromium")
ARGUMENTS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip


@pytest.fixture(scope="module")
def browser():
    if not CHROMIUM.exists():
        if os.environ.get("CI") == "true":
            pytest.fail(f"{CHROMIUM} is missing: this run has to test the report in a browser")
        pytest.skip(f"{CHROMIUM} is missing: the report is not tested in a browser")
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as runner:
        running = runner.chromium.launch(executable_path=str(CHROMIUM), args=list(ARGUMENTS))
        yield running
        running.close()


@pytest.fixture(scope="module")
def page_path(tmp_path_factory):
    pytest.importorskip("altair")
    from headrace.report.html import write_html

    path = tmp_path_factory.mktemp("report") / "report.html"
    write_html(path, make_document())
    return path


@pytest.fixture
def open_page(browser, page_path):
    """Opens the page and watches it: console, errors, requests."""
    contexts = []

    def open_in(**options):
        context = browser.new_context(**options)
        contexts.append(context)
        page = context.new_page()
        page.said, page.asked = [], []
        page.on("console", lambda message: page.said.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: page.said.append(f"error: {error}"))
        page.on("request", lambda request: page.asked.append(request.url))
        page.goto(page_path.as_uri())
        page.wait_for_selector("body[data-ready=yes]")
        return page

    yield open_in
    for context in contexts:
        context.close()


def luminance(colour):
    """Relative luminance of `rgb(r, g, b)`, as WCAG defines it; a contrast is a ratio of two of them."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_draws_quietly_and_asks_for_nothing(open_page, page_path, scheme):
    page = open_page(color_scheme=scheme)
    assert page.said == []
    assert page.asked == [page_path.as_uri()]
    for name in ("breakdown", "waits", "collectives", "links", "waterfall"):
        assert page.locator(f"#chart-{name} svg").count() == 1
        assert page.get_attribute(f"#chart-{name}", "data-drawn") == scheme
    assert page.inner_text("#slow-rank .headline") == "rank 2 is slow, because of its card (confidence: high)"
    marks = page.locator("#chart-breakdown svg .mark-rect path").count()
    assert marks >= 4 * 7  # ranks x parts


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_cell_of_the_heat_map_vanishes_into_the_page(open_page, scheme):
    page = open_page(color_scheme=scheme)
    cells = (
        "[...document.querySelectorAll('#chart-waits svg .role-mark path')].map(cell => getComputedStyle(cell).fill)"
    )
    paper = luminance(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    cells = [luminance(fill) for fill in page.evaluate(cells)]
    assert len(cells) == 12
    for cell in cells:
        assert (max(cell, paper) + 0.05) / (min(cell, paper) + 0.05) > 1.5


def test_the_reader_can_switch_the_theme(open_page):
    page = open_page(color_scheme="light")
    paper = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(paper)
    page.click(".theme")
    page.wait_for_selector("#chart-waterfall[data-drawn=dark]")
    assert page.evaluate(paper) != light
    assert page.inner_text(".theme") == "light"
    assert page.said == []


def test_it_fits_a_phone(open_page):
    page = open_page(viewport={"width": 360, "height": 740})
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    widths = page.evaluate("[...document.querySelectorAll('.chart svg')].map(svg => svg.getBoundingClientRect().width)")
    assert len(widths) == 5
    assert all(200 < width <= 360 for width in widths)
    assert page.said == []


def test_numbers_behind_the_charts_open(open_page):
    page = open_page()
    page.click("#step-time summary")
    assert page.locator("#step-time tr.marked td").first.inner_text() == "2"


def test_a_reader_who_sees_nothing_is_told(open_page):
    page = open_page()
    labels = page.evaluate("[...document.querySelectorAll('.chart')].map(chart => chart.getAttribute('aria-label'))")
    assert all(label and len(label) > 20 for label in labels)
