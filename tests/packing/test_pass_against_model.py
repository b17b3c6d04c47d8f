"""The C pass equals the token-by-token model on any text, in any layout, and writes nothing but its outputs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.packing import LAYOUTS, Packer, PackRules, batch_spec, pack
from headrace.packing.layouts import OUTPUT_DTYPES

from .model import pack_slowly

BLOCK = 256  # PACK_BLOCK_TOKENS of native/pack.h: whatever goes wrong between two blocks goes wrong here
SEQ_LENGTHS = st.one_of(st.integers(1, 70), st.sampled_from([BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 4 * BLOCK + 33]))
DTYPES = ("uint16", "int32", "int64", "int16", "uint8", "int8", ">u2", ">i4")
EOD, PAD = 3, 5
GUARD = 77


@st.composite
def rules(draw):
    return PackRules(
        eod=draw(st.sampled_from([EOD, 0])),
        pad=draw(st.sampled_from([None, PAD, EOD, 0])),
        reset_position_ids=draw(st.booleans()),
        reset_attention_mask=draw(st.booleans()),
        eod_mask_loss=draw(st.booleans()),
        add_extra_token=draw(st.booleans()),
        allow_ambiguous_pad_tokens=draw(st.booleans()),
        vocab_size=draw(st.sampled_from([None, 100])),
    )


@st.composite
def texts(draw, rules: PackRules):
    """Rows with ends and pads from none to everywhere, first and last places included."""
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    shape = draw(st.integers(1, 4)), rules.row_length(draw(SEQ_LENGTHS))
    pad = 0 if dtype.kind == "u" and rules.effective_pad < 0 else rules.effective_pad
    rows = random.integers(0, 100, shape)
    rows[random.random(shape) < draw(st.sampled_from([0, 0.01, 0.3, 1]))] = rules.eod
    rows[random.random(shape) < draw(st.sampled_from([0, 0.1, 1]))] = pad
    rows[:, shape[1] - draw(st.integers(0, shape[1])) :] = pad
    if draw(st.booleans()):
        rows[:, 0] = rules.eod
    if draw(st.booleans()):
        rows[:, -1] = rules.eod
    return rows.astype(dtype)


def assert_matches(batch, expected) -> None:
    for output, name in LAYOUTS["megatron"].outputs:
        assert batch[output].tolist() == getattr(expected, name), name


@st.composite
def cuts(draw, seq_length: int, rows: int):
    """Part lengths per row that account for the whole text, parts of length 0 among them."""
    lengths = []
    for _ in range(rows):
        ends = sorted(draw(st.lists(st.integers(0, seq_length), max_size=6)))
        lengths.append(np.diff([0, *ends, seq_length]).tolist())
    return lengths


@given(st.data())
def test_fields_and_counts(data):
    chosen = data.draw(rules())
    rows = data.draw(texts(chosen))
    padding_rows = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=2))
    expected = pack_slowly(rows, chosen, padding_rows=padding_rows)

    batch = pack(rows, chosen, padding_rows=padding_rows)
    assert_matches(batch, expected)
    assert (batch["num_documents"], batch["max_seqlen"]) == (expected.num_documents, expected.max_seqlen)

    counts = Packer(chosen).pack_into(rows, {}, padding_rows=padding_rows)
    assert counts._asdict() == {name: getattr(expected, name) for name in counts._fields}
    assert all(type(count) is int for count in counts)


@given(st.data())
def test_given_lengths_win_over_ends_in_the_text(data):
    chosen = data.draw(rules())
    rows = data.draw(texts(chosen))
    lengths = data.draw(cuts(rows.shape[1], len(rows)))
    expected = pack_slowly(rows, chosen, document_lengths=lengths)
    assert_matches(pack(rows, chosen, document_lengths=lengths), expected)
    counts = Packer(chosen).pack_into(rows, {}, document_lengths=lengths)
    assert counts._asdict() == {name: getattr(expected, name) for name in counts._fields}


@given(st.data())
def test_a_short_text_gives_its_padding_to_the_last_document(data):
    chosen = replace(data.draw(rules()), pad=PAD, eod=EOD)
    rows = data.draw(texts(chosen)).astype(np.int32)
    text_length = data.draw(st.integers(1, rows.shape[1]))
    rows[:, text_length:] = PAD
    lengths = data.draw(cuts(text_length, len(rows)))
    expected = pack_slowly(rows, chosen, document_lengths=lengths)
    assert_matches(pack(rows, chosen, document_lengths=lengths), expected)
    assert Packer(chosen).pack_into(rows, {}, document_lengths=lengths).num_valid_tokens == expected.num_valid_tokens


@given(st.data())
def test_every_layout_holds_the_model_s_values(data):
    chosen = data.draw(rules())
    rows = data.draw(texts(chosen))
    expected = pack_slowly(rows, chosen)
    for name, layout in LAYOUTS.items():
        batch = pack(rows, chosen, layout=name)
        for field, output in layout.outputs:
            assert batch[field].tolist() == getattr(expected, output), (name, field)
            assert batch[field].dtype == OUTPUT_DTYPES[output]
        for alias, field in layout.aliases:
            assert batch[alias] is batch[field]


@given(st.data())
def test_nothing_is_written_beside_the_wanted_outputs(data):
    chosen = data.draw(rules())
    rows = data.draw(texts(chosen))
    layout = data.draw(st.sampled_from(sorted(LAYOUTS)))
    spec = batch_spec(layout, len(rows), rows.shape[1] - chosen.add_extra_token)
    wanted = data.draw(st.sets(st.sampled_from([field.name for field in spec.fields])))

    guarded = {field.name: np.full(np.prod(field.shape) + 2 * GUARD, GUARD, field.dtype) for field in spec.fields}
    outputs = {
        field.name: guarded[field.name][GUARD:-GUARD].reshape(field.shape)
        for field in spec.fields
        if field.name in wanted
    }
    counts = Packer(chosen, layout=layout).pack_into(rows, outputs)

    whole = pack(rows, chosen, layout=layout)
    for field in spec.fields:
        used = 0 if field.name not in wanted else counts.num_documents + 1 if field.ragged else np.prod(field.shape)
        assert (guarded[field.name][:GUARD] == GUARD).all()
        assert guarded[field.name][GUARD : GUARD + used].tolist() == whole[field.name].ravel()[:used].tolist()
        assert (guarded[field.name][GUARD + used :] == GUARD).all()


@given(st.data())
def test_a_second_call_finds_nothing_of_the_first(data):
    chosen = data.draw(rules())
    packer = Packer(chosen, layout="transformers")
    first = data.draw(texts(chosen))
    fresh = np.where(first == PAD, EOD, np.where(first == EOD, PAD, first))
    outputs = {
        field.name: np.zeros(field.shape, field.dtype)
        for field in batch_spec("transformers", len(first), first.shape[1] - chosen.add_extra_token).fields
    }
    packer.pack_into(first, outputs, padding_rows=[0])
    counts = packer.pack_into(fresh, outputs)
    whole = pack(fresh, chosen, layout="transformers")
    for name, values in outputs.items():
        used = values[: counts.num_documents + 1] if name == "cu_seq_lens_q" else values
        assert np.array_equal(used, whole[name]), name


@settings(max_examples=30)
@given(seed=st.integers(0, 2**32 - 1), seq_length=st.integers(1, 1500), row=st.integers(0, 2))
def test_a_foreign_id_is_named_by_its_place(seed, seq_length, row):
    random = np.random.default_rng(seed)
    rows = random.integers(0, 50, (3, seq_length + 1), np.int32)
    position = int(random.integers(0, seq_length + 1))
    rows[row, position] = random.choice([50, 2**31 - 1, -2])
    with pytest.raises(
        ValueError, match=rf"token id {rows[row, position]} \(row {row}, position {position}\) .*\[0, 50\)"
    ):
        pack(rows, PackRules(vocab_size=50))
    rows[row, position] = -1  # the pad never reaches the model
    pack(rows, PackRules(vocab_size=50))
