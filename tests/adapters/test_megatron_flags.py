"""What the flags need, which Megatron is known, and where documents end: without a job."""

from __future__ import annotations

import argparse
import inspect
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

from headrace.adapters.megatron import batch_path, boundaries, flags, mindspeed, places
from headrace.adapters.megatron.batch_path import BatchPath
from headrace.adapters.megatron.fields import Boundaries, Rules, to_ring
from headrace.adapters.megatron.stages import stage_here
from headrace.errors import ConfigError

VECTORS = Path(__file__).parents[1] / "vectors"
STAGES = json.loads((VECTORS / "stages.json").read_text())["megatron"]


def parsed(*words: str, **others):
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--tensor-model-parallel-size", type=int, default=1)
    for name in ("reset-attention-mask", "reset-position-ids", "sft"):
        parser.add_argument(f"--{name}", action="store_true")
    flags.register(parser)
    flags.register(parser)
    return argparse.Namespace(**(vars(parser.parse_args(list(words))) | others))


@pytest.mark.parametrize(
    ("words", "others", "says"),
    [
        (["--enable-share-memory"], {}, "--reset-attention-mask"),
        (["--enable-share-memory", "--reset-position-ids"], {}, "packed (TND/THD) attention"),
        (["--enable-share-memory", "--sft"], {"hybrid_context_parallel": True}, "--hybrid-context-parallel"),
        (["--enable-share-memory", "--sft"], {"yaml_cfg": "a.yaml"}, "--yaml-cfg"),
        (["--headrace-feeder"], {}, "needs --enable-share-memory"),
    ],
)
def test_a_flag_without_what_it_needs(words, others, says):
    with pytest.raises(ConfigError, match=r".*") as caught:
        flags.read_flags(parsed(*words, **others))
    assert says in str(caught.value)


FEEDER = ["--enable-share-memory", "--headrace-feeder", "--reset-attention-mask"]


@pytest.mark.parametrize(
    ("others", "says"),
    [
        ({}, "--data-path names, one prefix or a blend"),
        ({"data_path": ["0.5", "a", "much", "b"]}, "either all corpora of a blend have a weight or none"),
        ({"data_path": ["0.5", "a", "-1", "b"]}, "must be a number above 0, got -1.0"),
        ({"data_path": ["a"], "dataloader_type": "cyclic"}, "--dataloader-type single, got cyclic"),
        ({"data_path": ["a"], "mock_data": True}, "--mock-data"),
        ({"data_path": ["a"], "create_attention_mask_in_dataloader": True}, "--no-create-attention-mask-in-dataloader"),
        ({"data_path": ["a"], "rampup_batch_size": [1, 1, 1]}, "--rampup-batch-size"),
    ],
)
def test_a_feeder_without_what_it_needs(others, says):
    with pytest.raises(ConfigError) as caught:
        flags.read_flags(parsed(*FEEDER, **others))
    assert says in str(caught.value)


@pytest.mark.parametrize(
    "words", [["--reset-attention-mask"], ["--sft"], ["--reset-attention-mask", "--reset-position-ids"]]
)
def test_flags_with_what_they_need(words):
    assert flags.read_flags(parsed("--enable-share-memory", *words)).enabled
    assert not flags.read_flags(parsed(*words)).enabled


def test_the_ranks_wait_as_long_as_megatron_says():
    assert flags.read_flags(parsed(distributed_timeout_minutes=3)).timeout_s == 180.0
    assert flags.read_flags(parsed()).timeout_s == 600.0


# -- which Megatron ----------------------------------------------------------------------------------------------------


def iterator_kind(data_iterator, mtp_on_this_rank=False):
    batch = {"tokens": 0, "labels": 0, "loss_mask": 0, "attention_mask": 0, "position_ids": 0}
    return batch  # noqa: RET504


