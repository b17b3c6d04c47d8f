"""A model's shape from what frameworks call it: a transformers configuration, or Megatron's arguments.

Read by attribute, so neither framework is imported. What has parts the count does not know (state-space layers, linear
attention) is refused: an operation count that leaves out half of a model looks like a slow machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.errors import ConfigError
from headrace.measure.flops import LatentAttention, ModelShape

GATED_FAMILIES = (
    "llama", "mistral", "mixtral", "ministral", "qwen2", "qwen3", "gemma", "phi3", "phimoe", "deepseek", "olmo",
    "granite", "cohere", "glm", "smollm3", "seed_oss", "ernie4", "internlm", "gpt_oss",
)  # fmt: skip
"""Beginnings of model_type whose MLP has three matrices; transformers does not write it into the configuration."""
PLAIN_FAMILIES = ("gpt2", "gpt_neox", "gpt_neo", "gptj", "opt", "bloom", "falcon", "phi", "starcoder2", "codegen")
"""model_type whose MLP has two."""
STATE_SPACE = ("mamba_d_state", "mamba_n_heads", "ssm_state_size", "state_size", "linear_num_value_heads")
"""Attributes of configurations with layers that are not attention and MLP."""
FULL_ATTENTION_LAYERS = ("full_attention", "attention")
WINDOW_LAYERS = ("sliding_attention", "sliding_window_attention")


def shape_from_transformers(config: Any, *, gated: bool | None = None) -> ModelShape:
    """The shape of a transformers causal language model from its configuration (a composite one: from its text part).

    `gated` says whether an MLP has three matrices, for model types not listed here. Raises ConfigError naming what is
    missing or not countable.
    """
    config = getattr(config, "text_config", None) or config
    if any(hasattr(config, name) for name in STATE_SPACE):
        raise ConfigError("state-space and linear-attention layers are not counted: give the operations yourself")
    layers = need(config, "num_hidden_layers", "n_layer", "num_layers")
    hidden = need(config, "hidden_size", "n_embd")
    heads = need(config, "num_attention_heads", "n_head")
    if gated is None:
        gated = is_gated(str(getattr(config, "model_type", "")))
    window, window_layers = sliding_window(config, layers)
    moe_layers, experts, topk, moe_ffn, shared_ffn = experts_of(config, layers)
    latent = latent_attention(config)
    return ModelShape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=first(config, "num_key_value_heads", "num_kv_heads") or heads,
        head_dim=first(config, "head_dim") or hidden // heads,
        ffn=first(config, "intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size") or 4 * hidden,
        gated=gated,
        vocab=need(config, "vocab_size"),
        moe_layers=moe_layers,
        experts=experts,
        topk=topk,
        moe_ffn=moe_ffn,
        shared_ffn=shared_ffn,
        window=window,
        window_layers=window_layers,
        latent=latent,
    )


def shape_from_megatron(args: Any) -> ModelShape:
    """The shape from Megatron-LM's or MindSpeed-LLM's parsed arguments (their attribute names).

    Raises ConfigError for hybrid models and attention variants that are not counted here.
    """
    if first(args, "hybrid_layer_pattern", "hybrid_override_pattern") or getattr(args, "is_hybrid_model", False):
        raise ConfigError("hybrid models with state-space layers are not counted: give the operations yourself")
    if variant := getattr(args, "experimental_attention_variant", None):
        raise ConfigError(f"attention variant {variant!r} is not counted: give the operations yourself")
    layers, hidden, heads = args.num_layers, args.hidden_size, args.num_attention_heads
    pattern = megatron_pattern(args, layers)
    depths = getattr(args, "mtp_num_layers", None) or 0
    latent = None
    if getattr(args, "multi_latent_attention", False):
        latent = LatentAttention(
            q_lora_rank=args.q_lora_rank,
            kv_lora_rank=args.kv_lora_rank,
            qk_nope_head_dim=args.qk_head_dim,
            qk_rope_head_dim=args.qk_pos_emb_head_dim,
            v_head_dim=args.v_head_dim,
        )
    window = getattr(args, "window_size", None)
    return ModelShape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=args.num_query_groups if getattr(args, "group_query_attention", False) else heads,
        head_dim=getattr(args, "kv_channels", None) or hidden // heads,
        ffn=args.ffn_hidden_size or 4 * hidden,
        gated=bool(getattr(args, "swiglu", False)),
        vocab=first(args, "padded_vocab_size", "vocab_size") or missing("padded_vocab_size"),
        moe_layers=sum(pattern),
        experts=args.num_experts if any(pattern) else 0,
        topk=args.moe_router_topk if any(pattern) else 0,
        moe_ffn=(getattr(args, "moe_ffn_hidden_size", None) or args.ffn_hidden_size) if any(pattern) else 0,
        shared_ffn=getattr(args, "moe_shared_expert_intermediate_size", None) or 0,
        window=window[0] + 1 if window else None,
        window_layers=layers if window else 0,
        latent=latent,
        mtp_depths=depths,
        mtp_moe=bool(depths and pattern[-1]),
    )


def megatron_pattern(args: Any, layers: int) -> list[int]:
    """1 for each layer with experts: `--moe-layer-freq` is a period or the list itself."""
    if getattr(args, "num_experts", None) is None:
        return [0] * layers
    frequency = getattr(args, "moe_layer_freq", 1)
    if isinstance(frequency, int):
        return [int(layer % frequency == 0) for layer in range(layers)]
    if len(frequency) != layers:
        raise ConfigError(f"moe_layer_freq has {len(frequency)} entries for {layers} layers")
    return list(frequency)


def is_gated(model_type: str) -> bool:
    """Whether an MLP of this family has three matrices. Raises ConfigError for a family not listed."""
    if model_type.startswith(GATED_FAMILIES):
        return True
    if model_type in PLAIN_FAMILIES:
        return False
    raise ConfigError(
        f"whether an MLP of model_type {model_type!r} has two or three matrices is not known here: pass gated="
    )


def sliding_window(config: Any, layers: int) -> tuple[int | None, int]:
    """(window, layers that have it). transformers lists each layer's kind, or gives one window for all."""
    window = getattr(config, "sliding_window", None)
    kinds: Sequence[str] | None = getattr(config, "layer_types", None)
    if kinds is not None:
        unknown = sorted(set(kinds) - {*FULL_ATTENTION_LAYERS, *WINDOW_LAYERS})
        if unknown:
            raise ConfigError(f"layers of kind {', '.join(unknown)} are not counted: give the operations yourself")
        windowed = sum(kind in WINDOW_LAYERS for kind in kinds)
        return (window, windowed) if window and windowed else (None, 0)
    if not window or getattr(config, "use_sliding_window", True) is False:
        return None, 0
    return window, layers


