"""A packed batch trains on the same targets as its documents one by one, with a model that nobody here wrote."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from tests.demo.conftest import EOD, VOCAB_SIZE

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from headrace.demo.model import config_of  # noqa: E402
from headrace.demo.settings import DemoSettings  # noqa: E402
from headrace.feed.packed_tokens import PackedTokens  # noqa: E402

ROWS, SEQ_LENGTH = 2, 256
TOLERANCE = 1e-5


@pytest.fixture(scope="module", params=["llama", "moe"])
def model(request: pytest.FixtureRequest) -> Any:
    settings = DemoSettings(tp=1, seq_length=SEQ_LENGTH, model=request.param)
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config_of(settings, VOCAB_SIZE)).eval()


@pytest.fixture(scope="module")
def batch(prefix: str) -> dict[str, Any]:
    source = PackedTokens(
        prefix, seq_length=SEQ_LENGTH, micro_batch_size=ROWS, layout="transformers", eod=EOD, eod_mask_loss=True
    )
    return {
        name: torch.from_numpy(value) if hasattr(value, "dtype") else value
        for name, value in source.open_batches()[3].items()
    }


def pieces(batch: dict[str, Any], documents: list[list[int]]) -> Iterator[tuple[int, list[int], list[int]]]:
    """Each segment of attention as (row, its tokens, the document it was cut from)."""
    ends = batch["cu_seq_lens_q"].tolist()
    joined = batch["input_ids"].flatten().tolist()
    for start, end in pairwise(ends):
        segment = joined[start:end]
        whole = [document for document in documents if _offset(segment, document) is not None]
        assert whole, f"tokens {start} to {end} are no piece of one document"
        yield start // SEQ_LENGTH, segment, whole[0]


def _offset(segment: list[int], document: list[int]) -> int | None:
    found = (at for at in range(len(document)) if document[at : at + len(segment)] == segment)
    return next(found, None)


def loss_one_by_one(
    model: Any, batch: dict[str, Any], documents: list[list[int]], *, with_next: bool
) -> tuple[float, int]:
    """Mean loss over all targets, and how many: each piece of a document alone, with labels as transformers has them.

    `with_next`: a piece that was cut at the end of its row also has the token that follows there as its last target.
    """
    total, count, segments = 0.0, 0, list(pieces(batch, documents))
    for number, (row, segment, document) in enumerate(segments):
        is_last_of_row = number + 1 == len(segments) or segments[number + 1][0] != row
        at = _offset(segment, document)
        assert at is not None
        follows = document[at + len(segment) :][:1] if is_last_of_row and with_next else []
        tokens = torch.tensor([segment + follows])
        num_targets = tokens.shape[1] - 1
        if num_targets:
            total += float(model(input_ids=tokens, labels=tokens).loss) * num_targets
            count += num_targets
    return total / count, count


@torch.no_grad()
def test_the_loss_of_a_packed_batch_is_that_of_its_documents_one_by_one(
    model: Any, batch: dict[str, Any], documents: list[list[int]]
) -> None:
    expected, num_targets = loss_one_by_one(model, batch, documents, with_next=True)
    assert num_targets == int((batch["shift_labels"] != -100).sum())
    got = model(**{name: batch[name] for name in ("input_ids", "position_ids", "labels", "shift_labels")})
    assert float(got.loss) == pytest.approx(expected, abs=TOLERANCE)


@torch.no_grad()
def test_a_model_that_shifts_by_itself_has_the_same_targets_but_the_one_beyond_its_row(
    model: Any, batch: dict[str, Any], documents: list[list[int]]
) -> None:
    expected, num_targets = loss_one_by_one(model, batch, documents, with_next=False)
    assert num_targets == int((batch["labels"][:, 1:] != -100).sum())
    got = model(**{name: batch[name] for name in ("input_ids", "position_ids", "labels")})
    assert float(got.loss) == pytest.approx(expected, abs=TOLERANCE)


@torch.no_grad()
def test_documents_that_see_each_other_have_another_loss(
    model: Any, batch: dict[str, Any], documents: list[list[int]]
) -> None:
    """What the tests above would say if positions did not restart."""
    assert batch["cu_seq_lens_q"].numel() > ROWS + 2
    expected, _ = loss_one_by_one(model, batch, documents, with_next=True)
    got = model(**{name: batch[name] for name in ("input_ids", "labels", "shift_labels")})
    assert abs(float(got.loss) - expected) > 20 * TOLERANCE
