"""The search: what it returns was run, what it runs is undone, and all ranks walk the same way."""

import threading
import weakref

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import ConfigError
from headrace.measure.batch_size import (
    BatchSizeError,
    BeyondMargin,
    ProbeFailed,
    batch_size_table,
    find_batch_size,
    is_out_of_memory,
)

from .fakes import FakeClock


@pytest.fixture(autouse=True)
def no_collection(monkeypatch):
    """The search collects garbage after every probe: 50 ms each beside an imported torch, for nothing here."""
    monkeypatch.setattr("headrace.measure.batch_size.gc.collect", lambda: 0)


class OutOfMemoryError(RuntimeError):
    """Named as torch names its own."""


class FakeDeviceProbe:
    """A device with `capacity` samples of memory; a leak of a failed probe would make the next one fail earlier."""

    def __init__(self, capacity, *, clock=None, error=None, overhead_s=0.010, per_sample_s=0.001):
        self.capacity, self.error = capacity, error or OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        self.clock = clock or FakeClock()
        self.overhead_s, self.per_sample_s = overhead_s, per_sample_s
        self.ran, self.used, self.restored = [], 0, 0

    def run(self, batch_size):
        assert self.used == 0, "the last probe was not cleaned up"
        self.ran.append(batch_size)
        self.used = batch_size
        if batch_size > self.capacity:
            raise self.error
        self.clock.advance(ms=2e3 * (self.overhead_s + self.per_sample_s * batch_size))
        return 2 * batch_size

    def restore(self):
        self.used = 0
        self.restored += 1


def search(probe, **options):
    return find_batch_size(probe, clock=probe.clock, **options)


