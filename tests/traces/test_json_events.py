"""The event stream: any layout, any damage, bounded memory, and nothing lost or made up."""

from __future__ import annotations

import gzip
import json
import random
import tracemalloc

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import FormatError
from headrace.traces import byte_source, byte_window
from headrace.traces.json_events import EventFile


class Event(msgspec.Struct):
    name: str = ""
    ts: float = 0.0


def read(path, **options):
    file = EventFile(path, Event, **options)
    return [event.name for batch in file for event in batch], file


def events_text(names):
    return [json.dumps({"ph": "X", "name": name, "ts": n, "args": {"x": [1, 2]}}) for n, name in enumerate(names)]


nasty_names = st.lists(st.text(st.sampled_from('ab{}[],:"\\ \n'), max_size=12), max_size=30)


@given(names=nasty_names, window=st.integers(1, 400), separator=st.sampled_from([",", ", ", ",\n  ", " ,\t"]))
def test_every_event_arrives_once_in_order_whatever_the_window(tmp_path_factory, names, window, separator):
    path = tmp_path_factory.mktemp("events") / "trace.json"
    tail = ', "traceName": "a}, {b ] }", "baseTimeNanoseconds": 7}'
    path.write_text('{"schemaVersion": 1, "traceEvents": [' + separator.join(events_text(names)) + "]" + tail)
    found, file = read(path, window_bytes=window)
    assert found == names
    assert (file.skipped, file.truncated) == (0, False)
    assert file.envelope["baseTimeNanoseconds"] == 7
    assert file.envelope["schemaVersion"] == 1


@pytest.mark.parametrize("packed", [False, True])
def test_a_bare_list_is_a_trace_too(tmp_path, packed):
    path = tmp_path / "trace_view.json"
    data = ("[" + ",".join(events_text(["a", "b"])) + "]").encode()
    path.write_bytes(gzip.compress(data) if packed else data)
    found, file = read(path)
    assert found == ["a", "b"]
    assert (file.skipped, file.truncated) == (0, False)


def test_the_envelope_may_stand_behind_the_events_and_be_longer_than_a_window(tmp_path):
    path = tmp_path / "trace.json"
    properties = json.dumps([{"id": n, "name": "GPU"} for n in range(200)])
    path.write_text('{"traceEvents": [' + ",".join(events_text("abc")) + f'], "deviceProperties": {properties}}}')
    found, file = read(path, window_bytes=300)
    assert found == ["a", "b", "c"]
    assert len(file.envelope["deviceProperties"]) == 200
    assert file.skipped == 0


BROKEN = {
    "bad escape": r'{"ph": "X", "name": "C:\user\x", "ts": 1}',
    "raw quote": '{"ph": "X", "name": "say "hi" to", "ts": 1}',
    "not utf-8": b'{"ph": "X", "name": "\xff\xfe", "ts": 1}',
    "no number": '{"ph": "X", "name": "n", "ts": 1.2.3}',
    "open list": '{"ph": "X", "name": "n", "ts": 1, "args": {"x": [1, 2}}',
    "quote and border": '{"ph": "X", "name": "a"}, {"name": "b" "ts": 1}',
}


@pytest.mark.parametrize("window", [64, 1 << 20])
@pytest.mark.parametrize("kind", list(BROKEN))
def test_broken_events_are_skipped_and_counted_and_their_neighbours_live(tmp_path, kind, window):
    broken = BROKEN[kind] if isinstance(BROKEN[kind], bytes) else BROKEN[kind].encode()
    before, after = (",\n".join(events_text(names)).encode() for names in (["a", "b"], ["c", "d"]))
    path = tmp_path / "trace.json"
    path.write_bytes(b'{"traceEvents": [' + b",\n".join([before, broken, after]) + b'], "traceName": "t"}')
    found, file = read(path, window_bytes=window)
    assert [name for name in found if name in "abcd"][:2] == ["a", "b"]
    assert found[-2:] == ["c", "d"]
    assert file.skipped == 1
    assert file.envelope["traceName"] == "t"
    assert not file.truncated


