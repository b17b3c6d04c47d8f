"""Operation counts against golden vectors, a published run, and an operator count of real models."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import ConfigError
from headrace.measure.flops import LatentAttention, ModelShape, classical_flops, step_flops, utilisation, work_of
from headrace.measure.model_config import shape_from_megatron, shape_from_transformers

HERE = Path(__file__).parent
VECTORS = json.loads((HERE.parent / "vectors" / "flops.json").read_text())
PUBLISHED = VECTORS["published_phi35_moe"]
TRACES = HERE.parent.parent.parent / "shared" / "traces"


def shape_of(case):
    model = dict(case["model"])
    if pattern := model.pop("moe_pattern", None):
        model["moe_layers"] = sum(pattern)
    window = case.get("window")
    return ModelShape(**model, window=window, window_layers=model["layers"] if window else 0)


@pytest.mark.parametrize("case", VECTORS["cases"], ids=lambda case: case["name"])
def test_golden_counts(case):
    shape = shape_of(case)
    lengths = case.get("document_lengths") or [case["document_length"]]
    work = work_of(lengths, attention=case["attention"], window=shape.window, copies=case.get("document_count", 1))
    got = step_flops(shape, work, case["recompute"])
    assert work.tokens == case["tokens"]
    assert got.forward_linear == case["forward_linear"]
    assert got.forward_core == case["forward_core"]
    assert got.forward_logits == case["forward_logits"]
    assert got.model == case["model_flops"]
    assert got.hardware == case["hardware_flops"]


@pytest.mark.parametrize(("full_recompute", "expected"), [(False, 74423193305088), (True, 97512937488384)])
def test_the_published_closed_forms_are_the_same_numbers(full_recompute, expected):
    got = classical_flops(
        batch_size=4, sequence_length=2048, layers=24, hidden=2048, vocab=51200, full_recompute=full_recompute
    )
    assert got == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize("entry", PUBLISHED["entries"], ids=lambda entry: f"entry {entry['entry']}")
def test_a_published_run(entry):
    published = PUBLISHED
    shape = shape_of(published)
    work = work_of([published["sequence_length"]], attention="causal", copies=published["global_batch"])
    used = utilisation(
        step_flops(shape, work).model,
        step_seconds=entry["step_time_ms"] / 1e3,
        num_devices=published["devices"],
        peak_flops_per_device=None,
    )
    got = used.flops_per_s_per_device / 1e12
    assert got == pytest.approx(entry["computed_tflops_per_device"], rel=1e-12)
    difference = got / entry["published_tflops_per_device"] - 1.0
    assert (abs(difference) <= published["tolerance"]) == entry["within_2_percent"]


def test_a_published_training_log():
    log = TRACES / "training_log_A" / "baseline.json"
    if not log.exists():
        pytest.skip("the published training log is not beside this checkout")
    run = json.loads(log.read_text())
    shape = shape_of(PUBLISHED)
    flops = step_flops(shape, work_of([4096], attention="causal", copies=64)).model
    for milliseconds, published in list(zip(run["time info"], run["throughput"], strict=True))[1:]:
        assert flops / (milliseconds / 1e3) / 8 / 1e12 == pytest.approx(published, rel=0.035)


def test_what_wrong_formulas_would_say_about_that_run():
    """Ignoring the second expert or counting the upper triangle is far outside of 2 %."""
    shape = shape_of(PUBLISHED)
    right = step_flops(shape, work_of([4096], attention="causal", copies=64)).model
    full = step_flops(shape, work_of([4096], attention="full", copies=64)).model
    assert full / right == pytest.approx(70.5 / 65.8, rel=0.005)


LLAMA = ModelShape(
    layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, ffn=14336, gated=True, vocab=128256
)  # fmt: skip


def test_packed_documents_are_not_one_long_document():
    """16 x 512 tokens cost 0.883 of one causal 8192; NeMo-RL #2790 counted the square of the row."""
    packed = step_flops(LLAMA, work_of([512] * 16, attention="causal")).model
    whole = step_flops(LLAMA, work_of([8192], attention="causal")).model
    assert packed / whole == pytest.approx(0.8827, abs=5e-4)


@given(st.lists(st.integers(0, 5000), max_size=20), st.sampled_from(["causal", "full"]))
def test_work_adds_up_over_micro_batches(lengths, attention):
    parts = sum((work_of([length], attention=attention) for length in lengths), start=work_of([], attention=attention))
    assert parts == work_of(lengths, attention=attention)
    assert step_flops(LLAMA, parts).model == sum(
        step_flops(LLAMA, work_of([length], attention=attention)).model for length in lengths
    )


