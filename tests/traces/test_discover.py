"""What is in a folder, and what every kind of bad input is told."""

from __future__ import annotations

import json
import shutil

import pytest

from headrace.errors import ConfigError, FormatError
from headrace.traces import analyze, to_document
from headrace.traces.discover import discover

from .ascend_files import Profile, write_db, write_text
from .kineto_files import envelope, gloo_job, launched, step, write, x


def kernel_trace(path, rank=0, world_size=2, *, number=1):
    events = [step(number, 0, 20), *launched(1, 1, "kernel", "gemm", 2, 5)]
    return write(path, events, envelope(rank, world_size))


def kinds(*paths):
    return [(entry.kind, entry.path.name) for entry in discover(paths).inputs]


def test_kineto_files_are_told_by_their_content(tmp_path):
    kernel_trace(tmp_path / "a.json")
    kernel_trace(tmp_path / "b.pt.trace.json.gz", 1)
    (tmp_path / "settings.json").write_text('{"lr": 1}')
    (tmp_path / "notes.txt").write_text("hello")
    assert kinds(tmp_path) == [("kineto", "a.json"), ("kineto", "b.pt.trace.json.gz")]


def test_rank_folders_are_taken_whole_wherever_they_lie(tmp_path):
    write_text(tmp_path / "run" / "node0_1_ascend_pt", Profile(rank=0))
    write_db(tmp_path / "run" / "node0_2_ascend_pt", Profile(rank=1))
    with pytest.raises(FormatError, match="different formats"):
        discover([tmp_path])
    assert kinds(tmp_path / "run" / "node0_1_ascend_pt") == [("ascend_text", "node0_1_ascend_pt")]
    inside = tmp_path / "run" / "node0_1_ascend_pt" / "ASCEND_PROFILER_OUTPUT"
    assert kinds(inside) == [("ascend_text", "node0_1_ascend_pt")]
    assert kinds(inside / "trace_view.json")[0][0] in {"kineto", "ascend_text"}


def test_a_log_beside_traces_is_left_alone_with_a_note(tmp_path):
    kernel_trace(tmp_path / "rank_0.json")
    (tmp_path / "train.json").write_text('{"time info": [1, 2]}')
    found = discover([tmp_path])
    assert [entry.kind for entry in found.inputs] == ["kineto"]
    assert "left alone" in found.notes[0]


def test_a_file_named_twice_is_read_once(tmp_path):
    path = kernel_trace(tmp_path / "rank_0.json")
    assert len(discover([path, tmp_path]).inputs) == 1


