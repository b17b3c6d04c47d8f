"""The code on docs/data.md runs, and holds."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "data.md"


def test_the_lines_of_the_page_run_as_one_program():
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    assert len(blocks) >= 7
    exec(compile("\n".join(blocks), str(PAGE), "exec"), {})


def test_every_heading_that_is_linked_is_there():
    text = PAGE.read_text()
    headings = {
        re.sub(r"[^a-z0-9 -]", "", line.lower()).strip().replace(" ", "-")
        for line in re.findall(r"^#+ (.*)$", text, re.M)
    }
    assert set(re.findall(r"\]\(#([^)]+)\)", text)) <= headings
