"""Index arrays on disk, so that a restart does not shuffle again. Local to a node; nobody waits for rank 0.

Megatron keeps four files per order and three per blend, named after the MD5 of a JSON text that describes it. Where
the tokenizer's identifiers are known (MegatronNames) the same names are used, and either program finds what the other
one left. Otherwise the names are our own: headrace-1-<digest>-..., a digest of the rules and of all document lengths.

Megatron's description leaves out the extra token, the partial last sample and the corpus itself, and its files are
written in place by one process while others may look. So nothing is believed: arrays that were found are used only if
they follow from the lengths (see `_follows`); else they are built anew and written again, under a temporary name first.
A blend is drawn in any case, and written unless the same one is there. A folder that cannot be written costs the next
start its cache, nothing more.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from headrace.order.draw import Drawing
from headrace.order.plan import IndexArrays, IntArray, OrderPlan, OrderRules
from headrace.order.sample_index import build_sample_index
from headrace.order.split import split_matrix

OWN_VERSION = 1

ORDER_ARRAYS = ("document_index", "sample_index", "shuffle_index")
BLEND_ARRAYS = ("dataset_index", "dataset_sample_index")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class MegatronNames:
    """What Megatron puts into the names of its files beside the rules."""

    dataset_path: str
    """The prefix, spelled as in `--data-path`."""
    tokenizer: Mapping[str, Any]
    """`unique_identifiers` of Megatron's tokenizer object, in its order."""

    def identifiers(self, rules: OrderRules) -> dict[str, Any]:
        """MegatronDataset.unique_identifiers of megatron-core 0.16.1."""
        return {
            "class": "GPTDataset",
            "dataset_path": self.dataset_path,
            "num_samples": rules.num_samples,
            "index_split": rules.split_name,
            "random_seed": rules.seed,
            "sequence_length": rules.sequence_length,
            "split": rules.split,
            "split_matrix": None if rules.split is None else split_matrix(rules.split),
            "tokenizer": self.tokenizer,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """What a set of files is of."""

    description: str
    """Content of description.txt."""
    stem: str
    """What their names begin with; a digest of the description."""


class IndexCache:
    """Index arrays in `folder` (Megatron: `--data-cache-path`, or PREFIX/cache/GPTDataset_indices)."""

    def __init__(self, folder: str | os.PathLike[str], names: MegatronNames | None = None) -> None:
        self.folder = Path(folder)
        self.names = names

    def load(self, lengths: IntArray, rules: OrderRules, plan: OrderPlan) -> IndexArrays | None:
        """The arrays of this order if they are there, whole and right; else None. Never raises for what it finds."""
        found = self.read(self._order_identity(lengths, rules), ORDER_ARRAYS)
        if found is None:
            return None
        arrays = IndexArrays(*found)
        return arrays if _follows(arrays, lengths, rules, plan) else None

    def save(self, lengths: IntArray, rules: OrderRules, arrays: IndexArrays) -> bool:
        """Write the arrays of an order; returns whether that worked."""
        return self.write(self._order_identity(lengths, rules), arrays, ORDER_ARRAYS)

    def read(self, identity: Identity, names: Sequence[str]) -> list[IntArray] | None:
        """The arrays of these names, or None if one is missing or torn. What they hold is for the caller to check.

        They are read and not mapped: Megatron rewrites its files in place, and a mapped file that shrinks is a SIGBUS.
        """
        try:
            return [np.load(self._path(identity, f"{name}.npy"), allow_pickle=False) for name in names]
        except (OSError, ValueError, EOFError):
            return None

    def write(self, identity: Identity, arrays: Sequence[IntArray], names: Sequence[str]) -> bool:
        """Write arrays and description; returns whether that worked. Any number of processes may do so at once."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for name, array in zip(names, arrays, strict=True):
                _replace(self._path(identity, f"{name}.npy"), array)
            # Last: Megatron takes a set with all its files for complete.
            _replace(self._path(identity, "description.txt"), identity.description)
        except OSError as error:
            _log.warning("index arrays are not cached in %s: %s", self.folder, error.strerror)
            return False
        return True

    def keep(self, identity: Identity, arrays: Sequence[IntArray], names: Sequence[str]) -> None:
        """Write arrays and description, unless the same are there."""
        found = self.read(identity, names)
        if found is None or not all(map(_same, found, arrays)):
            self.write(identity, arrays, names)

    def _order_identity(self, lengths: IntArray, rules: OrderRules) -> Identity:
        if self.names is not None:
            return _megatrons(self.names.identifiers(rules), rules.split_name)
        known = {field.name: getattr(rules, field.name) for field in fields(rules)}
        known["lengths_sha256"] = hashlib.sha256(np.ascontiguousarray(lengths).data).hexdigest()
        return _our_own({"class": "GPTDataset"} | known, rules.split_name)

    def _path(self, identity: Identity, suffix: str) -> Path:
        return self.folder / f"{identity.stem}-{suffix}"


def blend_identity(caches: Sequence[IndexCache], rules: Sequence[OrderRules], drawing: Drawing) -> Identity:
    """Of the choices of a blend; `caches` and `rules` of its corpora in order."""
    split_name = rules[0].split_name
    content: dict[str, Any] = {"class": "BlendedDataset"}
    datasets = [cache.names.identifiers(of) for cache, of in zip(caches, rules, strict=True) if cache.names is not None]
    if len(datasets) == len(caches):
        content |= {"datasets": datasets, "split": split_name, "weights": drawing.weights, "size": drawing.size}
        return _megatrons(content, split_name)
    # The choices depend on nothing else.
    return _our_own(content | {"weights": drawing.weights, "size": drawing.size}, split_name)


def _megatrons(identifiers: Mapping[str, Any], split_name: str) -> Identity:
    description = json.dumps(identifiers, indent=4)
    digest = hashlib.md5(description.encode(), usedforsecurity=False).hexdigest()
    return Identity(description=description, stem=f"{digest}-{identifiers['class']}-{split_name}")


def _our_own(identifiers: Mapping[str, Any], split_name: str) -> Identity:
    description = json.dumps(identifiers, indent=4)
    digest = hashlib.sha256(description.encode()).hexdigest()[:32]
    return Identity(
        description=description, stem=f"headrace-{OWN_VERSION}-{digest}-{identifiers['class']}-{split_name}"
    )


def _replace(path: Path, content: IntArray | str) -> None:
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "xb") as stream:
            if isinstance(content, str):
                stream.write(content.encode())
            else:
                np.save(stream, content, allow_pickle=False)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _same(one: IntArray, other: IntArray) -> bool:
    return one.dtype == other.dtype and np.array_equal(one, other)


def _follows(arrays: IndexArrays, lengths: IntArray, rules: OrderRules, plan: OrderPlan) -> bool:
    """Whether the arrays could have been built from these lengths and rules: everything except the seed is checked.

    Each document once per epoch, each sample once, and the sample index exactly what the documents in this order give.
    """
    documents, samples, shuffled = arrays
    if documents.shape != (plan.num_documents,) or documents.dtype != np.int32:
        return False
    if shuffled.shape != (plan.num_samples,) or shuffled.dtype.kind not in "iu":
        return False
    if int(documents.min()) < plan.documents.start or int(documents.max()) >= plan.documents.stop:
        return False
    if np.any(np.bincount(documents - plan.documents.start, minlength=len(plan.documents)) != plan.num_epochs):
        return False
    if int(shuffled.min()) < 0 or int(shuffled.max()) >= plan.num_samples:
        return False
    if np.any(np.bincount(shuffled.astype(np.intp), minlength=plan.num_samples) != 1):
        return False
    expected = build_sample_index(
        lengths.take(documents),
        sequence_length=rules.sequence_length,
        num_samples=plan.num_samples,
        extra=rules.extra,
    )
    return _same(samples, expected)
