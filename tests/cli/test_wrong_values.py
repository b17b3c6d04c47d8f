"""Every option of every verb, with values that mean nothing: one sentence and exit code 2, before any work begins.

The options are read from the verbs themselves: one that comes new is tried here without being named.
"""

from __future__ import annotations

import inspect as signatures
import sys
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Any

import numpy as np
import pytest

from headrace.cli import bench, main
from headrace.cli.app import app
from headrace.cli.values import refuse_arguments
from headrace.errors import ConfigError
from headrace.store import StoreWriter
from tests.traces.kineto_files import gloo_job

LONG = "x" * 300
BAD = {
    float: ("nan", "inf", "-inf", "-1", "0"),
    int: ("-1", "1" + 30 * "0", "0"),
    str: ("", "a\0b", LONG),
    Path: ("", "a\0b", LONG),
}
ZERO_MEANS_SOMETHING = {
    "cp_rank", "drawn_samples", "elastic_documents", "eod", "large_bytes", "mtp_depth", "sample",
    "seed", "slow_rank", "smallest_effect",
}  # fmt: skip
OUTPUTS = {"csv", "html", "json", "perfetto", "trace"}
NAMES = ("", "a\0b", LONG, f"{LONG}/below")
WORK = {
    "analyze": "headrace.cli.analyze.analyze_traces",
    "compare": "headrace.cli.compare.compare_runs",
    "demo": "headrace.demo.corpus.cached_corpus",
    "tune": "headrace.cli.tune.batch_size_table",
    "prepare": "headrace.store.prepare.prepare",
    "doctor": "headrace.cli.doctor.check_all",
}
"""What must not be reached, by verb; of a bench its `run`."""
BESIDE = {("demo", "slow_rank"): ("--trace", "traces")}
"""What an option means something beside."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    verb: str
    name: str
    flag: str
    kind: type

    def __str__(self) -> str:
        return f"{self.verb} {self.flag}"


def verbs() -> Iterator[tuple[str, Callable[..., Any]]]:
    for prefix, group in (("", app), ("bench ", bench.app)):
        for command in group.registered_commands:
            assert command.callback is not None
            yield prefix + (command.name or command.callback.__name__.replace("_", "-")), command.callback


def options() -> Iterator[Option]:
    for verb, callback in verbs():
        hints = typing.get_type_hints(callback, include_extras=True)
        for name in signatures.signature(callback).parameters:
            kind, info = typing.get_args(hints[name])[:2]
            if type(info).__name__ != "OptionInfo":
                continue
            if isinstance(kind, UnionType):
                kind = next(one for one in typing.get_args(kind) if one is not type(None))
            kind = str if kind == list[str] else kind
            if kind is not bool:
                flags = [flag for flag in info.param_decls or () if flag.startswith("--")]
                yield Option(verb=verb, name=name, flag=(flags or ["--" + name.replace("_", "-")])[0], kind=kind)


@pytest.fixture(scope="module")
def arguments(tmp_path_factory) -> dict[str, list[str]]:
    """What each verb needs, good as it is."""
    folder = tmp_path_factory.mktemp("good")
    with StoreWriter(folder / "store", "uint16") as writer:
        writer.add_document(np.arange(1, 65, dtype=np.uint16))
    (folder / "text.txt").write_text("words")
    store = str(folder / "store")
    return {
        "analyze": [str(gloo_job(folder / "job", {0: 0, 1: 0}))],
        "compare": [str(folder), str(folder)],
        "inspect": [store, "--sample", "0", "--seq-length", "8"],
        "prepare": [str(folder / "text.txt"), "-o", str(folder / "out"), "-t", str(folder)],
    }


OPTIONS = list(options())
BENCHES = {verb for verb, _ in verbs() if verb.startswith("bench ")}
CASES = [
    (option, value)
    for option in OPTIONS
    for value in BAD[option.kind]
    if value != "0" or option.name not in ZERO_MEANS_SOMETHING
]


@pytest.fixture
def refused(
    arguments: dict[str, list[str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> Callable[..., str]:
    """Run a verb with more words: it must end with 2 and the one sentence that is returned, its work not begun."""

    def begun(*_: Any, **__: Any) -> None:
        raise AssertionError("the work began")

    def run(verb: str, *words: str) -> str:
        work = WORK.get(verb)
        if verb in BENCHES:
            work = f"headrace.bench.{verb.removeprefix('bench ').replace('-', '_')}.run"
        if work is not None:
            monkeypatch.setattr(work, begun)
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["headrace", *verb.split(), *arguments.get(verb, ()), *words])
        with pytest.raises(SystemExit) as left:
            main()
        error = capsys.readouterr().err
        assert left.value.code == 2, error
        assert len(error.splitlines()) == 1, error
        return error

    return run


@pytest.mark.parametrize(("option", "value"), CASES, ids=lambda part: repr(str(part)[:24]))
def test_a_value_without_a_meaning_is_one_sentence(
    option: Option, value: str, refused: Callable[..., str], tmp_path: Path
) -> None:
    error = refused(option.verb, *BESIDE.get((option.verb, option.name), ()), option.flag, value)
    assert option.flag.strip("-") in error.replace("_", "-")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("option", [option for option in OPTIONS if option.name in OUTPUTS], ids=str)
def test_a_place_that_takes_no_output_is_refused_before_the_work(
    option: Option, refused: Callable[..., str], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    assert "file" in refused(option.verb, option.flag, "file/out")
    assert (tmp_path / "file").read_text() == ""


@pytest.mark.parametrize("name", NAMES, ids=lambda name: repr(name[:6]))
@pytest.mark.parametrize("verb", ["analyze", "compare", "inspect", "prepare"])
def test_what_cannot_be_a_name_is_refused(verb: str, name: str, refused: Callable[..., str]) -> None:
    error = refused(verb, name)
    assert any(said in error for said in ("is empty", "nul byte", "too long for a file name"))


def test_what_does_not_go_together_is_said_before_traces_are_read(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "go with a training log, and there is none" in refused("analyze", "--tokens-per-step", "5")
    monkeypatch.setattr("headrace.report.html.find_spec", lambda name: None if name == "altair" else object())
    assert "pip install 'headrace[report]'" in refused("analyze", "--html", "page.html")


def test_every_output_of_every_verb_is_among_those_tried() -> None:
    assert {option.name for option in OPTIONS if option.kind is Path} == OUTPUTS | {"hta_python", "text"}
    assert len({option.verb for option in OPTIONS}) == len(list(verbs()))


def test_long_lists_of_numbers_are_no_names() -> None:
    refuse_arguments(["analyze", "folder", "--groups", ";".join(f"{rank},{rank + 1}" for rank in range(0, 999, 2))])
    with pytest.raises(ConfigError, match="--tp names a number of 30 digits"):
        refuse_arguments(["--tp=2," + 30 * "9"])
    refuse_arguments(["folder/" + 30 * "9", 30 * "9", "--json", "out.json"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["bench pack", "--rounds", "many"], "Invalid value for '--rounds'"),
        (["bench pack", "--round", "3"], "No such option"),
        (["bench nothing"], "No such command 'nothing'"),
        (["demo", "--steps"], "requires an argument"),
    ],
)
def test_what_the_parser_refuses_is_one_sentence_too(words: list[str], said: str, refused: Callable[..., str]) -> None:
    error = refused(*words)
    assert said in error
    assert "--help" in error
