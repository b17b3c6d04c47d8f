"""The bench compares things that do the same work, and its record says what it must."""

from __future__ import annotations

import json
from itertools import count

import numpy as np
import pytest

from headrace.bench import pack as bench
from headrace.bench import pack_contenders as contenders
from headrace.errors import ConfigError
from headrace.store import StoreWriter

SEQ_LENGTH = 700
SMALL = 20_000  # bytes of slots: prefaulting the real working set is for measuring


@pytest.fixture
def text():
    return bench.synthetic_text(SEQ_LENGTH, seed=3)


def test_numpy_writes_what_the_pass_writes(text):
    slots = contenders.make_slots(SEQ_LENGTH, 2)
    ours = contenders.headrace_contender(text.rows, text.eod, slots)
    numpys = contenders.numpy_contender(text.rows, text.eod, slots)
    for row, documents in enumerate(text.documents_per_row):
        ours(row, 0)
        numpys(row, 1)
        for name, values in slots.fields[0].items():
            used = documents + 1 if name == "cu_seqlens" else SEQ_LENGTH
            assert np.array_equal(values.ravel()[:used], slots.fields[1][name].ravel()[:used]), name
        assert slots.fields[0]["cu_seqlens"][documents] == SEQ_LENGTH


def test_slots_lie_apart_and_memcpy_stays_in_its_own():
    slots = contenders.make_slots(SEQ_LENGTH, 3)
    for flat in slots.flat:
        flat.fill(7)
    contenders.memcpy_contender(28 * SEQ_LENGTH, slots)(0, 1)
    assert (slots.flat[1][: 28 * SEQ_LENGTH] == 1).all()
    assert (slots.flat[1][28 * SEQ_LENGTH :] == 7).all()
    assert (slots.flat[0] == 7).all()
    assert (slots.flat[2] == 7).all()


def test_a_view_and_its_memcpy_move_as_many_bytes(text):
    slots = contenders.make_slots(SEQ_LENGTH, 2)
    named = contenders.cp_contenders(text.rows, text.eod, slots)
    before = [flat.copy() for flat in slots.flat]
    for contender in named.values():
        contender(0, 1)
    assert all(np.array_equal(flat, one) for flat, one in zip(slots.flat, before, strict=True)), "the slots stay"
    assert (slots.fields[1]["cu_seqlens"][: text.documents_per_row[1] + 1][-1]) == SEQ_LENGTH


def test_turns_rotate_over_contenders_rows_and_slots():
    calls = []
    named = {name: lambda row, slot, name=name: calls.append((name, row, slot)) for name in "abc"}
    values = bench.take_turns(named, num_slots=4, num_rounds=3, clock=count(step=5).__next__)
    assert "".join(name for name, _, _ in calls) == "abcbcacab"
    assert [row for _, row, _ in calls] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert [slot for _, _, slot in calls] == [0, 1, 2, 3, 0, 1, 2, 3, 0]
    assert values == {"a": [5, 5, 5], "b": [5, 5, 5], "c": [5, 5, 5]}


def test_the_record(tmp_path):
    with StoreWriter(tmp_path / "corpus", np.uint16) as writer:
        for length in (3, 900, 40):
            writer.add_document([7] * (length - 1) + [2])
    record = bench.run(
        str(tmp_path / "corpus"), seq_lengths=(200, 64), num_rounds=8, num_warmup_rounds=1, working_set_bytes=SMALL
    )
    json.dumps(record)
    assert record["version"] == 1
    ran = {"headrace", "memcpy", "numpy", "megatron", "cp_view", "cp_memcpy"} - record["skipped"].keys()
    keys = [(row["text"], row["seq_length"], row["contender"]) for row in record["rows"]]
    assert sorted(keys) == sorted((t, s, c) for t in ("corpus", "synthetic", "short") for s in (64, 200) for c in ran)
    for row in record["rows"]:
        assert len(row["values_us"]) == 8
        assert len(row["warmup_us"]) == 1
        assert row["median_us"] == pytest.approx(np.median(row["values_us"]))
        assert row["ns_per_token"] == pytest.approx(row["median_us"] * 1e3 / row["seq_length"])
        assert row["mean_documents"] >= 1
    assert record["summary"]["text"] == "corpus"
    assert record["summary"]["seq_length"] == 200, "the longest that ran"
    medians = {
        row["contender"]: row["median_us"]
        for row in record["rows"]
        if (row["text"], row["seq_length"]) == ("corpus", 200)
    }
    assert record["summary"]["pack_over_memcpy"] == pytest.approx(medians["headrace"] / medians["memcpy"])
    assert record["summary"]["cp_view_over_memcpy"] == pytest.approx(medians["cp_view"] / medians["cp_memcpy"])
    assert record["summary"]["cp_view_ns_per_token"] == pytest.approx(medians["cp_view"] * 1e3 / 200)
    if "megatron" in ran:
        by_documents = {name: value for name, value in record["summary"].items() if name.endswith("_documents")}
        documents = {row["mean_documents"] for row in record["rows"] if row["seq_length"] == 200}
        assert by_documents.keys() >= {f"megatron_over_pack_at_{number:.0f}_documents" for number in documents}


def test_short_documents_are_shorter_and_their_lengths_are_drawn_for_the_whole_row():
    many = {origin: bench.synthetic_text(50_000, seed=3, origin=origin) for origin in ("synthetic", "short")}
    means = {origin: np.mean(text.documents_per_row) for origin, text in many.items()}
    assert 2 * means["synthetic"] < means["short"] < 6 * means["synthetic"]
    for text in many.values():
        assert all((row[0, -20_000:] == text.eod).any() for row in text.rows), "documents up to the end of the row"


def test_megatron_missing_is_said_and_not_a_failure(monkeypatch):
    def missing(rows, eod):
        raise ImportError("No module named 'megatron'")

    monkeypatch.setattr(bench, "megatron_contender", missing)
    record = bench.run(seq_lengths=(32,), num_rounds=6, num_warmup_rounds=0, working_set_bytes=SMALL)
    assert "No module named 'megatron'" in record["skipped"]["megatron"]
    assert record["summary"]["megatron_over_pack"] is None
    assert record["summary"]["pack_over_memcpy"] > 0


def test_a_corpus_whose_documents_end_in_different_ways_needs_to_be_told(tmp_path):
    with StoreWriter(tmp_path / "corpus", np.uint16) as writer:
        writer.add_document([1, 2])
        writer.add_document([3, 4])
    with pytest.raises(ConfigError, match="end with 2 different ids"):
        bench.run(str(tmp_path / "corpus"), seq_lengths=(8,), num_rounds=1)
    assert bench.run(str(tmp_path / "corpus"), seq_lengths=(8,), num_rounds=1, working_set_bytes=SMALL, eod=4)["rows"]


@pytest.mark.parametrize(
    "wrong", [{"num_rounds": 0}, {"num_warmup_rounds": -1}, {"seq_lengths": ()}, {"seq_lengths": (0,)}]
)
def test_sizes_that_measure_nothing(wrong):
    with pytest.raises(ConfigError, match="at least"):
        bench.run(**wrong)
