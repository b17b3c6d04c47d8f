"""What `--json FILE` leaves behind: the whole document or nothing, and one sentence for a place that takes none."""

from __future__ import annotations

import json
import os
import resource
import signal
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from headrace.cli.document import check_writable, write_document
from headrace.errors import ConfigError, HeadraceError

DOCUMENT = {"version": 1, "values": list(range(1000))}


@contextmanager
def full_disk(num_bytes: int) -> Iterator[None]:
    """Files of this process end after `num_bytes`: as on a full disk, some bytes are written before the error."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_name_as_long_as_the_folder_allows_is_written_and_a_longer_one_refused(tmp_path: Path) -> None:
    limit = os.pathconf(tmp_path, "PC_NAME_MAX")
    longest = tmp_path / ("a" * limit)
    check_writable(longest)
    write_document(longest, DOCUMENT)
    assert json.loads(longest.read_text())["values"] == DOCUMENT["values"]
    with pytest.raises(ConfigError, match=f"at most {limit} bytes here, this one has {limit + 45}; shorten it"):
        check_writable(tmp_path / ("a" * (limit + 45)))
    with pytest.raises(ConfigError, match="File name too long"):
        check_writable(tmp_path / ("a" * (limit + 1)) / "out.json")


def test_a_full_disk_leaves_no_file(tmp_path: Path) -> None:
    with full_disk(100), pytest.raises(HeadraceError, match=r"out\.json cannot be written: .* has [\d,]+ bytes"):
        write_document(tmp_path / "out.json", DOCUMENT)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_the_document_of_the_run_before(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    write_document(path, DOCUMENT)
    before = path.read_bytes()
    with full_disk(100), pytest.raises(HeadraceError):
        write_document(path, DOCUMENT)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_keeps_its_mode_and_a_new_one_gets_the_usual(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    mask = os.umask(0o027)
    try:
        write_document(path, DOCUMENT)
    finally:
        os.umask(mask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    path.chmod(0o604)
    write_document(path, DOCUMENT)
    assert stat.S_IMODE(path.stat().st_mode) == 0o604


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    target, link = tmp_path / "target.json", tmp_path / "link.json"
    link.symlink_to(target)
    write_document(link, DOCUMENT)
    assert link.is_symlink()
    assert json.loads(target.read_text())["version"] == 1


def test_a_pipe_gets_the_document(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_document(pipe, {"version": 1})
        assert json.loads(os.read(reader, 4096))["version"] == 1
    finally:
        os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)
