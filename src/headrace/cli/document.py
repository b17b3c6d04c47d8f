"""The JSON document that every verb writes with `--json FILE`."""

from __future__ import annotations

import os
import secrets
import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from headrace.errors import ConfigError, HeadraceError


def check_writable(path: Path | None) -> None:
    """ConfigError now, not after minutes of work. None: nothing is to be written."""
    if path is None:
        return
    try:
        if not path.parent.is_dir():
            raise ConfigError(f"{path} cannot be written: there is no folder {path.parent}")
        name_bytes, limit = len(os.fsencode(path.name)), os.pathconf(path.parent, "PC_NAME_MAX")
        if 0 < limit < name_bytes:
            raise ConfigError(
                f"{path} cannot be written: a file name has at most {limit} bytes here, this one has {name_bytes}; "
                "shorten it"
            )
        if path.is_dir():
            raise ConfigError(f"{path} is a folder; name a file")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise ConfigError(f"{path} cannot be written: permission denied")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error


def check_folder(folder: Path | None) -> None:
    """ConfigError unless files can be written into `folder`, which may have yet to be made. None: none will be."""
    if folder is None:
        return
    try:
        if folder.exists() and not folder.is_dir():
            raise ConfigError(f"{folder} is no folder; name one")
        existing = next(place for place in (folder, *folder.absolute().parents) if place.exists())
        if not existing.is_dir():
            raise ConfigError(f"{folder} cannot be made: {existing} is no folder")
        if not os.access(existing, os.W_OK | os.X_OK):
            raise ConfigError(f"nothing can be written to {folder}: no permission for {existing}")
    except OSError as error:
        raise ConfigError(f"nothing can be written to {folder}: {error.strerror}") from error


def write_document(path: Path | None, document: dict[str, Any]) -> None:
    """The document, with the date and a line end, indented. HeadraceError if it cannot be written: then a file that
    was there is as it was, and one that was not is still missing."""
    if path is None:
        return
    dated = {"version": document["version"], "date": datetime.now(UTC).isoformat(timespec="seconds")} | document
    content = msgspec.json.format(msgspec.json.encode(dated), indent=1) + b"\n"
    try:
        if _only_in_place(path):
            path.write_bytes(content)
        else:
            _replace(path, content)
    except OSError as error:
        raise HeadraceError(
            f"{path} cannot be written: {error.strerror} (the document has {len(content):,} bytes)"
        ) from error


def _only_in_place(path: Path) -> bool:
    """Pipes, devices and links (/dev/stdout is all of them) stay what they are; so do folders that take no new file."""
    return path.is_symlink() or (path.exists() and not path.is_file()) or not os.access(path.parent, os.W_OK)


def _replace(path: Path, content: bytes) -> None:
    """All of it or nothing: the content gets its name when every byte is written."""
    # Not derived from the name, which may be as long as a name can be.
    draft = path.with_name(f".headrace-{secrets.token_hex(8)}")
    try:
        draft.write_bytes(content)
        if path.exists():
            shutil.copymode(path, draft)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