def pair_kind(data_iterator):
    batch = {"tokens": 0, "labels": 0, "loss_mask": 0, "attention_mask": 0, "position_ids": 0, "document_ids": 0}
    batch = {"tokens": 0, "labels": 0, "loss_mask": 0, "attention_mask": 0, "position_ids": 0}
    return batch, None


def other_parameters(loader, args):
    batch = {"tokens": 0}
    return batch  # noqa: RET504


def other_keys(data_iterator):
    batch = {"tokens": 0, "video": 0}
    return batch  # noqa: RET504


@pytest.fixture
def megatron(monkeypatch):
    def make(function=iterator_kind, version="0.16.1", module="megatron.training.utils"):
        for name in places.MODULES:
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        core = ModuleType("megatron.core")
        core.__version__ = version
        monkeypatch.setitem(sys.modules, "megatron.core", core)
        if function is not None:
            setattr(sys.modules[module], places.NAME, function)

    return make


@pytest.mark.parametrize("version", ["0.11.0", "0.20.0", "1.0.0", "main"])
def test_an_unknown_version_is_refused_by_name(megatron, version):
    megatron(version=version)
    with pytest.raises(ConfigError, match=rf"0\.12 to 0\.19, this is {version}"):
        places.find_place()


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (None, "has no get_batch_on_this_tp_rank"),
        (other_parameters, "get_batch_on_this_tp_rank(loader, args) is no signature known here"),
        (other_keys, "video"),
        (eval("lambda data_iterator: None"), "cannot be read"),
    ],
)
def test_a_changed_batch_path_is_refused_by_name(megatron, function, says):
    megatron(function)
    with pytest.raises(ConfigError) as caught:
        places.find_place()
    assert says in str(caught.value)
    assert "megatron.core 0.16.1" in str(caught.value)


def test_what_a_place_returns_is_read_from_it(megatron):
    megatron()
    place = places.find_place()
    assert (place.takes, place.returns_pair) == ("data_iterator", False)
    assert place.keys == ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")
    megatron(pair_kind)
    place = places.find_place()
    assert place.returns_pair
    assert "document_ids" not in place.keys


def test_every_modules_name_for_it_is_replaced(monkeypatch):
    script = ModuleType("a_script")
    script.get_batch, script.other = iterator_kind, pair_kind
    monkeypatch.setitem(sys.modules, "a_script", script)
    here = sys.modules[__name__]
    monkeypatch.setattr(here, "iterator_kind", iterator_kind)  # put back afterwards
    assert places.replace_everywhere(iterator_kind, pair_kind) == 2
    assert script.get_batch is pair_kind


# -- which keys --------------------------------------------------------------------------------------------------------


def described(case):
    return "-".join(str(value) for key, value in case.items() if key != "keys")


@pytest.mark.parametrize("case", [case for case in STAGES if case["reads_a_batch"]], ids=described)
def test_a_stage_has_the_keys_of_megatrons_table(megatron, monkeypatch, case):
    from tests.adapters import pure_kind

    megatron(pure_kind.get_batch_on_this_tp_rank, "0.18.0", "megatron.core.utils")
    monkeypatch.setitem(sys.modules, "megatron.training", SimpleNamespace(get_args=lambda: SimpleNamespace()))
    path = BatchPath(places.find_place())
    path._shared = SimpleNamespace(where=SimpleNamespace(schedule="1f1b"))
    whole = dict.fromkeys(("tokens", "labels", "loss_mask", "position_ids"), 1)
    whole |= {"attention_mask": 1} if case["attention_mask"] else {}
    whole |= {"cu_seqlens": 1, "max_seqlen": 1} if case["packed"] else {}
    whole |= {"cu_seqlens_padded": 1} if case["packed"] and case["cp"] > 1 else {}
    batch = path._from_batch(
        batch_path.Taken(whole),
        tp_rank=0,
        mtp_on_this_rank=case["mtp"],
        pipeline_model_parallel_size=case["pipeline_size"],
        is_pipeline_first_stage=case["stage"] in ("first", "only"),
        is_pipeline_last_stage=case["stage"] in ("last", "only"),
    )
    assert tuple(batch) == path._place.keys
    assert {key for key, value in batch.items() if value is not None} == set(case["keys"])


