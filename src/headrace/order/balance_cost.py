"""What a row costs a rank, from the lengths of its documents alone.

Everything but attention costs the same for every token; attention costs what each token looks at, s^2 / 2 pairs for a
document of s tokens. Only the ratio of the two matters, so there is one coefficient. Costs are integers: sums do not
depend on their order, and every feeder on every machine finds the same ones.

For a transformer of hidden size h the coefficient is about 1 / (12 h): per layer and token 24 h^2 FLOPs in matrices
against 2 h s in causal attention (Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters
Using Megatron-LM", SC 2021, appendix: 24 B s h^2 + 4 B s^2 h per layer, half of the second term if causal).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from headrace.errors import ConfigError
from headrace.order.sample import Part

DEFAULT_ATTENTION_COST = 1 / (12 * 4096)
"""A hidden size of 4096."""

# One token's cost: the coefficient is kept to 2**-40, finer than any measurement of it.
_TOKEN = 2**40


def laid_out_lengths(
    parts: Sequence[Part], *, sequence_length: int, extra: int, pad_documents_to: int = 1
) -> list[int]:
    """Segments of a row as attention sees them: they add up to `sequence_length`.

    The rule of `cu_seqlens` (headrace.packing.document_ends): each document takes a multiple of `pad_documents_to`, the
    `extra` token (0 or 1) is taken from the last one, which vanishes if it was nothing else, and padding at the row's
    end goes to the last document.
    """
    ends, filled = [], 0
    for part in parts:
        filled = min(filled - (-part.length // pad_documents_to) * pad_documents_to, sequence_length + extra)
        ends.append(filled)
    inner = [end for end in ends if end < filled - extra]
    return [later - earlier for earlier, later in pairwise([0, *inner, sequence_length])]


def cost_of(segments: Sequence[int], attention_cost: float) -> int:
    """Tokens + attention_cost * sum of s^2, in units of 2**-40 tokens."""
    return sum(segments) * _TOKEN + sum(s * s for s in segments) * round(attention_cost * _TOKEN)


def measured_attention_cost(
    tokens: npt.ArrayLike, squares: npt.ArrayLike, seconds: npt.ArrayLike
) -> tuple[float, float]:
    """`attention_cost` and seconds per token from measured micro batches, by least squares.

    Three arrays [num_measured]: tokens, sum of s_i^2, and how long it took. ConfigError where they do not tell: fewer
    than two different mixtures, or a fit that makes either of the two free.
    """
    columns = np.stack([np.asarray(tokens, np.float64), np.asarray(squares, np.float64)], axis=1)
    # Columns of one size: squares are thousands of times larger, and the rank would be judged by them alone.
    scales = np.maximum(np.abs(columns).max(axis=0, initial=0.0), 1.0)
    found, _, rank, _ = np.linalg.lstsq(columns / scales, np.asarray(seconds, np.float64), rcond=1e-6)
    per_token, per_pair = (found / scales).tolist()
    if rank < 2 or per_token <= 0 or per_pair < 0:
        raise ConfigError(
            f"{len(columns)} measured micro batches do not tell tokens from attention: found {per_token:.3g} s per "
            f"token and {per_pair:.3g} s per pair; measure rows of few long and of many short documents"
        )
    return per_pair / per_token, per_token