def test_a_path_that_does_not_exist(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        discover([tmp_path / "nowhere"])


def test_an_empty_folder(tmp_path):
    with pytest.raises(FormatError, match="is empty"):
        discover([tmp_path])


def test_a_folder_without_any_trace(tmp_path):
    (tmp_path / "readme.txt").write_text("hello")
    with pytest.raises(FormatError, match="holds no trace"):
        discover([tmp_path])


def test_a_file_that_is_no_trace(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"x" * 100)
    with pytest.raises(FormatError, match="holds no trace"):
        discover([path])


def test_an_unreadable_file(tmp_path, monkeypatch):
    path = kernel_trace(tmp_path / "rank_0.json")
    original = type(path).open

    def refuse(self, *args, **options):
        if self == path:
            raise PermissionError(13, "Permission denied", str(path))
        return original(self, *args, **options)

    monkeypatch.setattr(type(path), "open", refuse)
    with pytest.raises(FormatError, match="Permission denied"):
        discover([path])


def test_the_same_rank_twice(tmp_path):
    kernel_trace(tmp_path / "first.json")
    kernel_trace(tmp_path / "second.json")
    with pytest.raises(FormatError, match=r"rank 0 is there 2 times.*first\.json.*second\.json"):
        analyze([tmp_path])


def test_several_traces_of_which_one_has_no_rank(tmp_path):
    kernel_trace(tmp_path / "rank_0.json")
    write(tmp_path / "other.json", [step(1, 0, 9), *launched(1, 1, "kernel", "gemm", 2, 2)], {"schemaVersion": 1})
    with pytest.raises(FormatError, match=r"other\.json does not say its rank.*rank_<N>\.json"):
        analyze([tmp_path])


def test_one_trace_that_does_not_say_its_rank_is_analysed_alone(tmp_path):
    path = write(tmp_path / "t.json", [step(1, 0, 9), *launched(1, 1, "kernel", "gemm", 2, 2)], {"schemaVersion": 1})
    document = to_document(analyze([path]))
    assert document["ranks"] == []
    assert document["breakdown"][0]["rank"] is None
    assert document["breakdown"][0]["computing_us"] == 2.0
    assert document["slow_rank"]["verdict"] == "undecidable"


def test_traces_of_different_jobs(tmp_path):
    kernel_trace(tmp_path / "a.json", 0, 2)
    kernel_trace(tmp_path / "b.json", 1, 4)
    with pytest.raises(FormatError, match=r"different jobs: world sizes \[2, 4\]"):
        analyze([tmp_path])


def test_missing_ranks_are_named(tmp_path):
    kernel_trace(tmp_path / "a.json", 0, 4)
    kernel_trace(tmp_path / "c.json", 2, 4)
    notes = analyze([tmp_path]).notes
    assert any("2 of 4 ranks were traced; missing: 1, 3" in note for note in notes)


def test_ranks_traced_in_different_steps(tmp_path):
    kernel_trace(tmp_path / "a.json", 0, number=1)
    kernel_trace(tmp_path / "b.json", 1, number=2)
    assert any("different steps" in note for note in analyze([tmp_path]).notes)


def test_no_steps_and_no_communication_are_reported_not_fatal(tmp_path):
    write(tmp_path / "rank_0.json", launched(1, 1, "kernel", "gemm", 2, 2), envelope(0, 2))
    document = to_document(analyze([tmp_path]))
    assert document["steps"] == []
    assert document["breakdown"][0]["communication_us"] is None
    notes = " ".join(document["inputs"][0]["notes"])
    assert "no step marks" in notes
    assert "no communication kernels" in notes


def test_metadata_only(tmp_path):
    folder = tmp_path / "rank0_ascend_pt"
    folder.mkdir()
    (folder / "profiler_info_0.json").write_text(json.dumps({"rank_id": 0}))
    with pytest.raises(FormatError, match="metadata only"):
        analyze([tmp_path])


def test_a_trace_of_nothing_but_an_envelope(tmp_path):
    path = write(tmp_path / "rank_0.json", [], envelope(0, 2))
    document = to_document(analyze([path]))
    assert document["breakdown"] == []
    assert any("no breakdown" in note for note in document["inputs"][0]["notes"])


def test_skipped_events_are_counted_in_the_document(tmp_path):
    path = tmp_path / "rank_0.json"
    good = [step(1, 0, 20), *launched(1, 1, "kernel", "gemm", 2, 5)]
    write(path, good, envelope(0, 2))
    text = path.read_text().replace('"name": "gemm"', '"name": "ge"mm"', 1)
    path.write_text(text)
    document = to_document(analyze([path]))
    assert document["skipped_events"] == 1
    assert any("broken events were skipped" in note for note in document["inputs"][0]["notes"])


def test_device_id_is_not_the_rank(tmp_path):
    first = write_db(tmp_path / "a_ascend_pt", Profile(rank=0, waits_us={1: 5}))
    second = write_db(tmp_path / "b_ascend_pt", Profile(rank=1))
    assert [trace.rank for trace in analyze([first, second]).traces] == [0, 1]


def test_input_folders_are_never_written_to(tmp_path):
    job = gloo_job(tmp_path / "job", {0: 0, 1: 5})
    database = write_db(tmp_path / "db", Profile())
    before = {path: path.read_bytes() for path in [*job.rglob("*"), *database.rglob("*")] if path.is_file()}
    analyze([job], keep_spans=True)
    analyze([database])
    after = {path: path.read_bytes() for path in [*job.rglob("*"), *database.rglob("*")] if path.is_file()}
    assert before == after


def test_half_of_a_job_may_be_moved_away(tmp_path):
    job = gloo_job(tmp_path / "job", {0: 0, 1: 0, 2: 40, 3: 0})
    shutil.rmtree(tmp_path / "gone", ignore_errors=True)
    (job / "rank_3.json").unlink()
    found = analyze([job]).slow_rank
    assert (found.verdict, found.rank) == ("undecidable", None)


def test_operators_without_a_step_thread_still_count(tmp_path):
    path = write(tmp_path / "rank_0.json", [x("cpu_op", "aten::mm", 1, 5)], envelope(0, 1))
    assert to_document(analyze([path]))["breakdown"][0]["computing_us"] == 5.0
