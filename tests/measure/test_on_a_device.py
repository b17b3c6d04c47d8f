"""On a real accelerator: device times that sum, a loop that is never synchronised, and memory that runs out."""

import pytest

torch = pytest.importorskip("torch")

from headrace.measure.batch_size import find_batch_size  # noqa: E402
from headrace.torch import measure  # noqa: E402

pytestmark = pytest.mark.device


@pytest.fixture(scope="module")
def device():
    for kind in ("cuda", "npu"):
        module = getattr(torch, kind, None)
        if module is not None and module.is_available():
            return kind
    pytest.skip("no CUDA or NPU device here")


def model_on(device):
    model = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048) for _ in range(8))).to(device)
    return model, torch.optim.AdamW(model.parameters())


def test_device_times_sum_to_the_step_without_one_synchronisation(device):
    model, optimizer = model_on(device)
    run = measure.start(model, optimizer, print_line=None, warmup_steps=2)
    batch = torch.randn(4096, 2048, device=device)
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in run.batches(range(22)):
            run.count(samples=len(batch))
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    run.close()
    summary = run.summary()
    assert summary.num_steps == 20
    assert summary.notes == ()
    for name in ("forward", "backward", "optimizer", "scheduling"):
        assert summary.phases[name].mean_s is not None, summary.phases[name].reason
    known = sum(phase.mean_s for phase in summary.phases.values() if phase.mean_s is not None)
    assert known == pytest.approx(summary.mean_step_s, rel=1e-6)
    # Two matrix products per layer forward, four backward: the device's time shows it, the host's would not.
    assert 1.3 < summary.phases["backward"].mean_s / summary.phases["forward"].mean_s < 3.0


def test_device_time_is_not_the_time_the_host_took_to_ask(device):
    run = measure.start(print_line=None, warmup_steps=0, device=device)
    one = torch.randn(8192, 8192, device=device)
    for _ in range(6):
        with run.step.forward:
            for _ in range(10):
                one @ one
        run.end()
    run.close()
    seen = run.summary().phases["forward"].mean_s
    # 10 products of 8192^3: 11 TFLOP; no device here does that in 5 ms, and the host asks for it in 0.2 ms.
    assert seen > 0.005


def test_peaks_of_memory_are_read_and_reset(device):
    backend = measure.backend_of(device)
    backend.read_memory()
    block = torch.empty(256 * 2**20, dtype=torch.uint8, device=device)
    with_block = backend.read_memory()
    del block
    after = backend.read_memory()
    later = backend.read_memory()
    assert with_block.peak_allocated_bytes - later.peak_allocated_bytes >= 256 * 2**20
    assert after.capacity_bytes > with_block.peak_reserved_bytes


def test_the_batch_that_fits_is_found_by_running_out_of_memory(device):
    """A few samples take a tenth of the device each, so about nine fit."""
    capacity = measure.backend_of(device).read_memory().capacity_bytes
    tenth = capacity // 10

    def build():
        return lambda batch_size: torch.empty(batch_size * tenth, dtype=torch.uint8, device=device).fill_(1)

    found = find_batch_size(measure.FactoryProbe(build, device=device), multiple=1, upper=64)
    assert 5 <= found.largest <= 9
    assert any(not one.fits for one in found.tried)
