"""Where the reference traces lie: real profiles with known answers, beside the checkout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("headrace", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("headrace")

REFERENCE = Path(__file__).resolve().parents[3] / "shared" / "traces"


@pytest.fixture(scope="session")
def reference_traces() -> Path:
    if not (REFERENCE / "expected.json").is_file():
        pytest.skip(f"the reference traces are not there ({REFERENCE})")
    return REFERENCE


@pytest.fixture(scope="session")
def expected(reference_traces):
    return json.loads((reference_traces / "expected.json").read_text())
