"""Everything headrace raises: whose fault is it, and can waiting help?

HeadraceError
|- ConfigError(ValueError)      the caller asked for something impossible; waiting never helps
|- FormatError(ValueError)      bytes on disk, in a checkpoint or in a trace are not what they must be
|- SourceError                  the user's data source raised; carries its traceback
|- FeedClosed                   this process closed it; nothing is wrong
|- PeerGone                     another process died: rank, pid, version
|- FeedTimeout(TimeoutError)    nobody moved for timeout_s; says who waits for whom
`- BatchTooLarge                a batch can never fit: need, have, knob

Messages hold what was needed, what was there and which knob to turn. Numbers are attributes as well, so that code
need not parse the text.
"""

from __future__ import annotations


class HeadraceError(Exception):
    """Root of the tree: `except HeadraceError` catches everything this package raises on purpose."""


class ConfigError(HeadraceError, ValueError):
    """The caller asked for something impossible. Fix the call; waiting does not help."""


class FormatError(HeadraceError, ValueError):
    """Bytes on disk, in a checkpoint or in a trace are not what they must be."""


class SourceError(HeadraceError):
    """The data source raised. Every rank gets this error; `source_traceback` is the text of the original one."""

    def __init__(self, message: str, *, source_traceback: str = "") -> None:
        self.source_traceback = source_traceback
        super().__init__(f"{message}\n\n{source_traceback}".rstrip())


class FeedClosed(HeadraceError):
    """This process closed the feed. Nothing is wrong; a closed feed cannot be read."""


class PeerGone(HeadraceError):
    """Another process of the group died (or left) while it was needed.

    `rank` is its rank in the group (None: the feeder process), `pid` its process id as seen from this host, `version`
    the number of the batch that was waited for.
    """

    def __init__(self, who: str, *, rank: int | None, pid: int, version: int, reason: str = "died") -> None:
        self.who, self.rank, self.pid, self.version, self.reason = who, rank, pid, version, reason
        super().__init__(
            f"{who} (pid {pid}) {reason} while batch {version} was needed; "
            "restart the job from its last checkpoint (the feed's state_dict tells where)"
        )


class FeedTimeout(HeadraceError, TimeoutError):
    """Nobody moved for `timeout_s`. `waiting_for` says who waits for whom, `knob` which setting ended the wait.

    All processes are alive, unless `all_alive` is False: then nobody could tell.
    """

    def __init__(self, waiting_for: str, *, timeout_s: float, knob: str = "timeout_s", all_alive: bool = True) -> None:
        self.waiting_for, self.timeout_s, self.knob, self.all_alive = waiting_for, timeout_s, knob, all_alive
        advice = (
            f"all processes are alive; raise `{knob}` if a step may really take that long"
            if all_alive
            else f"it may be late or may have ended, see its output; raise `{knob}` if it may really be that late"
        )
        super().__init__(f"waited {timeout_s:g} s for {waiting_for}; {advice}")


class BatchTooLarge(HeadraceError):
    """A batch can never fit into a slot. `need` and `have` are bytes, `knob` the setting that limits."""

    def __init__(self, *, need: int, have: int, knob: str = "max_slot_bytes") -> None:
        self.need, self.have, self.knob = need, have, knob
        super().__init__(
            f"a batch needs {need:,} bytes but a slot may hold at most {have:,}; "
            f"raise `{knob}` to at least {need:,} or make the micro batch smaller"
        )
