"""CSV with Ascend's headings."""

from __future__ import annotations

import csv

import pytest

from headrace.errors import ConfigError, FormatError
from headrace.report import write_csv


def rows_of(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_tables_have_the_headings_of_msprof(tmp_path, document):
    paths = write_csv(tmp_path / "tables", document)
    assert [path.name for path in paths] == [
        "cluster_step_trace_time.csv",
        "communication_matrix.csv",
        "communication.csv",
        "waits.csv",
    ]
    steps = rows_of(paths[0])
    assert len(steps) == 12
    row = steps[6]
    assert (row["Step"], row["Type"], row["Index"]) == ("2", "rank", "2")
    assert row["Computing"] == "80000.0"
    assert row["Communication(Not Overlapped and Exclude Receive)"] == "10000.0"
    assert row["Preparing"] == "500.0"
    link = rows_of(paths[1])[3]
    assert (link["Src Rank"], link["Dst Rank"], link["Bandwidth(GB/s)"]) == ("0", "4", "7.0")
    assert float(link["Transit Time(ms)"]) == pytest.approx(60 / 7, abs=1e-6)
    operation = rows_of(paths[2])[0]
    assert (operation["Wait Time(ms)"], operation["Wait Time Ratio"]) == ("40.0", "0.9524")
    assert rows_of(paths[3])[0] == {"Rank": "0", "Waited For": "2", "Wait Time(us)": "90000.0"}


def test_what_is_unknown_is_an_empty_cell(tmp_path, document):
    document["breakdown"][0]["communication_not_overlapped_us"] = None
    first = rows_of(write_csv(tmp_path, document)[0])[0]
    assert first["Communication(Not Overlapped)"] == ""
    assert first["Communication(Not Overlapped and Exclude Receive)"] == ""


def test_a_folder_that_cannot_be_made(tmp_path, document):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        write_csv(tmp_path / "file" / "tables", document)


def test_another_version_is_refused(tmp_path, document):
    with pytest.raises(FormatError):
        write_csv(tmp_path, document | {"format": "something else"})
