"""The page as text: complete, escaped, self-contained. What a browser makes of it is in test_browser.py."""

from __future__ import annotations

import builtins
import json
import re

import pytest

from headrace.errors import ConfigError, FormatError

from .conftest import TRAINING_LOG, empty_document, make_document

pytest.importorskip("altair")
pytest.importorskip("vl_convert")

from headrace.report.charts import make_charts
from headrace.report.html import _vega_bundle, render, write_html


def embedded(page, name):
    return json.loads(re.search(rf'id="{name}">(.*?)</script>', page, re.DOTALL).group(1))


def test_the_document_and_all_charts_are_inside(document):
    page = render(document)
    assert embedded(page, "document") == document
    assert set(embedded(page, "charts")) == {"breakdown", "waits", "collectives", "links", "waterfall"}
    for section in (
        "slow-rank",
        "slow-link",
        "step-time",
        "waits",
        "collectives",
        "links",
        "utilisation",
        "named-rules",
    ):
        assert f'id="{section}"' in page


def test_nothing_is_loaded_from_anywhere(document):
    page = re.sub(r"(<script[^>]*>).*?</script>", r"\1</script>", render(document), flags=re.DOTALL)
    assert not re.search(r"<(?:script|img|iframe|link)[^>]+(?:src|href)=", page)
    assert "default-src 'none'" in page
    assert "@import" not in page
    assert "url(" not in page.split("<script")[0]


def test_text_from_traces_is_escaped_everywhere(document):
    page = render(document)
    assert "swap the card </script><b>" not in page
    assert "swap the card &lt;/script&gt;&lt;b&gt;" in page
    assert "about &lt;i&gt;this&lt;/i&gt; rank" in page
    assert page.count("</script>") == 4


def test_charts_show_the_documents_numbers(document):
    charts = make_charts(document)
    bars = charts["breakdown"].spec["data"]["values"]
    assert {row["part"] for row in bars if row["rank"] == "2"} >= {"computing", "exposed communication", "copies"}
    assert next(row["ms"] for row in bars if row["rank"] == "2" and row["part"] == "computing") == 80.0
    heat = charts["waits"].spec["data"]["values"]
    assert {(row["rank"], row["ms"]) for row in heat} == {("0", 30.0), ("1", 30.0), ("2", 0.0), ("3", 30.0)}
    links = charts["links"].spec["data"]["values"]
    assert [row["slow"] for row in links] == [False, False, False, True]
    parts = charts["waterfall"].spec["data"]["values"]
    assert parts[-1]["until"] == pytest.approx(1.0)
    assert charts["collectives"].spec["data"]["values"][1]["ms"] == 40.0


def test_the_page_says_what_was_read_and_when(document):
    for rank, entry in enumerate(document["inputs"]):
        entry["source"] = f"job/rank_{rank}.json"
    page = render(document | {"date": "2026-01-02T03:04:05+00:00"})
    assert "Read job: rank_0.json, rank_1.json, rank_2.json, rank_3.json<" in page
    assert "2026-01-02 03:04 UTC" in page
    assert "The table sums over 3 steps, 2 to 4." in page


def test_many_files_are_named_by_the_first(document):
    document["inputs"] = [{"rank": rank, "source": f"job/{rank}.json", "notes": []} for rank in range(20)]
    assert "7.json, 12 more<" in render(document)


def test_without_links_the_page_has_a_line_about_them_and_no_card(document):
    assert '<article class="verdict bad" id="slow-link">' in render(document)
    document["slow_link"] |= {"verdict": "undecidable", "links": [], "what": "the traces tell of no link"}
    assert '<p class="soft" id="slow-link">the traces tell of no link; to decide it' in render(document)


def test_charts_without_data_are_left_out():
    document = empty_document()
    assert make_charts(document) == {}
    page = render(document)
    assert embedded(page, "charts") == {}
    assert "undecidable" in page


def test_a_very_large_job_stays_readable():
    charts = make_charts(make_document(500))
    ranks = {row["rank"] for row in charts["breakdown"].spec["data"]["values"]}
    assert len(ranks) == 64
    assert "2" in ranks  # the one that waits least is among them


def test_a_training_log_has_a_page(document):
    page = render(empty_document() | {"training_log": TRAINING_LOG})
    assert "47,316" in page
    assert 'id="slow-rank"' not in page


def test_a_rank_that_is_not_known_is_a_question_mark(document):
    for row in document["breakdown"]:
        row["rank"] = None
    assert "<td>?</td>" in render(document)


def test_the_page_is_written_or_the_reason_given(tmp_path, document):
    write_html(tmp_path / "report.html", document)
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")
    with pytest.raises(ConfigError, match="cannot be written"):
        write_html(tmp_path / "missing" / "report.html", document)
    with pytest.raises(FormatError):
        write_html(tmp_path / "report.html", document | {"version": 99})


def test_without_the_extra_one_sentence_says_what_to_install(document, monkeypatch):
    original = builtins.__import__

    def without_altair(name, *args, **options):
        if name.split(".")[0] in {"altair", "vl_convert"}:
            raise ImportError(f"No module named {name!r}", name=name)
        return original(name, *args, **options)

    _vega_bundle.cache_clear()
    monkeypatch.setattr(builtins, "__import__", without_altair)
    with pytest.raises(ConfigError, match=r"pip install 'headrace\[report\]'"):
        render(document)
