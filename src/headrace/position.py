"""Where a run is in its data, and what a checkpoint holds."""

from __future__ import annotations
