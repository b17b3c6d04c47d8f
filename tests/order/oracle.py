"""megatron-core 0.16.1 as the judge: its GPTDataset over documents in memory or in files. For parity tests only."""

import logging
from types import SimpleNamespace

import numpy as np
import pytest

gpt_dataset = pytest.importorskip("megatron.core.datasets.gpt_dataset", reason="needs megatron-core 0.16.1")

from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder  # noqa: E402
from megatron.core.datasets.utils import Split  # noqa: E402

# One line per dataset built, thousands in all.
logging.getLogger("megatron").setLevel(logging.ERROR)

TOKENIZER = SimpleNamespace(
    eod=0, pad=1, vocab_size=1000, unique_identifiers={"class": "Null", "path": "nowhere/tokenizer.json"}
)


class Documents:
    """What GPTDataset asks of an IndexedDataset, with tokens that name their place: document * 10**6 + offset."""

    def __init__(self, lengths: np.ndarray) -> None:
        self.sequence_lengths = lengths

    def get(self, index: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        length = self.sequence_lengths[index] - offset if length is None else length
        return np.int64(index) * 10**6 + offset + np.arange(length)


def config(**options: object) -> object:
    """A GPTDatasetConfig; `mock` is set afterwards, so that nothing is cached on disk."""
    defaults = {"reset_position_ids": False, "reset_attention_mask": False, "eod_mask_loss": False}
    return gpt_dataset.GPTDatasetConfig(**defaults, tokenizer=TOKENIZER, **options)


def dataset_in_memory(lengths: np.ndarray, documents: range, **options: object) -> object:
    """A GPTDataset over `documents` of a corpus in memory."""
    split_name, num_samples = options.pop("split_name"), options.pop("num_samples")
    settings = config(**options, split="1,0,0")
    settings.mock = True
    indices = np.arange(documents.start, documents.stop, dtype=np.int32)
    return gpt_dataset.GPTDataset(Documents(lengths), None, indices, num_samples, Split[split_name], settings)


def dataset_from_files(prefixes: list[str], weights: list[float] | None, size: int | None, **options: object):
    """What BlendedMegatronDatasetBuilder makes of stores on disk: the three splits."""
    sizes = [size, size, size]
    return BlendedMegatronDatasetBuilder(
        gpt_dataset.GPTDataset, sizes, lambda: True, config(blend=(prefixes, weights), **options)
    ).build()


def row(dataset: object, sample: int) -> np.ndarray:
    """The raw tokens of a sample, padding included."""
    return dataset._query_document_sample_shuffle_indices(sample)[0]
