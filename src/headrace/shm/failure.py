"""How an error travels to every rank: as bytes in a slot or in a handshake, and back into the tree of errors.py."""

from __future__ import annotations

import traceback

import msgspec

from headrace.errors import BatchTooLarge, ConfigError, FeedTimeout, FormatError, HeadraceError, PeerGone, SourceError

# A slot holds at least this much metadata, and a handshake message must pass a socket buffer.
MAX_FAILURE_BYTES = 32 * 1024
_MAX_TEXT = 12_000


class _Failure(msgspec.Struct):
    kind: str
    message: str
    traceback: str = ""
    need: int = 0
    have: int = 0
    knob: str = ""
    timeout_s: float = 0.0
    rank: int | None = None
    pid: int = 0
    version: int = 0


def encode(error: BaseException) -> bytes:
    """The error as at most MAX_FAILURE_BYTES. The user's own exception keeps its traceback, ours keep their numbers."""
    if isinstance(error, BatchTooLarge):
        failure = _Failure("BatchTooLarge", "", need=error.need, have=error.have, knob=error.knob)
    elif isinstance(error, FeedTimeout):
        failure = _Failure("FeedTimeout", error.waiting_for, timeout_s=error.timeout_s)
    elif isinstance(error, PeerGone):
        failure = _Failure("PeerGone", error.who, rank=error.rank, pid=error.pid, version=error.version)
    elif isinstance(error, ConfigError | FormatError):
        failure = _Failure(type(error).__name__, _shortened(str(error)))
    elif isinstance(error, SourceError):
        message = str(error).removesuffix(error.source_traceback).rstrip()
        failure = _Failure("SourceError", _shortened(message), traceback=_shortened(error.source_traceback))
    else:
        text = "".join(traceback.format_exception(error))
        message = f"the data source raised {type(error).__name__}: {error}"
        failure = _Failure("SourceError", _shortened(message), traceback=_shortened(text))
    return msgspec.json.encode(failure)


def decode(raw: bytes) -> HeadraceError:
    """The error that `encode` was given, as the class of the tree that a caller can catch."""
    failure = msgspec.json.decode(raw, type=_Failure)
    match failure.kind:
        case "BatchTooLarge":
            return BatchTooLarge(need=failure.need, have=failure.have, knob=failure.knob)
        case "FeedTimeout":
            return FeedTimeout(failure.message, timeout_s=failure.timeout_s)
        case "PeerGone":
            return PeerGone(failure.message, rank=failure.rank, pid=failure.pid, version=failure.version)
        case "ConfigError":
            return ConfigError(failure.message)
        case "FormatError":
            return FormatError(failure.message)
    return SourceError(failure.message, source_traceback=failure.traceback)


def _shortened(text: str) -> str:
    """The end of a traceback says what happened, its beginning where: keep both."""
    if len(text) <= _MAX_TEXT:
        return text
    half = _MAX_TEXT // 2
    return f"{text[:half]}\n... {len(text) - 2 * half:,} characters left out ...\n{text[-half:]}"
