"""native/model/ring.pml under SPIN: no interleaving and no death breaks the protocol, and each mistake is found."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

MODEL = Path(__file__).parents[2] / "native" / "model" / "ring.pml"

MISTAKES = {
    1: "publish before write",
    2: "release before the reading has ended",
    3: "no second look before sleep",
    4: "a watermark out of reach",
    5: "a slot taken one version too early",
    6: "released held in a store buffer",
    7: "wanted held in a store buffer",
    8: "the two last readers miss each other",
    9: "a dead writer is not drained",
    10: "nobody looks whether readers live",
    11: "a futex without its comparison",
}


@pytest.fixture(autouse=True)
def spin() -> None:
    if shutil.which("spin") is None or shutil.which("gcc") is None:
        if os.environ.get("CI") == "true":
            pytest.fail("CI needs spin and gcc (apt-get install spin gcc)")
        pytest.skip("spin is not installed (apt-get install spin)")


def search(folder: Path, *options: str, optimise: str = "-O2") -> tuple[int, int]:
    """Errors found, and states visited, over every interleaving."""
    subprocess.run(["spin", "-a", *options, str(MODEL)], cwd=folder, check=True, capture_output=True)
    build = ["gcc", optimise, "-w", "-DSAFETY", "-DCOLLAPSE", "-DMEMLIM=6000", "-o", "pan", "pan.c"]
    subprocess.run(build, cwd=folder, check=True)
    output = subprocess.run(["./pan", "-m100000"], cwd=folder, check=True, capture_output=True, text=True).stdout
    assert "max search depth too small" not in output
    assert "out of memory" not in output
    errors, states = re.search(r"errors: (\d+)", output), re.search(r"(\d+) states, stored", output)
    assert errors is not None
    assert states is not None
    return int(errors[1]), int(states[1])


def show(capsys: pytest.CaptureFixture[str], text: str) -> None:
    with capsys.disabled():
        print(f"\n  {text}")


def test_the_protocol_holds_whoever_dies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    errors, states = search(tmp_path, "-DVERSIONS=3")
    show(capsys, f"2 readers, 2 slots, 3 versions, one death: {states:,} states")
    assert errors == 0


@pytest.mark.parametrize("size", [
    ("-DREADERS=1", "-DSLOTS=3", "-DHOLD=2", "-DVERSIONS=6", "-DDEATHS=2"),
    ("-DREADERS=1", "-DSLOTS=4", "-DHOLD=1", "-DVERSIONS=7", "-DDEATHS=2"),
])  # fmt: skip
def test_it_holds_with_more_slots_and_held_batches(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], size: tuple[str, ...]
) -> None:
    errors, states = search(tmp_path, *size)
    show(capsys, f"{' '.join(size)}: {states:,} states")
    assert errors == 0


@pytest.mark.parametrize("mistake", MISTAKES, ids=MISTAKES.get)
def test_a_mistake_is_found(tmp_path: Path, mistake: int) -> None:
    readers = ("-DREADERS=1",) if mistake == 10 else ()
    assert search(tmp_path, f"-DMUTANT={mistake}", *readers, optimise="-O0")[0] > 0


@pytest.mark.soak
@pytest.mark.parametrize("size", [("-DVERSIONS=4",), ("-DVERSIONS=3", "-DDEATHS=2")])
def test_it_holds_for_longer_and_with_more_deaths(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], size: tuple[str, ...]
) -> None:
    errors, states = search(tmp_path, *size)
    show(capsys, f"2 readers, 2 slots, {' '.join(size)}: {states:,} states")
    assert errors == 0
