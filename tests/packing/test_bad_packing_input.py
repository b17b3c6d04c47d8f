"""Wrong calls are named, with what was needed and what was there; nothing is ever written outside an output."""

from __future__ import annotations

import numpy as np
import pytest

from headrace import _native
from headrace.errors import ConfigError, FormatError
from headrace.packing import Packer, PackRules, pack

RULES = PackRules(eod=9, pad=0, reset_position_ids=True, reset_attention_mask=True, eod_mask_loss=True)
ROWS = np.array([[5, 6, 9, 7, 9, 9, 8, 4, 3], [1, 2, 3, 9, 4, 5, 6, 9, 7]], np.uint16)  # 6 documents of 16 tokens


def read_only(array):
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (ROWS.tolist(), "NumPy array, got list"),
        (ROWS[0], r"\[micro_batch >= 1, seq_length \+ 1\] with seq_length >= 1, got shape \[9\]"),
        (ROWS[None], r"got shape \[1, 2, 9\]"),
        (ROWS[:0], r"got shape \[0, 9\]"),
        (ROWS[:, :1], r"got shape \[2, 1\]"),
        (ROWS[:, :0], r"got shape \[2, 0\]"),
        (ROWS.astype(np.uint32), "got uint32"),
        (ROWS.astype(np.float32), "got float32"),
        (ROWS.astype(bool), "got bool"),
        (ROWS.astype(object), "got object"),
    ],
)
def test_rows_that_are_none(rows, message):
    with pytest.raises(ConfigError, match=message):
        pack(rows, RULES)


def test_without_the_extra_token_one_column_is_enough_and_none_is_not():
    rules = PackRules(add_extra_token=False)
    assert pack(ROWS[:, :1], rules)["tokens"].tolist() == [[5], [1]]
    with pytest.raises(ConfigError, match=r"\[micro_batch >= 1, seq_length\] with seq_length >= 1, got shape \[2, 0\]"):
        pack(ROWS[:, :0], rules)


@pytest.mark.parametrize("token", [2**31, -(2**31) - 1, 2**40])
def test_an_id_that_is_no_int32(token):
    with pytest.raises(FormatError, match=f"must fit int32, got ids from .*{token}"):
        pack(np.array([[1, token]]), RULES)


def test_an_id_outside_the_vocabulary():
    with pytest.raises(FormatError, match=r"token id 8 \(row 0, position 6\) is outside the vocabulary \[0, 8\)"):
        pack(ROWS, PackRules(eod=1, vocab_size=8, pad=9))
    with pytest.raises(FormatError, match=r"token id 7 \(row 1, position 8\) is outside the vocabulary \[0, 7\)"):
        pack(np.where(ROWS > 6, 6, ROWS)[:1].repeat(2, 0) + (np.arange(9) == 8) * [[0], [4]], PackRules(vocab_size=7))


@pytest.mark.parametrize("rows_dtype", [np.uint16, np.int32])
@pytest.mark.parametrize(
    ("name", "output", "message"),
    [
        ("tokens", np.zeros(15, np.int64), "tokens must have 16 elements, got 15"),
        ("tokens", np.zeros((2, 9), np.int64), "tokens must have 16 elements, got 18"),
        ("labels", np.zeros((2, 8), np.int32), "labels must be int64, got buffer format 'i' of 4 bytes"),
        ("labels", np.zeros((2, 8), np.uint64), "labels must be int64, got buffer format 'L' of 8 bytes"),
        ("labels", np.zeros((2, 8), np.float64), "labels must be int64, got buffer format 'd'"),
        ("labels", np.zeros((2, 8), ">i8"), "labels must be int64, got buffer format '>"),
        ("loss_mask", np.zeros((2, 8), np.int32), "loss_mask must be float32, got buffer format 'i'"),
        ("loss_mask", read_only(np.zeros((2, 8), np.float32)), "loss_mask must be a C-contiguous writable float32"),
        ("position_ids", np.zeros((8, 2), np.int64).T, "position_ids must be a C-contiguous writable int64 buffer"),
        ("position_ids", [0] * 16, "position_ids must be a C-contiguous writable int64 buffer, got <class 'list'>"),
        ("cu_seqlens", np.zeros(17, np.int64), "cu_seqlens must be int32, got buffer format 'l'"),
        ("cu_seqlens", np.zeros(6, np.int32), "cu_seqlens needs 7 elements for 6 documents, got 6"),
        ("cu_seqlens", np.zeros(0, np.int32), "cu_seqlens needs 7 elements for 6 documents, got 0"),
        ("token", np.zeros((2, 8), np.int64), r"layout 'megatron' has the fields \[.*\], got \['token'\]"),
    ],
)
def test_outputs_that_do_not_fit(name, output, message, rows_dtype):
    with pytest.raises(ConfigError, match=message):
        Packer(RULES).pack_into(ROWS.astype(rows_dtype), {name: output})