def test_stages_are_asked_in_megatrons_order():
    assert stage_here(1, is_first=True, is_last=True, has_prediction=True) == "only"
    assert stage_here(4, is_first=False, is_last=True, has_prediction=True) == "mtp"
    assert stage_here(4, is_first=False, is_last=False, has_prediction=False) == "middle"


# -- where documents end -----------------------------------------------------------------------------------------------

KEYS = frozenset({"tokens", "labels", "loss_mask", "position_ids"})


def ring_of(tokens, *, positions=None, eod=9, **others):
    tokens = torch.tensor(tokens)
    counting = torch.arange(tokens.shape[1]).expand(tokens.shape)
    item = {
        "tokens": tokens,
        "labels": tokens,
        "loss_mask": tokens.float(),
        "position_ids": counting if positions is None else torch.tensor(positions),
    }
    rules = Rules(
        micro_batch_size=tokens.shape[0],
        seq_length=tokens.shape[1],
        has_fixed_shape=True,
        shares_positions=positions is not None,
        eod=eod,
        keys=KEYS,
    )
    return to_ring(item | others, rules, 0)


@pytest.mark.parametrize(
    ("tokens", "positions", "ends"),
    [
        ([[5, 6, 9, 7, 9, 9, 8, 4]], [[0, 1, 2, 0, 1, 0, 0, 1]], [3, 5, 6, 8]),
        ([[5, 9, 6, 9]], [[0, 1, 0, 1]], [2, 4]),
        ([[1, 2, 3, 4]], [[0, 1, 2, 3]], [4]),
        ([[9, 1, 2, 3]], [[0, 0, 1, 2]], [1, 4]),
        ([[9, 9, 9, 9]], [[0, 0, 0, 0]], [1, 2, 3, 4]),
        ([[5, 6, 9, 7], [1, 9, 2, 3]], [[0, 1, 2, 0], [0, 1, 0, 1]], [3, 4, 6, 8]),
    ],
)
def test_documents_end_where_positions_restart_or_after_eod(tokens, positions, ends):
    shared, left = ring_of(tokens, positions=positions), ring_of(tokens)
    for fields in (shared, left):
        assert fields["cu_seqlens"].tolist() == [0, *ends]
        assert fields["cu_seqlens"].dtype == np.int32
        assert fields["actual_seq_len"] == ends
    assert shared["position_ids"].tolist() == positions
    assert "position_ids" not in left, "left to the device"
    assert left["row_shape"] == list(np.shape(tokens))


@pytest.mark.parametrize(
    "others",
    [
        {"cu_seqlens": torch.tensor([[0, 3, 8, 8, 8, 8, 8, 8, 8]], dtype=torch.int32)},
        {"actual_seq_len": torch.tensor([3, 8])},
        {"actual_seq_len": [3, 8]},
    ],
)
def test_what_the_loader_says_wins(others):
    assert ring_of([[9] * 8], **others)["cu_seqlens"].tolist() == [0, 3, 8]


def test_before_the_first_micro_batch_there_are_no_boundaries():
    with pytest.raises(ConfigError, match="no micro batch has been taken"):
        boundaries()


