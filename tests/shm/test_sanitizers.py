"""native/stress/stress.c: the C core with threads over one buffer, under the sanitizers and without."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

NATIVE = Path(__file__).parents[2] / "native"
BUILD = (
    "-std=c11",
    "-D_GNU_SOURCE",
    "-g",
    "-Wall",
    "-Wextra",
    "-Werror",
    f"-I{NATIVE}",
    str(NATIVE / "stress/stress.c"),
)
SANITIZERS = {
    "thread": ("-O1", "-fsanitize=thread"),
    "address and undefined": ("-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
    "none": ("-O3",),
}
# versions, readers, slots, hold; the default first version is just below the end of the 32-bit futex word
SIZES = ((20_000, 3, 3, 1), (10_000, 2, 4, 3), (20_000, 1, 2, 1))


def need(tool: str) -> None:
    if shutil.which(tool) is None:
        if os.environ.get("CI") == "true" and tool == "gcc":
            pytest.fail("CI needs gcc")
        pytest.skip(f"{tool} is not installed")


def build(folder: Path, *options: str, compiler: str = "gcc") -> Path:
    need(compiler)
    target = folder / "stress"
    done = subprocess.run(
        [compiler, *options, *BUILD, "-o", str(target), "-lpthread"], capture_output=True, text=True, check=False
    )
    if "cannot find" in done.stderr and "san" in done.stderr:
        pytest.skip(f"this compiler has no sanitizer library: {done.stderr.splitlines()[-2]}")
    assert done.returncode == 0, done.stderr
    return target


def run(*command: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False, timeout=900)


@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_the_core_is_clean(tmp_path: Path, sanitizer: str) -> None:
    stress = build(tmp_path, *SANITIZERS[sanitizer])
    for size in SIZES:
        done = run(stress, *size)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith("good: ")


@pytest.mark.parametrize("mistake", [1, 2, 3, 4])
def test_a_mistake_is_found(tmp_path: Path, mistake: int) -> None:
    stress = build(tmp_path, *SANITIZERS["thread"], f"-DMISTAKE={mistake}")
    done = run(stress, 5_000)
    assert done.returncode != 0
    assert "data race" in done.stderr


@pytest.mark.soak
@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_the_core_is_clean_for_long(tmp_path: Path, sanitizer: str) -> None:
    """10^8 versions for each, as far as the share of SOAK_S goes."""
    stress = build(tmp_path, *SANITIZERS[sanitizer])
    share_s = float(os.environ.get("SOAK_S", "1800")) / 10
    versions = min(100_000_000, int(share_s * 20_000))
    done = run(stress, versions, 3, 4, 2)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.soak
def test_the_core_runs_on_aarch64(tmp_path: Path) -> None:
    """Under qemu-user, which shows that it is built and runs; weak ordering is for SPIN and the thread sanitizer."""
    need("qemu-aarch64-static")
    stress = build(tmp_path, "-O2", "-static", compiler="aarch64-linux-gnu-gcc")
    for size in SIZES:
        done = run("qemu-aarch64-static", stress, *size)
        assert (done.returncode, done.stderr) == (0, "")
