"""The terminal report: the verdict first, then the guide's order; what is unknown is a dash."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from headrace.errors import FormatError
from headrace.report import print_report

from .conftest import TRAINING_LOG, empty_document, make_document


def printed(document, width=100):
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    print_report(console, document)
    return console.file.getvalue()


def test_the_verdict_comes_first_and_the_rest_in_order_of_importance(document):
    text = printed(document)
    assert text.startswith("slow rank: card  rank 2 is late by 40.0 ms per step")
    order = ["slow rank", "slow link", "step time", "waits", "collectives", "links", "time goes to", "rules", "note:"]
    places = [text.index(part) for part in order]
    assert places == sorted(places)
    assert "(sure: high)" in text


def test_numbers_of_the_document_are_there(document):
    text = " ".join(printed(document).split())
    assert "2 100.00 80.00" in text  # rank, step, computing
    assert "2 (90.0)" in text  # waited for rank 2
    assert "7.00 47 % 60.00 slow" in text
    assert "not judged" in text
    assert "12.30" in text
    assert "7 collectives have no counterpart" in text
    assert "rank 0, 1, 2, 3: a note about <i>this</i> rank" in text


def test_a_rule_that_does_not_hold_says_why(document):
    assert "names rank 1 (0.570 difference of ratios); not valid here: needs all ranks" in printed(document, 200)


def test_unknown_is_a_dash_and_empty_columns_are_left_out(document):
    for row in document["breakdown"]:
        row |= {"communication_us": None, "communication_not_overlapped_us": None, "overlapped_us": None}
        row["free"] = dict.fromkeys(row["free"])
    text = printed(document)
    assert " - " in text
    assert "free time in ms by cause" not in text
    assert "bubble" not in text.split("waits in ms")[0]


def test_nothing_at_all_is_still_a_report():
    text = printed(empty_document())
    assert text.startswith("slow rank: undecidable")
    assert "step time" not in text


def test_a_training_log_is_a_report_of_its_own():
    text = printed(empty_document() | {"training_log": TRAINING_LOG})
    assert "slow rank" not in text
    assert "47,316.0" in text
    assert "5,540.0 ms" in text


def test_a_large_job_is_cut_and_says_so():
    assert "and 8 more ranks" in printed(make_document(40))


def test_another_version_is_refused(document):
    with pytest.raises(FormatError, match="version 1"):
        printed(document | {"version": 2})