def test_boundaries_may_have_exactly_the_room_they_need():
    cu_seqlens = np.full(9, 77, np.int32)
    assert Packer(RULES).pack_into(ROWS, {"cu_seqlens": cu_seqlens[:7]}).num_documents == 6
    assert cu_seqlens.tolist() == [0, 3, 5, 6, 8, 12, 16, 77, 77]
    cu_seqlens[:] = 77
    with pytest.raises(ConfigError, match="needs 7 elements"):
        Packer(RULES).pack_into(ROWS, {"cu_seqlens": cu_seqlens[:4]})
    assert cu_seqlens[4:].tolist() == [77] * 5


def test_an_error_speaks_of_fields_by_the_names_of_the_layout():
    with pytest.raises(ConfigError, match="input_ids must have 16 elements, got 3"):
        Packer(RULES, layout="transformers").pack_into(ROWS, {"input_ids": np.zeros(3, np.int64)})


@pytest.mark.parametrize("padding_rows", [[2], [-1], [0, 7]])
def test_padding_rows_outside_the_batch(padding_rows):
    with pytest.raises(ConfigError, match=f"rows of the batch, 0 to 1, got {padding_rows[-1]}"):
        pack(ROWS, RULES, padding_rows=padding_rows)


def test_lengths_that_leave_text_over():
    """Lengths of the tokens instead of the text are one short: refused, not cut one token early."""
    with pytest.raises(
        ConfigError, match=r"row 1 sum to 8 but the row has 9 tokens, and token 7 at position 8 is no pad"
    ):
        pack(ROWS, RULES, document_lengths=[[3, 6], [4, 4]])
    assert pack(ROWS, RULES, document_lengths=[[3, 6], [4, 5]])["cu_seqlens"].tolist() == [0, 3, 8, 12, 16]


@pytest.mark.parametrize("flag", ["reset_position_ids", "reset_attention_mask"])
def test_cutting_at_ends_of_documents_needs_to_know_them(flag):
    rules = PackRules(**{flag: True})
    with pytest.raises(ConfigError, match="need `eod` or document_lengths"):
        pack(ROWS, rules)
    assert pack(ROWS, rules, document_lengths=[[9], [4, 5]])["num_documents"] == 3


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"eod": -1}, r"eod must be a token id in \[0, 2\*\*31\) or None, got -1"),
        ({"eod": 2**31}, "eod must be a token id"),
        ({"eod": "x"}, "eod must be a whole number, got 'x'"),
        ({"pad": 1.5}, "pad must be a whole number, got 1.5"),
        ({"vocab_size": "50k"}, "vocab_size must be a whole number, got '50k'"),
        ({"pad": -2}, r"pad must be a token id in \[-1, 2\*\*31\) or None, got -2"),
        ({"pad": 2**31}, "pad must be a token id"),
        ({"vocab_size": 0}, r"vocab_size must be in \[1, 2\*\*31\], got 0"),
        ({"vocab_size": 2**31 + 1}, "vocab_size must be in"),
        ({"eod": 9, "vocab_size": 9}, "eod 9 is outside the vocabulary"),
        ({"eod_mask_loss": True}, "eod_mask_loss needs `eod`"),
    ],
)
def test_rules_without_a_meaning(wrong, message):
    with pytest.raises(ConfigError, match=message):
        PackRules(**wrong)


