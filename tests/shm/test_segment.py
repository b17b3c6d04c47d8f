"""Segments under every limit that can be too small: a named error, never a signal, and no descriptor left."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from headrace._native import Mapping
from headrace.errors import ConfigError
from headrace.shm import segment
from headrace.spec import ARENA_ALIGNMENT

MIB = 1 << 20


def test_a_segment_is_aligned_sealed_and_reserved() -> None:
    fd = segment.create("headrace-test", 100_000, knob="k")
    status = os.fstat(fd)
    assert status.st_size == 131_072
    assert status.st_blocks * 512 == 131_072, "every page is there before anybody touches it"
    seals = fcntl.fcntl(fd, 1034)
    assert seals & 0b111 == 0b111, "nobody can cut it short and cause SIGBUS, or lift the seal"
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 0)
    assert not os.get_inheritable(fd)
    mapping = segment.attach(fd, writable=True, knob="k", populate=True)
    assert mapping.address % ARENA_ALIGNMENT == 0
    assert mapping.nbytes == 131_072
    os.close(fd)
    segment.memory(mapping)[:] = 3


def test_a_mapping_outlives_its_views_and_not_longer() -> None:
    fd = segment.create("headrace-test", 65_536, knob="k")
    mapping = segment.attach(fd, writable=True, knob="k")
    os.close(fd)
    view = segment.memory(mapping)[10:20].view(np.int16)
    with pytest.raises(BufferError, match="1 views"):
        mapping.close()
    del mapping
    gc.collect()
    view[:] = 7
    assert view.sum() == 35
    (holder,) = [line for line in Path("/proc/self/maps").read_text().splitlines() if "headrace-test" in line]
    del view
    gc.collect()
    assert holder not in Path("/proc/self/maps").read_text()


def test_a_closed_mapping_gives_no_views() -> None:
    fd = segment.create("headrace-test", 65_536, knob="k")
    mapping = segment.attach(fd, writable=True, knob="k")
    os.close(fd)
    mapping.close()
    mapping.close()
    assert mapping.address == 0
    with pytest.raises(ValueError, match="closed"):
        memoryview(mapping)


def test_a_reader_that_maps_read_only_cannot_write() -> None:
    fd = segment.create("headrace-test", 65_536, knob="k")
    view = segment.memory(segment.attach(fd, writable=False, knob="k"))
    os.close(fd)
    assert not view.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 1


def test_a_large_segment_lies_where_huge_pages_can_be_had() -> None:
    size = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
    if not size.exists() or int(size.read_text()) > 16 * MIB:
        pytest.skip("this kernel has no huge pages of a size that fits")
    fd = segment.create("headrace-test", 16 * MIB, knob="k")
    mapping = segment.attach(fd, writable=True, knob="k", populate=True)
    os.close(fd)
    assert mapping.address % int(size.read_text()) == 0
    code = mapping.advise(segment.MADV_COLLAPSE)
    if code == errno.EINVAL and tuple(map(int, os.uname().release.split(".")[:2])) < (6, 1):
        pytest.skip("MADV_COLLAPSE came with Linux 6.1")
    assert code in (0, errno.EAGAIN, errno.ENOMEM, errno.EBUSY), f"never EINVAL where it is known: {os.strerror(code)}"


@pytest.mark.parametrize(("nbytes", "alignment"), [(100, 65_536), (0, 65_536), (65_536, 1024), (65_536, 12_288)])
def test_a_mapping_refuses_what_it_cannot_align(nbytes: int, alignment: int) -> None:
    with pytest.raises(ValueError, match="power of two"):
        Mapping(0, nbytes, alignment, True)


def test_a_mapping_of_nothing_says_what_the_kernel_says() -> None:
    with pytest.raises(OSError):  # noqa: PT011 -- whatever the kernel says of a descriptor that is not there
        Mapping(999, 65_536, 65_536, True)


def under(limit: str, value: int, *, then: str = "") -> str:
    """In a fresh process whose soft `limit` is `value`: what does making and mapping a 64 MiB segment say?"""
    code = f"""
        import os, resource
        from headrace.errors import ConfigError
        from headrace.shm import segment
        before = len(os.listdir("/proc/self/fd"))
        value = {value}
        if {limit!r} == "RLIMIT_AS":
            with open("/proc/self/statm") as statm:
                value += int(statm.read().split()[0]) * resource.getpagesize()
        if {limit!r} == "RLIMIT_NOFILE":
            value += before - 1
        hard = resource.getrlimit(resource.{limit})[1]
        resource.setrlimit(resource.{limit}, (value, hard))
        try:
            fd = segment.create("headrace-test", 64 << 20, knob="num_slots")
            try:
                segment.attach(fd, writable=True, knob="num_slots", populate=True)
            finally:
                os.close(fd)
            print("fine")
        except ConfigError as error:
            print(error)
        resource.setrlimit(resource.{limit}, (hard, hard))
        assert len(os.listdir("/proc/self/fd")) == before
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.strip()


