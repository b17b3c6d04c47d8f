"""The lines in the README are run as they stand there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from headrace.store import StoreWriter

README = Path(__file__).parents[2] / "README.md"


def python_blocks(document: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", document.read_text(), flags=re.DOTALL)


@pytest.fixture
def corpus_folder(tmp_path: Path) -> Path:
    random = np.random.default_rng(1)
    with StoreWriter(str(tmp_path / "corpus"), np.uint16) as writer:
        for length in random.integers(20, 900, size=40):
            writer.add_document(random.integers(2, 500, size=length).astype(np.uint16))
    return tmp_path


def test_the_fifteen_lines_run_on_two_ranks(corpus_folder: Path) -> None:
    (block,) = python_blocks(README)
    lines = [line for line in block.splitlines() if line.strip()]
    assert len(lines) <= 15
    script = corpus_folder / "train.py"
    # Files, because the words of two ranks mix in the stdout they share.
    tells = "open(f'state-{dist.get_rank()}', 'w').write(str(checkpoint['consumed_samples']))"
    script.write_text(f"{block}\n{tells}\ndist.destroy_process_group()\n")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(command, cwd=corpus_folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert [(corpus_folder / f"state-{rank}").read_text() for rank in range(2)] == ["4", "4"]
