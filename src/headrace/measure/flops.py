"""Floating-point operations of one training step of a decoder, counted from its shape; a multiply-add counts 2.

    forward  = T x (operations per token) + pairs x (operations per query-key pair)
    model    = 3 x forward                     the backward pass costs two forwards (arXiv:2104.04473, appendix)
    hardware = model + what recompute runs once more

T counts tokens, `pairs` the (query, key) pairs attention computes: for documents of lengths s_i packed into rows the
sum of s_i^2 (half of it when causal), not (sum of s_i)^2. Tools differ in whether they halve causal attention; here it
is an argument without a default. Normalisation, activation functions, the router and the optimizer are not counted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from headrace.arguments import whole_number
from headrace.errors import ConfigError
from headrace.measure.sense import above_zero, whole_at_least, zero_or_more

Attention: TypeAlias = Literal["causal", "full"]
Recompute: TypeAlias = Literal["none", "selective", "full"]

TRAINING = 3
"""Forward, gradient of the inputs, gradient of the weights: each matrix product runs three times."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): projections through a narrow latent vector."""

    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """What the operation count of a decoder depends on. Sizes are those of the whole model, not of one rank's part."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    gated: bool
    """Three matrices per MLP (SwiGLU, GeGLU) instead of two."""
    vocab: int
    """Columns of the output matrix, padding included: they are computed too."""
    moe_layers: int = 0
    experts: int = 0
    """Experts of one layer; operations do not depend on it, memory does."""
    topk: int = 0
    moe_ffn: int = 0
    shared_ffn: int = 0
    """Width of the shared experts of one layer, all together."""
    window: int | None = None
    """Keys a query sees at most, in `window_layers` of the layers."""
    window_layers: int = 0
    latent: LatentAttention | None = None
    mtp_depths: int = 0
    """Multi-token prediction: further layers behind the last one, each with a 2h x h projection and its own logits."""
    mtp_moe: bool = False

    def __post_init__(self) -> None:
        sizes = ("layers", "hidden", "heads", "kv_heads", "head_dim", "vocab")
        whole_at_least(1, **{name: getattr(self, name) for name in sizes})
        parts = ("ffn", "moe_layers", "experts", "topk", "moe_ffn", "shared_ffn", "window_layers", "mtp_depths")
        whole_at_least(0, **{name: getattr(self, name) for name in parts})
        if not 0 <= self.moe_layers <= self.layers or not 0 <= self.window_layers <= self.layers:
            raise ConfigError(
                f"moe_layers and window_layers lie in 0..layers, got {self.moe_layers} and {self.window_layers} "
                f"of {self.layers}"
            )
        if self.moe_layers and (self.topk < 1 or self.moe_ffn < 1):
            raise ConfigError(f"layers with experts need topk and moe_ffn, got topk={self.topk} moe_ffn={self.moe_ffn}")
        if (self.window is None) != (self.window_layers == 0) or (self.window is not None and self.window < 1):
            raise ConfigError(f"window and window_layers go together, got {self.window} and {self.window_layers}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What the operations of a step depend on beside the model. Adds up over micro batches and ranks.

    Half pairs keep causal counts whole: a causal document of length s has s^2 of them, a full one 2 s^2.
    """

    tokens: int = 0
    half_pairs: int = 0
    """In layers that see the whole document."""
    windowed_half_pairs: int = 0
    """In layers with a sliding window."""

    def __add__(self, other: Work) -> Work:
        return Work(
            tokens=self.tokens + other.tokens,
            half_pairs=self.half_pairs + other.half_pairs,
            windowed_half_pairs=self.windowed_half_pairs + other.windowed_half_pairs,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class StepFlops:
    """Operations of a step over everything it was given. `model` is for MFU, `hardware` for HFU."""

    forward_linear: int
    """Matrix products with weights, the logits apart."""
    forward_core: int
    """Scores and values of attention."""
    forward_logits: int
    model: int
    hardware: int


def work_of(
    document_lengths: Iterable[int], *, attention: Attention, window: int | None = None, copies: int = 1
) -> Work:
    """The work of documents with these lengths (tokens): one per row, or packed into rows; each `copies` times.

    Causal counts half of each square (the diagonal is not counted whole, as in Megatron-LM); a window of w then allows
    w s - w^2 / 2 pairs in a document longer than w. Raises ConfigError for a length that is no whole number of 0 or
    more, an unknown kind of attention, a window below 1 or one that is not causal.
    """
    check_attention(attention)
    if window is not None and attention != "causal":
        raise ConfigError("a sliding window looks backwards only: use attention='causal'")
    whole_at_least(0, copies=copies)
    if window is not None:
        whole_at_least(1, window=window)
    halves = 1 if attention == "causal" else 2
    tokens = whole = windowed = 0
    for given in document_lengths:
        length = given if type(given) is int else whole_number("the length of a document", given)
        if length < 0:
            raise ConfigError(f"a document has 0 tokens or more, got {length}")
        tokens += length
        square = halves * length * length
        whole += square
        windowed += square if window is None or length <= window else 2 * window * length - window * window
    return Work(tokens=tokens * copies, half_pairs=whole * copies, windowed_half_pairs=windowed * copies)


def step_flops(shape: ModelShape, work: Work, recompute: Recompute = "none") -> StepFlops:
    """Operations of `work`, all ranks' or one rank's. Raises ConfigError for an unknown kind of recompute."""
    check_recompute(recompute)
    layers = shape.layers + shape.mtp_depths
    logits = 2 * work.tokens * shape.hidden * shape.vocab * (1 + shape.mtp_depths)
    linear = 2 * work.tokens * (weights_per_token(shape) + shape.mtp_depths * 2 * shape.hidden**2)
    seen = work.half_pairs * (layers - shape.window_layers) + work.windowed_half_pairs * shape.window_layers
    core = seen * flops_per_half_pair(shape)
    model = TRAINING * (linear + core + logits)
    again = {"none": 0, "selective": core, "full": linear + core}[recompute]
    return StepFlops(
        forward_linear=linear, forward_core=core, forward_logits=logits, model=model, hardware=model + again
    )


def check_attention(attention: str) -> None:
    """ConfigError for an unknown kind of attention."""
    if attention not in ("causal", "full"):
        raise ConfigError(f"attention is 'causal' or 'full', got {attention!r}")


def check_recompute(recompute: str) -> None:
    """ConfigError for an unknown kind of recompute."""
    if recompute not in ("none", "selective", "full"):
        raise ConfigError(f"recompute is 'none', 'selective' or 'full', got {recompute!r}")


def flops_per_half_pair(shape: ModelShape) -> int:
    """Forward operations per half query-key pair and layer: score and weighted value. GQA does not make it less."""
    if shape.latent is not None:
        latent = shape.latent
        return shape.heads * (latent.qk_nope_head_dim + latent.qk_rope_head_dim + latent.v_head_dim)
    return 2 * shape.heads * shape.head_dim


def weights_per_token(shape: ModelShape) -> int:
    """Weights a token meets in all layers (without logits and embedding): of the experts only those it is sent to."""
    matrices = 3 if shape.gated else 2
    dense = matrices * shape.hidden * shape.ffn
    experts = matrices * shape.hidden * (shape.moe_ffn * shape.topk + shape.shared_ffn)
    moe_layers = shape.moe_layers + (shape.mtp_depths if shape.mtp_moe else 0)
    layers = shape.layers + shape.mtp_depths
    return layers * attention_weights(shape) + (layers - moe_layers) * dense + moe_layers * experts


def attention_weights(shape: ModelShape) -> int:
    """Weights of the projections around one layer's attention."""
    if shape.latent is None:
        return shape.hidden * shape.head_dim * (2 * shape.heads + 2 * shape.kv_heads)
    latent = shape.latent
    query_width = shape.heads * (latent.qk_nope_head_dim + latent.qk_rope_head_dim)
    if latent.q_lora_rank is None:
        query = shape.hidden * query_width
    else:
        query = latent.q_lora_rank * (shape.hidden + query_width)
    key_value = shape.hidden * (latent.kv_lora_rank + latent.qk_rope_head_dim)
    key_value += latent.kv_lora_rank * shape.heads * (latent.qk_nope_head_dim + latent.v_head_dim)
    return query + key_value + shape.heads * latent.v_head_dim * shape.hidden


def classical_flops(
    *, batch_size: int, sequence_length: int, layers: int, hidden: int, vocab: int, full_recompute: bool
) -> float:
    """The published closed form for multi-head attention, a 4h MLP and full (not causal) attention.

    72 B s l h^2 (1 + s / 6h + V / 12lh) without recompute, 96 B s l h^2 (1 + s / 6h + V / 16lh) with full recompute
    (Narayanan et al., arXiv:2104.04473, equation 3).
    """
    factor, logits = (96, 16) if full_recompute else (72, 12)
    square = factor * batch_size * sequence_length * layers * hidden * hidden
    return square * (1 + sequence_length / (6 * hidden) + vocab / (logits * layers * hidden))


@dataclass(frozen=True, kw_only=True, slots=True)
class Utilisation:
    """Operations per second over the peak of all devices. Above 1 the peak or the count is wrong: `impossible`."""

    value: float | None
    impossible: bool | None
    flops_per_s_per_device: float | None
    reason: str | None = None


def utilisation(
    flops: float, *, step_seconds: float, num_devices: int, peak_flops_per_device: float | None
) -> Utilisation:
    """flops / (peak x devices x time): MFU from `StepFlops.model`, HFU from `StepFlops.hardware`.

    `num_devices` counts all devices, not the data-parallel size. An unknown peak gives None, never a guess, and so do a
    time, a count or a peak that cannot be.
    """
    if not above_zero(step_seconds) or not zero_or_more(flops) or num_devices < 1:
        nonsense = f"{flops} operations in {step_seconds} s on {num_devices} devices is not a measurement"
        return Utilisation(value=None, impossible=None, flops_per_s_per_device=None, reason=nonsense)
    rate = flops / step_seconds / num_devices
    if peak_flops_per_device is None or not above_zero(peak_flops_per_device):
        unknown = "the device's peak for this dtype is unknown: pass peak_flops"
        return Utilisation(value=None, impossible=None, flops_per_s_per_device=rate, reason=unknown)
    value = flops / (peak_flops_per_device * num_devices * step_seconds)
    wrong = "above 1: the peak or the operation count is wrong" if value > 1.0 else None
    return Utilisation(value=value, impossible=value > 1.0, flops_per_s_per_device=rate, reason=wrong)