@given(st.integers(1, 4000), st.integers(1, 4000))
def test_a_window_never_costs_more_than_no_window_and_a_wide_one_the_same(length, window):
    windowed = work_of([length], attention="causal", window=window)
    assert windowed.windowed_half_pairs <= windowed.half_pairs
    assert (windowed.windowed_half_pairs == windowed.half_pairs) == (window >= length)


def test_a_sliding_window_at_length_32768_is_several_times_cheaper():
    """torchtitan #4300: 37.6 against 192.9 GFLOP per token was the difference between counting windows and not."""
    work = work_of([32768], attention="causal", window=4096)
    assert work.windowed_half_pairs == 2 * (4096 * 32768 - 4096 * 4096 // 2)


def test_recompute_orders():
    work = work_of([4096], attention="causal")
    none, selective, full = (step_flops(LLAMA, work, kind).hardware for kind in ("none", "selective", "full"))
    assert none < selective < full < 4 / 3 * none
    assert step_flops(LLAMA, work, "full").model == none


@pytest.mark.parametrize(
    "call",
    [
        lambda: work_of([5], attention="sparse"),
        lambda: work_of([-1], attention="causal"),
        lambda: work_of([5], attention="full", window=3),
        lambda: step_flops(LLAMA, work_of([5], attention="causal"), "some"),
        lambda: ModelShape(layers=0, hidden=1, heads=1, kv_heads=1, head_dim=1, ffn=1, gated=False, vocab=1),
        lambda: ModelShape(
            layers=2, hidden=1, heads=1, kv_heads=1, head_dim=1, ffn=1, gated=False, vocab=1, moe_layers=1
        ),
        lambda: ModelShape(layers=2, hidden=1, heads=1, kv_heads=1, head_dim=1, ffn=1, gated=False, vocab=1, window=5),
    ],
)
def test_what_cannot_be_counted_is_refused(call):
    with pytest.raises(ConfigError):
        call()


@pytest.mark.parametrize("case", VECTORS["utilisation"], ids=lambda case: case["name"])
def test_golden_utilisation(case):
    got = utilisation(
        case["flops"],
        step_seconds=case["step_seconds"],
        num_devices=case["devices"],
        peak_flops_per_device=case["peak_flops_per_device"],
    )
    expected = case["utilisation"]
    assert got.value == (None if expected is None else pytest.approx(expected, rel=1e-12))
    assert got.impossible == case["impossible"]
    assert (got.reason is None) == (got.impossible is False)


def test_no_time_is_no_utilisation():
    got = utilisation(1e15, step_seconds=0.0, num_devices=8, peak_flops_per_device=1e15)
    assert got.value is None
    assert got.reason


MEGATRON = {
    "num_layers": 8, "hidden_size": 4096, "num_attention_heads": 32, "group_query_attention": True,
    "num_query_groups": 8, "kv_channels": 128, "ffn_hidden_size": 6400, "swiglu": True, "padded_vocab_size": 32064,
    "num_experts": 16, "moe_router_topk": 2, "moe_layer_freq": 1, "tensor_model_parallel_size": 1,
}  # fmt: skip


def test_megatron_arguments_of_the_published_run():
    assert shape_from_megatron(SimpleNamespace(**MEGATRON)) == shape_of(PUBLISHED)


def test_model_parallel_sizes_do_not_change_the_model():
    """torchtitan #1989 counted one rank's parameters: the utilisation then fell with the tensor-parallel size."""
    split = SimpleNamespace(**MEGATRON | {"tensor_model_parallel_size": 8})
    assert shape_from_megatron(split) == shape_from_megatron(SimpleNamespace(**MEGATRON))


def test_megatron_patterns_of_expert_layers():
    shape = shape_from_megatron(SimpleNamespace(**MEGATRON | {"moe_layer_freq": [0, 1, 1, 1, 1, 1, 1, 1]}))
    assert shape.moe_layers == 7
    assert shape_from_megatron(SimpleNamespace(**MEGATRON | {"moe_layer_freq": 2})).moe_layers == 4
    with pytest.raises(ConfigError, match="3 entries for 8 layers"):
        shape_from_megatron(SimpleNamespace(**MEGATRON | {"moe_layer_freq": [0, 1, 1]}))


@pytest.mark.parametrize(
    "extra", [{"hybrid_layer_pattern": "M-M*"}, {"is_hybrid_model": True}, {"experimental_attention_variant": "dsa"}]
)
def test_models_with_parts_that_are_not_counted_are_refused(extra):
    with pytest.raises(ConfigError, match="not counted"):
        shape_from_megatron(SimpleNamespace(**MEGATRON | extra))


def test_multi_token_prediction_by_hand():
    """One more layer of the last kind, a 2h x h projection and logits per depth, as Megatron-LM counts them."""
    shape = shape_from_megatron(SimpleNamespace(**MEGATRON | {"mtp_num_layers": 1}))
    work = work_of([128], attention="causal")
    plain = step_flops(shape_from_megatron(SimpleNamespace(**MEGATRON | {"num_layers": 9})), work)
    extra = 3 * (2 * 128 * 2 * 4096**2 + 2 * 128 * 4096 * 32064)
    assert step_flops(shape, work).model == plain.model + extra


def test_latent_attention_by_hand():
    latent = LatentAttention(q_lora_rank=16, kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=2, v_head_dim=5)
    shape = ModelShape(
        layers=1, hidden=32, heads=3, kv_heads=3, head_dim=6, ffn=64, gated=True, vocab=100, latent=latent
    )  # fmt: skip
    got = step_flops(shape, work_of([10], attention="full"))
    query = 32 * 16 + 16 * 3 * (4 + 2)
    key_value = 32 * (8 + 2) + 8 * 3 * (4 + 5)
    assert got.forward_linear == 2 * 10 * (query + key_value + 3 * 5 * 32 + 3 * 32 * 64)
    assert got.forward_core == 2 * 100 * 3 * (6 + 5)


TINY = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
GROUPED = TINY | {"num_key_value_heads": 2}
# The third entry is what the model multiplies beside the convention, in weights per token: routers over 4 experts in
# the layers that have them, and the gate of Qwen's shared expert.
FAMILIES = {
    "llama": ("LlamaConfig", GROUPED, 0),
    "qwen3, wide heads": ("Qwen3Config", GROUPED | {"head_dim": 16}, 0),
    "gpt2": ("GPT2Config", {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4}, 0),
    "gpt_neox": ("GPTNeoXConfig", TINY, 0),
    "mixtral": ("MixtralConfig", GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2}, 2 * 4 * 32),
    "qwen2_moe, shared and sparse": (
        "Qwen2MoeConfig",
        GROUPED | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
                   "shared_expert_intermediate_size": 40, "decoder_sparse_step": 2},
        4 * 32 + 32,
    ),
    "deepseek_v3, latent": (
        "DeepseekV3Config",
        TINY | {"num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 8, "qk_nope_head_dim": 8,
                "qk_rope_head_dim": 4, "v_head_dim": 6, "n_routed_experts": 4, "num_experts_per_tok": 2,
                "moe_intermediate_size": 24, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1,
                "topk_group": 1},
        4 * 32,
    ),
    "gemma3, windows": (
        "Gemma3TextConfig",
        GROUPED | {"head_dim": 8, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
        0,
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def transformers():
    return pytest.importorskip("transformers")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_count_agrees_with_an_operator_count_of_the_real_model(family, transformers):
    """torch's FlopCounterMode sees the matrix products that run. Eager attention computes the full square and masks it
    afterwards, also where there is a window."""
    torch = pytest.importorskip("torch")
    from torch.utils.flop_counter import FlopCounterMode

    name, options, beside_the_convention = FAMILIES[family]
    config = getattr(transformers, name)(**options, attn_implementation="eager", use_cache=False)
    model = transformers.AutoModelForCausalLM.from_config(config, experts_implementation="eager")
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.arange(2 * 24).reshape(2, 24) % 97)
    shape = shape_from_transformers(config)
    assert (shape.window, shape.window_layers) == ((8, 1) if "windows" in family else (None, 0))
    unmasked = step_flops(replace(shape, window=None, window_layers=0), work_of([24, 24], attention="full"))
    mine = unmasked.forward_linear + unmasked.forward_core + unmasked.forward_logits
    assert counter.get_total_flops() == mine + 2 * 48 * beside_the_convention


def test_a_configuration_with_layers_that_are_not_attention_is_refused(transformers):
    with pytest.raises(ConfigError, match="not counted"):
        shape_from_transformers(transformers.MambaConfig())
    with pytest.raises(ConfigError, match="not counted"):
        shape_from_transformers(transformers.Qwen3NextConfig())


def test_an_unknown_family_needs_to_be_told_about_its_mlp():
    config = SimpleNamespace(model_type="brandnew", **TINY)
    with pytest.raises(ConfigError, match="pass gated="):
        shape_from_transformers(config)
    assert shape_from_transformers(config, gated=True).gated
    with pytest.raises(ConfigError, match="vocab_size"):
        shape_from_transformers(SimpleNamespace(**{**TINY, "vocab_size": None}), gated=True)


def test_the_text_part_of_a_composite_configuration_counts():
    config = SimpleNamespace(text_config=SimpleNamespace(model_type="llama", **TINY))
    assert shape_from_transformers(config).layers == 2
