"""The JSON document that every verb writes with `--json FILE`."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from headrace.errors import ConfigError


def check_writable(path: Path | None) -> None:
    """ConfigError now, not after minutes of work. None: nothing is to be written."""
    if path is None:
        return
    if not path.parent.is_dir():
        raise ConfigError(f"{path} cannot be written: there is no folder {path.parent}")
    if path.is_dir():
        raise ConfigError(f"{path} is a folder; name a file")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"{path} cannot be written: permission denied")


def write_document(path: Path | None, document: dict[str, Any]) -> None:
    """The document, with the date and a line end, indented. ConfigError if it cannot be written."""
    if path is None:
        return
    dated = {"version": document["version"], "date": datetime.now(UTC).isoformat(timespec="seconds")} | document
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(dated), indent=1) + b"\n")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error
