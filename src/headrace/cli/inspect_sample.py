"""One packed micro batch, taken apart again for people: which document each token is from, and what is a target."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace

import numpy as np

from headrace.errors import ConfigError
from headrace.feed.packed_tokens import PackedTokens
from headrace.order import Part
from headrace.store import Manifest, Tokenizer, TokenStore, load_tokenizer, read_manifest

SHOWN_CHARACTERS = 160
SHOWN_IDS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleRequest:
    """What to take: the micro batch of rows `sample`, `sample` + 1, ... of an order."""

    sample: int
    source: PackedTokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """One document's share of a row: positions [begin, end) of the row."""

    row: int
    begin: int
    end: int
    corpus: int
    """Which one of a blend."""
    document: int
    offset: int
    """First token, counted in the document."""
    first_position: int
    last_position: int
    num_targets: int
    """Positions whose label counts in the loss."""
    shown: str
    """The beginning of the text, or of the token ids where no tokenizer is known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """A packed micro batch: its segments, and the arrays as a model gets them."""

    first_sample: int
    last_sample: int
    samples_in_order: int
    sequence_length: int
    segments: list[Segment]
    cu_seqlens: list[int]
    max_seqlen: int
    num_targets: int
    num_positions: int
    tokens: list[list[int]]
    labels: list[list[int]]
    loss_mask: list[list[int]]
    position_ids: list[list[int]]
    decoded: bool
    note: str


def take_sample(stores: Sequence[TokenStore], request: SampleRequest) -> Sample:
    """Read, pack and describe. Raises ConfigError if there is no such sample, or for rules that mean nothing."""
    manifests = [_own_manifest(store) for store in stores]
    source = replace(
        request.source,
        eod=_agreed([None if one is None else one.eod for one in manifests])
        if request.source.eod is None
        else request.source.eod,
        pad=_agreed([None if one is None else one.pad for one in manifests]),
    )
    # The feed's own batch: the first one of a run that goes on there.
    with closing(source.open_batches(consumed_samples=max(0, request.sample))) as batches:
        samples = range(request.sample, request.sample + source.micro_batch_size)
        if samples.start < 0 or samples.stop > batches.num_samples:
            raise ConfigError(
                f"there are samples 0 to {batches.num_samples - 1}, asked for {source.micro_batch_size} from "
                f"{request.sample} on; choose another --sample or --micro-batch-size"
            )
        parts, batch, num_samples = batches.parts(0), batches[0], batches.num_samples
    named = [_tokenizer(store, manifest) for store, manifest in zip(stores, manifests, strict=True)]
    tokenizers = [tokenizer for tokenizer, _ in named]
    loss_mask = batch["loss_mask"].astype(np.int64)
    return Sample(
        first_sample=samples[0],
        last_sample=samples[-1],
        samples_in_order=num_samples,
        sequence_length=source.seq_length,
        segments=[
            segment
            for row, row_parts in enumerate(parts)
            for segment in _segments(
                row, row_parts, batch["tokens"][row], batch["position_ids"][row], loss_mask[row], tokenizers
            )
        ],
        cu_seqlens=batch["cu_seqlens"].tolist(),
        max_seqlen=batch["max_seqlen"],
        num_targets=int(loss_mask.sum()),
        num_positions=loss_mask.size,
        tokens=batch["tokens"].tolist(),
        labels=batch["labels"].tolist(),
        loss_mask=loss_mask.tolist(),
        position_ids=batch["position_ids"].tolist(),
        decoded=None not in tokenizers,
        note="; ".join(dict.fromkeys(note for _, note in named if note)),
    )


def _segments(
    row: int,
    parts: Sequence[Part],
    tokens: np.ndarray,
    position_ids: np.ndarray,
    loss_mask: np.ndarray,
    tokenizers: Sequence[Tokenizer | None],
) -> list[Segment]:
    segments = []
    begin = 0
    for part in parts:
        # The row's last token is only a label; a last part of one token has no position.
        end = min(begin + part.length, len(tokens))
        if end > begin:
            segments.append(
                Segment(
                    row=row,
                    begin=begin,
                    end=end,
                    corpus=part.corpus,
                    document=part.document,
                    offset=part.offset,
                    first_position=int(position_ids[begin]),
                    last_position=int(position_ids[end - 1]),
                    num_targets=int(loss_mask[begin:end].sum()),
                    shown=_shown(tokens[begin:end].tolist(), tokenizers[part.corpus]),
                )
            )
        begin = end
    return segments


def _shown(ids: list[int], tokenizer: Tokenizer | None) -> str:
    """The first ids as text, line ends and control characters spelled out; nothing a terminal would obey."""
    if tokenizer is None:
        return " ".join(map(str, ids[:SHOWN_IDS])) + (" ..." if len(ids) > SHOWN_IDS else "")
    # A token is at least one character in all but broken text, so this is enough to fill the cell.
    text = tokenizer.decode(ids[:SHOWN_CHARACTERS])
    printable = "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)
    cut = len(printable) > SHOWN_CHARACTERS or len(ids) > SHOWN_CHARACTERS
    return printable[:SHOWN_CHARACTERS] + ("..." if cut else "")


def _own_manifest(store: TokenStore) -> Manifest | None:
    """The manifest that describes this pair."""
    manifest = read_manifest(store.prefix)
    return manifest if manifest is not None and manifest.fingerprint == store.fingerprint() else None


def _agreed(ids: Sequence[int | None]) -> int | None:
    """What all corpora say; None where they differ or do not say."""
    return ids[0] if len(set(ids)) == 1 else None


def _tokenizer(store: TokenStore, manifest: Manifest | None) -> tuple[Tokenizer | None, str]:
    """The tokenizer beside the store, or why there is no text to show."""
    if manifest is None and read_manifest(store.prefix) is not None:
        return None, "token ids instead of text: the manifest beside the store is that of another one"
    try:
        tokenizer = load_tokenizer(store.prefix)
    except ConfigError as error:
        return None, f"token ids instead of text: {error}"
    if tokenizer is None:
        return None, "token ids instead of text: there is no tokenizer.json beside the store"
    return tokenizer, ""