def test_prediction_depths_get_ends_of_their_own(monkeypatch):
    heard = ModuleType("mindspeed.utils")
    said = {}
    heard.set_actual_seq_len = lambda ends: said.update(ends=ends)
    monkeypatch.setitem(sys.modules, "mindspeed.utils", heard)
    ends = Boundaries(actual_seq_len=(3, 5, 6, 8), max_seqlen=3, cu_seqlens=torch.zeros(0))
    args = SimpleNamespace(mtp_num_layers=2, seq_length=8, reset_position_ids=False)
    assert mindspeed.announce(ends, None, args) == [[3, 5, 6, 8], [2, 4, 5, 8], [1, 3, 4, 8]]
    assert said["ends"][0] == [3, 5, 6, 8]
    monkeypatch.delattr(heard, "set_actual_seq_len")
    with pytest.raises(ConfigError, match="has no set_actual_seq_len"):
        mindspeed.announce(ends, None, args)


MOVED = [
    case
    for case in json.loads((VECTORS / "mtp.json").read_text())["cases"]
    if (case.get("mindspeed") or {}).get("position_ids_per_depth") and "faults" not in case["mindspeed"]
]


@pytest.mark.parametrize("case", MOVED, ids=lambda case: case["name"])
@pytest.mark.parametrize("is_post_process", [True, False])
def test_the_stage_that_post_processes_has_positions_of_its_depths(monkeypatch, case, is_post_process):
    """MindSpeed-LLM gives them to set_mtp_position_ids with its shared memory, from which the others read the ends."""
    said = []
    theirs = ModuleType("mindspeed_llm.training.utils")
    theirs.set_actual_seq_len = lambda ends: None
    theirs.set_position_ids = lambda positions: None
    theirs.set_mtp_position_ids = said.append
    schedules = ModuleType("mindspeed.core.pipeline_parallel.dualpipev.dualpipev_schedules")
    schedules.get_post_process_flag = lambda: is_post_process
    for module in (theirs, schedules):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    cu_seqlens = case["cu_seqlens"]
    ends = Boundaries(actual_seq_len=tuple(cu_seqlens[1:]), max_seqlen=1, cu_seqlens=torch.tensor(cu_seqlens))
    positions = torch.tensor(case["depth_0"]["position_ids"]).reshape(-1, case["seq_length"])
    args = SimpleNamespace(mtp_num_layers=case["depths"], seq_length=case["seq_length"], reset_position_ids=True)
    mindspeed.announce(ends, positions, args)
    if not is_post_process:
        assert said == []
        return
    [(per_depth, shared)] = said
    assert [one.tolist() for one in per_depth] == case["mindspeed"]["position_ids_per_depth"]
    for expected in case["mindspeed"]["actual_seq_len_per_depth"] * 2:
        shared.write("what the first rank found")
        assert shared.read() == expected


# -- running a script --------------------------------------------------------------------------------------------------


def run(*words, cwd):
    return subprocess.run(
        [sys.executable, "-m", "headrace.adapters.megatron", *words],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_script_runs_as_python_would_run_it(tmp_path):
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "neighbour.py").write_text("NAME = __name__\n")
    script = tmp_path / "scripts" / "pretrain.py"
    script.write_text("import sys, neighbour\nif __name__ == '__main__':\n    print(sys.argv, neighbour.NAME)\n")
    ended = run("scripts/pretrain.py", "--seed", "3", cwd=tmp_path)
    assert ended.stdout == f"{['scripts/pretrain.py', '--seed', '3']} neighbour\n", ended.stderr


@pytest.mark.parametrize("words", [[], ["--enable-share-memory"], ["nowhere.py"]])
def test_without_a_script_it_says_how(tmp_path, words):
    ended = run(*words, cwd=tmp_path)
    assert ended.returncode == 1
    assert "usage: python -m headrace.adapters.megatron SCRIPT" in ended.stderr


def test_the_replacement_looks_like_the_original(megatron, monkeypatch):
    megatron()
    monkeypatch.setattr(sys.modules[__name__], "iterator_kind", iterator_kind)
    BatchPath(places.find_place()).put_in_place()
    replaced = sys.modules["megatron.training.utils"].get_batch_on_this_tp_rank
    assert list(inspect.signature(replaced).parameters) == ["data_iterator", "mtp_on_this_rank"]
