"""How an error travels to every rank: as bytes in a slot or in a handshake, and back into the tree of errors.py."""

from __future__ import annotations

import traceback

import msgspec

from headrace.errors import BatchTooLarge, ConfigError, FeedTimeout, FormatError, HeadraceError, PeerGone, SourceError

# A slot holds at least this much metadata, and a handshake message must pass a socket buffer.
MAX_FAILURE_BYTES = 32 * 1024
# What two texts may have each: most need little more room as JSON, and the last fits whatever JSON makes of it (a
# control character becomes six bytes).
_TEXT_BUDGETS_BYTES = (15_000, 8_000, 2_500)


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
    for budget in _TEXT_BUDGETS_BYTES:
        raw = msgspec.json.encode(_described(error, budget))
        if len(raw) <= MAX_FAILURE_BYTES:
            break
    return raw


def _described(error: BaseException, budget: int) -> _Failure:
    if isinstance(error, BatchTooLarge):
        return _Failure("BatchTooLarge", "", need=error.need, have=error.have, knob=error.knob)
    if isinstance(error, FeedTimeout):
        return _Failure("FeedTimeout", _shortened(error.waiting_for, budget), timeout_s=error.timeout_s)
    if isinstance(error, PeerGone):
        return _Failure("PeerGone", error.who, error.reason, rank=error.rank, pid=error.pid, version=error.version)
    if isinstance(error, ConfigError | FormatError):
        return _Failure(type(error).__name__, _shortened(str(error), budget))
    if isinstance(error, SourceError):
        # Its own text ends without the newline that a traceback ends with.
        message, text = str(error).removesuffix(error.source_traceback.rstrip()).rstrip(), error.source_traceback
    else:
        # format_exception_only survives an exception whose own __str__ raises.
        message = f"the data source raised {traceback.format_exception_only(error)[-1].strip()}"
        text = "".join(traceback.format_exception(error))
    return _Failure("SourceError", _shortened(message, budget), traceback=_shortened(text, budget))


def decode(raw: bytes) -> HeadraceError:
    """The error that `encode` was given, as the class of the tree that a caller can catch."""
    failure = msgspec.json.decode(raw, type=_Failure)
    match failure.kind:
        case "BatchTooLarge":
            return BatchTooLarge(need=failure.need, have=failure.have, knob=failure.knob)
        case "FeedTimeout":
            return FeedTimeout(failure.message, timeout_s=failure.timeout_s)
        case "PeerGone":
            return PeerGone(
                failure.message,
                rank=failure.rank,
                pid=failure.pid,
                version=failure.version,
                reason=failure.traceback,
            )
        case "ConfigError":
            return ConfigError(failure.message)
        case "FormatError":
            return FormatError(failure.message)
    return SourceError(failure.message, source_traceback=failure.traceback)


def _shortened(text: str, budget: int) -> str:
    """The end of a traceback says what happened, its beginning where: keep both."""
    # A file name that is not UTF-8 reaches Python as lone surrogates, which no encoder takes.
    raw = text.encode("utf-8", "backslashreplace")
    if len(raw) <= budget:
        return raw.decode()
    half = budget // 2 - 30
    head, tail = raw[:half].decode("utf-8", "ignore"), raw[-half:].decode("utf-8", "ignore")
    return f"{head}\n... {len(raw) - 2 * half:,} bytes left out ...\n{tail}"
