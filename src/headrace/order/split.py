"""The part of a corpus that a split takes: Megatron's `--split 969,30,1`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from headrace.errors import ConfigError

SPLIT_NAMES = ("train", "valid", "test")


def split_matrix(split: str) -> list[tuple[float, float] | None]:
    """Start and end of train, valid and test as fractions of the corpus; None for a part without weight.

    `split` has one to three weights, comma separated; missing ones are 0. Same arithmetic, and so the same rounding,
    as parse_and_normalize_split and convert_split_vector_to_split_matrix in
    megatron/core/datasets/blended_megatron_dataset_config.py (0.16.1), which would also take "8 a 1" for "8,1".
    """
    try:
        weights = [float(word) for word in split.split(",")]
    except ValueError:
        weights = []
    valid = 1 <= len(weights) <= len(SPLIT_NAMES) and all(math.isfinite(weight) and weight >= 0 for weight in weights)
    if not valid or not 0 < sum(weights) < math.inf:
        raise ConfigError(
            f'`split` must be one to three weights such as "969,30,1", not all 0 and of a finite sum, got {split!r}'
        )
    shares = normalize(weights + [0.0] * (len(SPLIT_NAMES) - len(weights)))
    matrix: list[tuple[float, float] | None] = []
    # An int, as Megatron's: its cache files are named after the JSON of this, where 0 and 0.0 differ.
    begin: float = 0
    for share in shares:
        end = begin + share
        matrix.append((begin, end) if end > begin else None)
        begin = end
    return matrix


def split_range(num_documents: int, split: str | None, split_name: str) -> range:
    """The documents of one part; all of them where `split` is None. Raises ConfigError if there are none."""
    if split_name not in SPLIT_NAMES:
        raise ConfigError(f"`split_name` must be one of {', '.join(SPLIT_NAMES)}, got {split_name!r}")
    if split is None:
        documents = range(num_documents)
    else:
        fractions = split_matrix(split)[SPLIT_NAMES.index(split_name)]
        # round() goes to the even neighbour at .5, as Megatron's does.
        ends = [round(fraction * float(num_documents)) for fraction in fractions or (0.0, 0.0)]
        documents = range(*ends)
    if not documents:
        raise ConfigError(
            f"the {split_name} part of split {split!r} holds none of {num_documents} documents; "
            "give it more weight in `split`, or use a corpus with more documents"
        )
    return documents


def check_weights(weights: Sequence[float]) -> None:
    """ConfigError unless the weights of a blend are above 0 and a float can hold their sum."""
    try:
        good = all(0 < weight < math.inf for weight in weights) and math.fsum(weights) < math.inf
    except OverflowError:
        good = False
    if not good:
        raise ConfigError(
            f"weights of a blend must be above 0 and of a finite sum, got {list(weights)}; "
            "leave out a corpus without weight"
        )


def normalize(weights: Sequence[float]) -> list[float]:
    """Weights divided by their sum, with NumPy's order of summation (the last bit decides between equal claims)."""
    array = np.array(weights, dtype=np.float64)
    shares: list[float] = (array / np.sum(array)).tolist()
    return shares
