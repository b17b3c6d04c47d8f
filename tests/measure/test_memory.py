"""Memory of the process and the published estimates."""

from dataclasses import replace

import pytest

from headrace.errors import ConfigError
from headrace.measure.flops import ModelShape
from headrace.measure.memory import GIB, HostMemory, HostMemoryReader, estimate_memory, host_memory, in_gib

GPT = ModelShape(layers=24, hidden=2048, heads=16, kv_heads=16, head_dim=128, ffn=8192, gated=False, vocab=51200)


def test_resident_memory_of_this_process_grows_with_what_it_touches():
    before = host_memory()
    block = bytearray(64 * 2**20)
    block[::4096] = b"x" * len(block[::4096])
    after = host_memory(proportional=True)
    assert after.rss_bytes - before.rss_bytes > 48 * 2**20
    assert after.peak_rss_bytes >= after.rss_bytes
    assert 0 < after.pss_bytes <= after.rss_bytes * 1.01
    assert before.pss_bytes is None, "walking all pages is not for a training loop"


def test_a_system_without_these_files_is_not_measured(tmp_path):
    assert host_memory(tmp_path) is None
    (tmp_path / "status").write_text("Name:\tVmRSS: 1\nVmRSS:\t   1024 kB\n")
    got = host_memory(tmp_path)
    assert (got.rss_bytes, got.pss_bytes) == (2**20, None)
    assert got.peak_rss_bytes > 0


def test_a_reader_sees_what_changed_and_after_closing_nothing(tmp_path):
    status = tmp_path / "status"
    status.write_text("Name:\tpython\nVmHWM:\t 3072 kB\nVmRSS:\t 1024 kB\n")
    reader = HostMemoryReader(tmp_path)
    assert reader.read() == HostMemory(rss_bytes=2**20, peak_rss_bytes=3 * 2**20, pss_bytes=None)
    status.write_text("Name:\tpython\nVmHWM:\t 3072 kB\nVmRSS:\t 2048 kB\n")
    assert reader.read().rss_bytes == 2 * 2**20
    reader.close()
    reader.close()
    assert reader.read() is None


def test_eighteen_bytes_per_parameter_or_the_sharded_optimizer():
    parameters = 24 * (4 * 2048**2 + 2 * 2048 * 8192) + 2048 * 51200
    options = {"sequence_length": 2048, "micro_batch_size": 1, "recompute": "selective", "tied_embeddings": True}
    plain = estimate_memory(GPT, **options)
    assert plain.parameters == parameters
    assert plain.weights_and_optimizer_bytes == 18 * parameters
    sharded = estimate_memory(GPT, **options, distributed_optimizer=True, data_parallel_size=4)
    assert sharded.weights_and_optimizer_bytes == 9 * parameters
    assert plain.total_bytes == plain.weights_and_optimizer_bytes + plain.activation_bytes


def test_activations_of_a_layer_by_the_published_formula():
    """s b h (18 + 4 ffn / h) = 34 s b h for ffn = 4h; full recompute keeps the input only."""
    one = estimate_memory(
        GPT, sequence_length=2048, micro_batch_size=2, recompute="selective", pipeline_parallel_size=2
    )
    assert one.activation_bytes == 34 * 2048 * 2 * 2048 * 24
    full = estimate_memory(GPT, sequence_length=2048, micro_batch_size=2, recompute="full", pipeline_parallel_size=2)
    assert full.activation_bytes == 2 * 2048 * 2 * 2048 * 24
    split = estimate_memory(
        GPT,
        sequence_length=2048,
        micro_batch_size=2,
        recompute="full",
        pipeline_parallel_size=2,
        tensor_parallel_size=4,
    )
    assert split.activation_bytes == full.activation_bytes / 4


def test_all_experts_are_stored_though_a_token_meets_few():
    moe = replace(GPT, moe_layers=24, experts=4, topk=2, moe_ffn=1024)
    options = {"sequence_length": 128, "micro_batch_size": 1, "recompute": "none"}
    few, many = estimate_memory(moe, **options), estimate_memory(replace(moe, experts=64), **options)
    assert many.parameters - few.parameters == 24 * 60 * 2 * 2048 * 1024
    with pytest.raises(ConfigError, match="experts="):
        estimate_memory(replace(moe, experts=0), **options)


def test_sizes_below_one_are_refused():
    with pytest.raises(ConfigError):
        estimate_memory(GPT, sequence_length=0, micro_batch_size=1, recompute="none")


def test_gib_are_powers_of_two():
    assert in_gib(3 * GIB) == "3.00 GiB"
    assert in_gib(None) == "not measured"