def test_the_largest_ids_and_vocabularies_work():
    rules = PackRules(eod=2**31 - 1, pad=2**31 - 2, vocab_size=2**31, eod_mask_loss=True)
    batch = pack(np.array([[1, 2**31 - 1, 2**31 - 2, 2**31 - 3]]), rules)
    assert batch["tokens"].tolist() == [[1, 2**31 - 1, 0]]
    assert batch["loss_mask"].tolist() == [[1, 0, 1]]


@pytest.mark.parametrize(
    "ends", [[8], [16], [8, 8, 16], [3, 2, 8, 16], [0, 8, 16], [-1, 8, 16], [8, 16, 17], [8, 15], []]
)
def test_the_pass_itself_refuses_ends_that_would_lead_it_outside(ends):
    """`document_ends` builds no such list; the C side does not rely on it."""
    with pytest.raises(ValueError, match="document_ends"):
        _native.pack(ROWS, (None,) * 7, np.array(ends, np.int32), None, 8, 9, 0, -1, 0)


@pytest.mark.parametrize(
    "arguments",
    [
        (ROWS, (None,) * 6, None, None, 8, 9, 0, -1, 0),
        (ROWS, [None] * 7, None, None, 8, 9, 0, -1, 0),
        (ROWS, (None,) * 7, None, None, 7, 9, 0, -1, 0),
        (ROWS, (None,) * 7, None, None, 10, 9, 0, -1, 0),
        (ROWS, (None,) * 7, None, None, 0, 9, 0, -1, 0),
        (ROWS, (None,) * 7, None, b"\0", 8, 9, 0, -1, 0),
        (ROWS, (None,) * 7, None, None, 8, 2**31, 0, -1, 0),
        (ROWS, (None,) * 7, None, None, 8, 9, 0, 2**70, 0),
        (ROWS, (None,) * 7, None, None, 8, 9, 0, -1, 8),
        (None, (None,) * 7, None, None, 8, 9, 0, -1, 0),
        (ROWS,),
    ],
)
def test_the_pass_itself_refuses_arguments_out_of_place(arguments):
    with pytest.raises((ValueError, TypeError, OverflowError)):
        _native.pack(*arguments)