def experts_of(config: Any, layers: int) -> tuple[int, int, int, int, int]:
    """(layers with experts, experts of a layer, those a token meets, width of one, width of the shared ones)."""
    experts = first(config, "num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts") or 0
    if experts <= 1:
        return 0, 0, 0, 0, 0
    topk = need(config, "num_experts_per_tok", "moe_topk", "moe_k")
    width = first(config, "moe_intermediate_size", "intermediate_size") or missing("moe_intermediate_size")
    shared = first(config, "shared_expert_intermediate_size") or 0
    shared += width * (first(config, "n_shared_experts", "moe_num_shared_experts") or 0)
    dense_first = first(config, "first_k_dense_replace") or 0
    period = first(config, "decoder_sparse_step", "moe_layer_freq") or 1
    dense_only = set(getattr(config, "mlp_only_layers", None) or ())
    # Qwen's decoder_sparse_step counts from one, DeepSeek's moe_layer_freq from zero.
    offset = 1 if hasattr(config, "decoder_sparse_step") else 0
    sparse = sum(
        layer >= dense_first and layer not in dense_only and (layer + offset) % period == 0 for layer in range(layers)
    )
    return sparse, experts, topk, width, shared


def latent_attention(config: Any) -> LatentAttention | None:
    """DeepSeek's attention, recognised by its latent rank."""
    if not getattr(config, "kv_lora_rank", None):
        return None
    return LatentAttention(
        q_lora_rank=getattr(config, "q_lora_rank", None),
        kv_lora_rank=config.kv_lora_rank,
        qk_nope_head_dim=need(config, "qk_nope_head_dim"),
        qk_rope_head_dim=need(config, "qk_rope_head_dim"),
        v_head_dim=need(config, "v_head_dim"),
    )


def first(config: Any, *names: str) -> Any:
    """The first of the attributes that is there and not None."""
    return next((value for name in names if (value := getattr(config, name, None)) is not None), None)


def need(config: Any, *names: str) -> int:
    """The first of the attributes that is there, or a ConfigError naming them all."""
    value = first(config, *names)
    return missing(" or ".join(names)) if value is None else int(value)


def missing(what: str) -> int:
    """Always raises: without this the count would be a guess."""
    raise ConfigError(f"the configuration has no {what}: the operations cannot be counted from it")