@pytest.mark.parametrize(("limit", "value"), [
    ("RLIMIT_AS", 16 * MIB),
    ("RLIMIT_FSIZE", 16 * MIB),
    ("RLIMIT_NOFILE", 0),
])  # fmt: skip
def test_a_resource_limit_that_is_too_small_is_named(limit: str, value: int) -> None:
    text = under(limit, value)
    assert limit in text, "have"
    assert "67,108,864 bytes" in text, "need"
    assert "num_slots" in text, "knob"


def test_a_full_dev_shm_does_not_matter() -> None:
    """memfd has no mount and so no size: a private mount of /dev/shm of 8 KiB, full to the last byte."""
    script = """
        mount -t tmpfs -o size=8k headrace-full /dev/shm || exit 77
        dd if=/dev/zero of=/dev/shm/full bs=4k count=2 status=none
        exec "$1" -c '
        import os
        from headrace.shm import segment
        assert os.statvfs("/dev/shm").f_bavail == 0
        os.close(segment.create("headrace-test", 64 << 20, knob="num_slots"))
        print("fine")
        '
    """
    command = ["unshare", "--mount", "--map-root-user", "sh", "-c", textwrap.dedent(script), "sh", sys.executable]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode in (1, 77) and "fine" not in done.stdout and "Error" not in done.stderr:
        pytest.skip(f"no private mounts here: {done.stderr.strip()}")
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "fine", "")


def test_a_signal_storm_does_not_keep_a_segment_from_being_reserved() -> None:
    """The kernel undoes a reservation that a signal interrupts; a profiler sends one every millisecond or so."""
    code = """
        import os, signal
        from headrace.shm import segment
        signal.signal(signal.SIGALRM, lambda *_: None)
        signal.setitimer(signal.ITIMER_REAL, 0.005, 0.005)
        os.close(segment.create("headrace-test", 256 << 20, knob="num_slots"))
        signal.setitimer(signal.ITIMER_REAL, 0)
        print("fine")
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (done.stdout.strip(), done.stderr) == ("fine", "")


def memory_cgroup() -> Path:
    """A place where a child memory cgroup can be made, or a skip."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        candidates = {
            "memory": Path("/sys/fs/cgroup/memory") / path.lstrip("/"),
            "": Path("/sys/fs/cgroup") / path.lstrip("/"),
        }
        for parent in (candidates[key] for key in candidates if key in controllers.split(",")):
            names = ("memory.limit_in_bytes", "memory.max")
            if any((parent / name).exists() for name in names) and os.access(parent, os.W_OK):
                return parent
    pytest.skip("no writable memory cgroup here")


def test_a_real_memory_cgroup_refuses_before_it_kills() -> None:
    group = memory_cgroup() / f"headrace-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made here: {error}")
    try:
        limit = next(
            (group / name for name in ("memory.limit_in_bytes", "memory.max") if (group / name).exists()), None
        )
        if limit is None:
            pytest.skip("the memory controller is not given to child groups here")
        limit.write_text(str(96 * MIB))
        code = """
            import os, sys
            open(sys.argv[1] + "/cgroup.procs", "w").write(str(os.getpid()))
            from headrace.errors import ConfigError
            from headrace.shm import segment
            os.close(segment.create("headrace-test", 8 << 20, knob="num_slots"))
            try:
                segment.create("headrace-test", 128 << 20, knob="num_slots")
            except ConfigError as error:
                print(error)
        """
        command = [sys.executable, "-c", textwrap.dedent(code), str(group)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"killed or failed: {done.returncode} {done.stderr}"
        assert group.name in done.stdout, "the group is named"
        assert "needs 134,217,728 bytes" in done.stdout
        assert "lower num_slots" in done.stdout
    finally:
        group.rmdir()


def test_more_than_the_machine_has_is_refused() -> None:
    with pytest.raises(ConfigError, match="allows"):
        segment.create("headrace-test", 1 << 50, knob="num_slots")