RUNS = np.array([[0, 2, 3], [3, 2, 5]])  # 2 of the 3 tokens of a document, then 2 of 2
SOURCE, TARGET = np.arange(5), np.zeros(4, np.int64)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((SOURCE, TARGET[:3], RUNS, 2, 0, 0, 0, 0), "run 1 .* leaves 5 tokens"),
        ((SOURCE, np.zeros(5, np.int64), RUNS, 2, 0, 0, 0, 0), "runs hold 4 tokens, target 5"),
        ((SOURCE[:4], TARGET, RUNS, 2, 0, 0, 0, 0), r"run 1 \(start 3, length 2, end 5\) leaves 4 tokens"),
        ((SOURCE, TARGET, RUNS - [[1, 0, 0]], 2, 0, 0, 0, 0), "run 0 .start -1"),
        ((SOURCE, TARGET, RUNS * [[1, -1, 1]], 2, 0, 0, 0, 0), "run 0"),
        ((SOURCE, TARGET, RUNS * [[1, 1, 0]], 2, 0, 0, 0, 0), "run 0"),
        ((SOURCE, TARGET, RUNS, 3, 0, 0, 0, 0), r"num_runs must be in \[0, 2\], got 3"),
        ((SOURCE, TARGET, RUNS, 2, -1, 0, 0, 0), "shift must be in"),
        ((SOURCE, TARGET, RUNS, 2, 0, 2**40, 0, 0), "fill must be in"),
        ((SOURCE, TARGET.astype(np.int32), RUNS, 2, 0, 0, 0, 0), "source has elements of 8 bytes, target of 4"),
        ((SOURCE.astype(np.int16), TARGET.astype(np.int16), RUNS, 2, 0, -100, 0, 0), "fill is -100"),
        ((SOURCE.astype(np.int16), TARGET.astype(np.int16), RUNS, 2, 0, 0, 1, 0), "elements of 2 bytes"),
        ((SOURCE, TARGET, RUNS.astype(np.int32), 1, 0, 0, 0, 0), "runs are int64"),
        ((SOURCE, read_only(TARGET.copy()), RUNS, 2, 0, 0, 0, 0), "target must be a C-contiguous writable buffer"),
        ((SOURCE[::2], TARGET, RUNS, 2, 0, 0, 0, 0), "source must be a C-contiguous buffer"),
    ],
)
def test_the_cut_itself_refuses_runs_that_would_lead_it_outside(arguments, message):
    source, target, runs, num_runs, shift, *how = arguments
    untouched = np.full(4, 7)
    with pytest.raises(ValueError, match=message):
        _native.cut([(SOURCE, untouched, 0, 0, 0), (source, target, *how)], runs, num_runs, shift)
    assert untouched.tolist() == [7] * 4, "every field is checked before the first is written"


@pytest.mark.parametrize(
    "arguments",
    [
        (((SOURCE, TARGET, 0, 0, 0),), RUNS, 2, 0),
        ([[SOURCE, TARGET, 0, 0, 0]], RUNS, 2, 0),
        ([(SOURCE, TARGET, 0, 0)], RUNS, 2, 0),
        ([], RUNS, 2),
        ([(SOURCE, TARGET, 0, 0, None)], RUNS, 2, 0),
    ],
)
def test_the_cut_itself_refuses_other_arguments(arguments):
    with pytest.raises(TypeError):
        _native.cut(*arguments)


def test_a_cut_past_every_document_holds_the_fill_alone():
    _native.cut([(SOURCE, TARGET, -100, 0, 0)], RUNS, 2, 2**31 - 1)
    assert TARGET.tolist() == [-100] * 4


def test_a_cut_of_no_field_does_nothing():
    assert _native.cut([], RUNS, 2, 0) is None


CU = np.array([0, 3, 5], np.int32)


@pytest.mark.parametrize(
    "arguments",
    [
        (CU, np.empty(2, np.int32), np.empty((4, 3), np.int64), 4, 2, 0),
        (CU, np.empty(3, np.int32), np.empty((3, 3), np.int64), 4, 2, 0),
        (CU, np.empty(3, np.int64), np.empty((4, 3), np.int64), 4, 2, 0),
        (CU, np.empty(3, np.int32), np.empty((4, 3), np.int32), 4, 2, 0),
        (CU[:1], np.empty(3, np.int32), np.empty((4, 3), np.int64), 4, 2, 0),
        (CU, np.empty(3, np.int32), np.empty((4, 3), np.int64), 6, 2, 0),
        (CU, np.empty(3, np.int32), np.empty((4, 3), np.int64), 4, 2, 2),
        (CU, np.empty(3, np.int32), np.empty((4, 3), np.int64), 2**31 - 8, 2, 0),
        (CU, np.empty(3, np.int32), np.empty((4, 3), np.int64), 0, 2, 0),
    ],
)
def test_the_zigzag_itself_refuses_memory_that_is_too_small(arguments):
    with pytest.raises(ValueError, match=r"zigzag_runs|multiple|cp_rank"):
        _native.zigzag_runs(*arguments)