@settings(max_examples=30)
@given(st.integers(16, 400), st.integers(16, 400), st.sampled_from(["binary", "sequential"]))
def test_it_returns_the_largest_multiple_that_fits_and_that_size_was_run(capacity, upper, kind):
    probe = FakeDeviceProbe(capacity)
    got = search(probe, upper=upper, search=kind)
    assert got.largest == min(capacity, upper) // 16 * 16
    assert got.largest in probe.ran
    assert probe.restored == len(probe.ran) == len(got.tried)
    assert len(set(probe.ran)) == len(probe.ran), "a size was run twice"
    assert max(probe.ran) <= upper
    assert got.reached_upper == (capacity >= upper // 16 * 16)
    if kind == "binary":
        assert len(probe.ran) <= 2 * (upper // 16).bit_length() + 1


@pytest.mark.parametrize("capacity", range(1, 16))
def test_below_one_multiple_it_says_so(capacity):
    got = search(FakeDeviceProbe(capacity), upper=256)
    assert got.largest == max(size for size in (8, 4, 2, 1) if size <= capacity)
    assert "below the multiple of 16" in got.note


def test_nothing_fits_is_a_named_error_with_the_smallest_size_tried_and_never_zero():
    """accelerate #1934 reached zero; Lightning #3103 crashed on an unbound name."""
    with pytest.raises(BatchSizeError, match="not even a batch of 1 fits") as caught:
        search(FakeDeviceProbe(0), upper=256)
    assert caught.value.smallest_tried == 1


def test_a_limit_below_every_size_and_wrong_choices_are_refused():
    with pytest.raises(ConfigError, match="upper"):
        search(FakeDeviceProbe(100), upper=0)
    with pytest.raises(ConfigError, match="multiple"):
        search(FakeDeviceProbe(100), upper=8, multiple=0)
    with pytest.raises(ConfigError, match="search"):
        search(FakeDeviceProbe(100), upper=64, search="random")


def test_a_limit_below_one_multiple_tries_the_small_sizes_up_to_it():
    probe = FakeDeviceProbe(1000)
    assert search(probe, upper=7).largest == 4
    assert max(probe.ran) <= 7


def test_every_probe_keeps_its_throughput_and_bigger_is_not_always_faster():
    class Thrashing(FakeDeviceProbe):
        def run(self, batch_size):
            samples = super().run(batch_size)
            if batch_size > 64:
                self.clock.advance(ms=1000)
            return samples

    got = search(Thrashing(128), upper=128)
    rates = {one.batch_size: one.samples_per_s for one in got.tried}
    assert rates[16] == pytest.approx(2 * 16 / (2 * (0.010 + 0.016)))
    assert (got.largest, got.fastest) == (128, 64)


def test_the_smallest_batch_that_is_nearly_as_fast_is_named():
    got = search(FakeDeviceProbe(4096, per_sample_s=0.01), upper=4096, tolerance=0.02)
    assert got.largest == 4096
    assert got.smallest_within == 64  # 0.010 s of overhead is 1.6 % of 64 samples


def test_a_probe_that_raises_something_else_ends_the_search_by_name():
    probe = FakeDeviceProbe(32, error=ValueError("shapes do not match"))
    with pytest.raises(ProbeFailed, match=r"batch size 64: ValueError: shapes do not match") as caught:
        search(probe, upper=256)
    assert caught.value.batch_size == 64
    assert probe.used == 0


def test_a_restore_that_fails_ends_the_search_by_name():
    probe = FakeDeviceProbe(32)
    probe.restore = lambda: (_ for _ in ()).throw(OSError("no snapshot"))
    with pytest.raises(ProbeFailed, match="restoring failed: OSError: no snapshot"):
        search(probe, upper=64)


def test_the_exception_of_a_failed_run_does_not_keep_its_memory():
    """Lightning #7335: the traceback's frames hold the tensors, so the next probe fails although it would fit."""

    class Tensor:
        """Something a weak reference can watch."""

    references = []

    class Leaky(FakeDeviceProbe):
        def run(self, batch_size):
            held = Tensor()
            references.append(weakref.ref(held))
            return super().run(batch_size)

        def restore(self):
            assert all(reference() is None for reference in references), "a failed run still holds memory"
            super().restore()

    assert search(Leaky(40), upper=128).largest == 32


def run_ranks(capacities, **options):
    """One thread per rank; `agree` is a minimum over all of them, as an all_reduce would be."""
    barrier = threading.Barrier(len(capacities), timeout=20)
    outcomes = [0] * len(capacities)
    results = [None] * len(capacities)

    def rank(index, probe):
        def agree(outcome):
            outcomes[index] = outcome
            barrier.wait()
            least = min(outcomes)
            barrier.wait()
            return least

        try:
            results[index] = find_batch_size(probe, agree=agree, clock=probe.clock, **options)
        except Exception as error:
            results[index] = error

    probes = [FakeDeviceProbe(capacity) if isinstance(capacity, int) else capacity for capacity in capacities]
    threads = [threading.Thread(target=rank, args=pair) for pair in enumerate(probes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return probes, results


def test_all_ranks_run_the_same_sizes_and_end_with_the_smallest_ranks_answer():
    probes, results = run_ranks([1000, 90, 500], upper=1024)
    assert [result.largest for result in results] == [80, 80, 80]
    assert probes[0].ran == probes[1].ran == probes[2].ran
    failed = [one for one in results[0].tried if not one.fits]
    assert all(one.reason == "out of memory on another rank" and one.samples_per_s is None for one in failed)


def test_a_probe_that_breaks_on_one_rank_ends_the_search_on_all():
    broken = FakeDeviceProbe(32, error=TypeError("no such argument"))
    _, results = run_ranks([1000, broken], upper=256)
    assert all(isinstance(result, ProbeFailed) for result in results)
    assert "another rank failed" in str(results[0])
    assert "TypeError" in str(results[1])


def test_a_rank_that_dies_in_the_search_is_a_named_error_on_the_others():
    def agree(outcome):
        raise RuntimeError("Connection closed by peer")

    with pytest.raises(ProbeFailed, match="a rank left the search"):
        find_batch_size(FakeDeviceProbe(100), upper=64, agree=agree)


def test_the_table_over_recompute_keeps_a_row_for_what_does_not_fit():
    capacities = {"none": 0, "selective": 40, "full": 200}
    table = batch_size_table(lambda recompute: FakeDeviceProbe(capacities[recompute]), upper=256)
    assert isinstance(table["none"], BatchSizeError)
    assert (table["selective"].largest, table["full"].largest) == (32, 192)


@pytest.mark.parametrize(
    "error",
    [
        OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"),
        RuntimeError("NPU out of memory. Tried to allocate 512.00 MiB (NPU 0; 60.97 GiB total capacity)"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you "
                     "tried to allocate 8589934592 bytes. Error code 12 (Cannot allocate memory)"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("HIP out of memory"),
        MemoryError(),
        BeyondMargin(reserved_bytes=95, capacity_bytes=100, share=0.92),
    ],
    ids=lambda error: str(error)[:24],
)  # fmt: skip
def test_running_out_of_memory_is_recognised_by_type_and_words(error):
    assert is_out_of_memory(error)


@pytest.mark.parametrize("error", [ValueError("out of memory"), RuntimeError("size mismatch"), KeyError("memory")])
def test_other_errors_are_not_taken_for_it(error):
    assert not is_out_of_memory(error)
