"""The measuring half stands alone: it imports nothing of the feed, and its document runs."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import headrace

SOURCE = Path(headrace.__file__).parent
DOCUMENT = Path(__file__).parents[2] / "docs" / "measure.md"
OURS = [*(SOURCE / "measure").glob("*.py"), *(SOURCE / "torch" / "measure").glob("*.py")]
FEED = ("feed", "shm", "packing", "order", "store", "position", "topology", "spec", "torch.feed")


@pytest.mark.parametrize("path", OURS, ids=lambda path: f"{path.parent.parent.name}/{path.parent.name}/{path.stem}")
def test_nothing_of_the_feed_is_imported(path):
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    assert not [name for name in names if name.startswith(tuple(f"headrace.{part}" for part in FEED))]


def test_nobody_meets_a_barrier_and_only_closing_and_probing_wait_for_a_device():
    found = set()
    for path in OURS:
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef):
                called = {
                    node.func.attr
                    for node in ast.walk(function)
                    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
                }
                found |= {(path.stem, function.name, name) for name in called & {"barrier", "synchronize"}}
    assert found == {
        ("device_timeline", "read", "synchronize"),  # of the last mark, when a measurement is closed
        ("devices", "synchronize", "synchronize"),
        ("probe", "train", "synchronize"),  # the batch size search
    }  # fmt: skip


def test_the_lines_of_the_document_run(tmp_path):
    pytest.importorskip("torch")
    blocks = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), flags=re.DOTALL)
    # Section 4 begins a run and counts one micro batch: here is the loop it belongs to.
    steps = "for _ in range(5):\n    run.count(samples=1, tokens=8192)\n    optimizer.step()\nprint(run.close())\n"
    (tmp_path / "train.py").write_text("\n".join([*blocks, steps]))
    done = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "headrace: 17 steps (3 to 19)" in done.stdout
    without_shape, with_shape = re.findall(r"MFU +(.*)", done.stdout)
    assert "headrace.torch.measure.start(shape=...)" in without_shape
    assert re.fullmatch(r"[\d.]+%", with_shape)
    assert len(list(tmp_path.glob("records/*/rank00000.jsonl"))) == 1
