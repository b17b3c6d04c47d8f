"""Numbers in a sentence: one thing is not called by its plural."""

from __future__ import annotations


def counted(number: int, thing: str) -> str:
    """`1 step`, `2 steps`, `1,000 batches`: `thing` is the singular."""
    if number != 1:
        thing += "es" if thing.endswith(("ch", "x", "s")) else "s"
    return f"{number:,} {thing}"
