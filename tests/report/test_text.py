"""The terminal report: the verdict first, then the guide's order; what is unknown is a dash."""

from __future__ import annotations

import io
from typing import get_args

import pytest
from rich.console import Console

from headrace.errors import FormatError
from headrace.report import print_report
from headrace.report.summary import link_headline, rank_headline
from headrace.traces.slow_link import LinkVerdict
from headrace.traces.slow_rank import Verdict

from .conftest import TRAINING_LOG, empty_document, make_document


def printed(document, width=100):
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    print_report(console, document)
    return console.file.getvalue()


def test_the_verdict_comes_first_and_the_rest_in_order_of_importance(document):
    text = printed(document)
    headline, numbers, disproof = text.splitlines()[:3]
    assert headline == "rank 2 is slow, because of its card (confidence: high)"
    assert numbers.strip() == "rank 2 is late by 40.0 ms per step"
    assert disproof.strip() == "would be disproved by: swap the card </script><b>"
    order = [
        "rank 2 is slow",
        "a link is slow",
        "step time",
        "waits",
        "collectives",
        "links",
        "time goes to",
        "rules",
        "note:",
    ]
    places = [text.index(part) for part in order]
    assert places == sorted(places)
    assert "waits in ms over 3 steps, 2 to 4" in text


@pytest.mark.parametrize("verdict", get_args(Verdict))
def test_every_verdict_on_ranks_has_a_headline_of_its_own(document, verdict):
    document["slow_rank"] |= {"verdict": verdict, "rank": 2 if verdict in {"card", "host"} else None}
    wanted = {
        "card": "its card",
        "host": "its host",
        "partition": "its part of the model",
        "data": "its data",
        "none": "no rank is slow",
        "undecidable": "cannot say whether a rank is slow",
    }
    assert rank_headline(document).endswith(wanted[verdict])
    assert printed(document, 80).splitlines()[0] == f"{rank_headline(document)} (confidence: high)", "one line"


def test_a_headline_says_no_more_than_the_traces_do(document):
    document["slow_rank"]["traced"] = False
    assert rank_headline(document) == "rank 2 is slow, because of its card or its host"
    document["slow_rank"]["traced"] = True
    document["inputs"][2]["device"] = "cpu"
    assert rank_headline(document) == "rank 2 is slow, because of its core or its work"


@pytest.mark.parametrize("verdict", get_args(LinkVerdict))
def test_every_verdict_on_links_has_one(document, verdict):
    document["slow_link"]["verdict"] = verdict
    assert "link" in link_headline(document)
    document["slow_link"]["links"][0]["slow"] = True
    assert ("2 links are slow" in printed(document)) == (verdict == "slow")


def test_what_the_headline_says_is_not_said_twice(document):
    document["slow_rank"] |= {"verdict": "none", "rank": None, "what": "no rank is slow: none is late by 3%"}
    document["slow_link"] |= {"verdict": "none", "what": "no link is slow: 7 of 7 could be judged"}
    text = printed(document)
    assert text.count("no rank is slow") == text.count("no link is slow") == 1
    assert "none is late by 3%" in text


def test_times_of_rules_are_in_ms_as_all_others(document):
    document["named_rules"][0] |= {"value": 11_075_716.962, "unit": "us"}
    assert "(11,075.72 ms)" in printed(document)


def test_numbers_of_the_document_are_there(document):
    text = " ".join(printed(document).split())
    assert "2 100.00 80.00" in text  # rank, step, computing
    assert "2 (90.0)" in text  # waited for rank 2
    assert "7.00 47 % 60.00 slow" in text
    assert "not judged" in text
    assert "12.30" in text
    assert "7 collectives without a counterpart" in text
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
    assert text.startswith("cannot say whether a rank is slow\n")
    assert "whether a link" not in text
    assert "step time" not in text


def test_a_training_log_is_a_report_of_its_own():
    text = printed(empty_document() | {"training_log": TRAINING_LOG})
    assert "is slow" not in text
    assert "47,316.0" in text
    assert "5,540.0 ms" in text


def test_a_large_job_is_cut_and_says_so():
    assert "and 8 more ranks" in printed(make_document(40))


def test_another_version_is_refused(document):
    with pytest.raises(FormatError, match="version 1"):
        printed(document | {"version": 2})