def test_a_file_cut_anywhere_gives_what_it_still_holds(tmp_path):
    names = [f"e{n}" for n in range(40)]
    whole = ('{"schemaVersion": 1, "traceEvents": [' + ",\n".join(events_text(names)) + '], "traceName": "t"}').encode()
    path = tmp_path / "trace.json"
    for cut in range(whole.index(b"[") + 1, len(whole) - 1, 37):
        path.write_bytes(whole[:cut])
        found, file = read(path, window_bytes=256)
        assert found == names[: min(whole[:cut].count(b"}}"), 40)]
        assert file.truncated
        assert file.skipped <= 1


def test_a_gzip_cut_anywhere_gives_what_it_still_holds(tmp_path):
    names = [random.Random(n).randbytes(60).hex() for n in range(2000)]
    packed = gzip.compress(('{"traceEvents": [' + ",\n".join(events_text(names)) + "]}").encode())
    path = tmp_path / "trace.json.gz"
    for share in (0.3, 0.6, 0.95, 1.0):
        path.write_bytes(packed[: int(share * len(packed)) - 4])
        found, file = read(path)
        assert found == names[: len(found)]
        assert len(found) > (share - 0.25) * len(names)
        assert file.truncated


@pytest.mark.parametrize("content", [b"", b"{}", b'{"a": 1}', b"hello", '{"traceEvents": []}'.encode("utf-16")])
def test_what_is_no_trace_is_refused_by_name(tmp_path, content):
    path = tmp_path / "trace.json"
    path.write_bytes(content)
    with pytest.raises(FormatError, match=r"trace\.json.*traceEvents"):
        read(path)


def test_an_empty_array_is_an_empty_trace(tmp_path):
    path = tmp_path / "trace.json"
    path.write_text('{"traceEvents": [ ], "traceName": "t"}')
    found, file = read(path)
    assert (found, file.skipped, file.truncated, file.envelope["traceName"]) == ([], 0, False, "t")


def test_a_gzip_bomb_ends_with_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(byte_source, "EXPANSION_CHECKED_FROM_BYTES", 1 << 20)
    path = tmp_path / "bomb.json.gz"
    path.write_bytes(gzip.compress(b'{"traceEvents": [' + b'{"ph": "X"},' * 2_000_000))
    with pytest.raises(FormatError, match="grows from"):
        read(path)


def test_an_event_without_end_is_not_held_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr(byte_window, "MAX_HELD_BYTES", 1 << 20)
    path = tmp_path / "trace.json"
    path.write_bytes(b'{"traceEvents": [{"ph": "X", "name": "' + b"a" * (5 << 20))
    with pytest.raises(FormatError, match="border of two events"):
        read(path)


def test_unreadable_files_say_why(tmp_path):
    with pytest.raises(FormatError, match="cannot read"):
        read(tmp_path / "missing.json")
    with pytest.raises(FormatError, match="cannot read"):
        read(tmp_path)


def test_memory_does_not_grow_with_the_file(tmp_path):
    def peak(num_events):
        path = tmp_path / f"{num_events}.json"
        path.write_text('{"traceEvents": [' + ",\n".join(events_text(["x" * 50] * num_events)) + "]}")
        file = EventFile(path, Event, window_bytes=64 << 10)
        tracemalloc.start()
        count = sum(len(batch) for batch in file)
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert count == num_events
        return peak_bytes

    small, large = peak(3_000), peak(60_000)
    assert large < 1.5 * small


def test_the_head_is_found_without_reading_the_rest(tmp_path):
    path = tmp_path / "trace.json"
    path.write_text('{"distributedInfo": {"rank": 3}, "traceEvents": [' + "x" * 1_000_000)
    assert EventFile(path, Event).read_head()["distributedInfo"] == {"rank": 3}
