"""The one exchange at the start: who is where, and do all ranks want the same feed?

Every member sees every member's card, so all of them come to the same verdict, and a rank that fails on its own tells
the others instead of leaving them waiting.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from headrace.errors import ConfigError, HeadraceError
from headrace.feed.rendezvous import Rendezvous
from headrace.shm.handover import Invitation
from headrace.shm.peers import Peer, start_time


class Card(msgspec.Struct, frozen=True, kw_only=True):
    """What a member tells the others. `terms` must be the same on all."""

    rank: int
    host: str
    pid: int
    started: int
    pid_namespace: str
    """Where `pid` means something."""
    invitation: Invitation | None = None
    has_iterator: bool = False
    device_node: int | None = None
    terms: dict[str, str] = {}
    error: str = ""


def this_host() -> str:
    """Members with the same answer share memory and can reach each other's abstract sockets.

    HEADRACE_HOST overrides it, for containers that share neither and for tests of several hosts on one.
    """
    if override := os.environ.get("HEADRACE_HOST"):
        return override
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        # Abstract sockets belong to a network namespace.
        return f"{boot_id}/{os.readlink('/proc/self/ns/net')}"
    except OSError as error:
        raise ConfigError(f"cannot tell which host this is ({error}); set HEADRACE_HOST to a name per host") from error


def make_card(
    rank: int,
    *,
    invitation: Invitation | None = None,
    has_iterator: bool = False,
    device_node: int | None = None,
    terms: dict[str, str] | None = None,
    error: str = "",
) -> Card:
    pid = os.getpid()
    return Card(
        rank=rank,
        host=this_host(),
        pid=pid,
        started=start_time(pid),
        pid_namespace=_pid_namespace(),
        invitation=invitation,
        has_iterator=has_iterator,
        device_node=device_node,
        terms=terms or {},
        error=error,
    )


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return "unknown"


@contextlib.contextmanager
def telling_others(rank: int, rendezvous: Rendezvous, *, timeout_s: float) -> Iterator[None]:
    """What the body raises on this rank raises on the others too, instead of leaving them waiting for its card.

    For what comes before `exchange`: this is the exchange then. Blocks for the others, so that the rank that fails does
    not take the store of the group with it before they have read why.
    """
    try:
        yield
    except Exception as error:
        text = str(error) if isinstance(error, HeadraceError) else f"{type(error).__name__}: {error}"
        with contextlib.suppress(Exception):  # whatever keeps us from telling them, what happened here matters more
            exchange(make_card(rank, error=text), rendezvous, timeout_s=timeout_s)
        raise


def exchange(card: Card, rendezvous: Rendezvous, *, timeout_s: float) -> list[Card]:
    """Everybody's card in group order. ConfigError, the same on every rank, unless all agree."""
    raw = rendezvous.exchange(msgspec.json.encode(card), timeout_s=timeout_s)
    cards = [msgspec.json.decode(one, type=Card) for one in raw]
    _check_errors(cards, card.rank)
    _check_terms(cards)
    return cards


def _check_errors(cards: Sequence[Card], rank: int) -> None:
    for card in cards:
        if card.error:
            prefix = "" if card.rank == rank else f"rank {card.rank}: "
            raise ConfigError(f"{prefix}{card.error}")


def _check_terms(cards: Sequence[Card]) -> None:
    first = cards[0]
    for card in cards[1:]:
        for name in sorted(first.terms.keys() | card.terms.keys()):
            mine, theirs = first.terms.get(name, "nothing"), card.terms.get(name, "nothing")
            if mine != theirs:
                raise ConfigError(
                    f"the ranks of a feed disagree on {name}: "
                    f"rank {first.rank} says {mine}, rank {card.rank} says {theirs}"
                )


def check_iterators(cards: Sequence[Card], writer_rank: int) -> None:
    """ConfigError unless exactly the writing rank has an iterator, and all ranks can reach its memory."""
    writer = cards[writer_rank]
    if not writer.has_iterator:
        raise ConfigError(f"rank {writer.rank} is to write (writer_rank={writer_rank}) but was given no iterator")
    surplus = [card.rank for card in cards if card.has_iterator and card is not writer]
    if surplus:
        raise ConfigError(
            f"only rank {writer.rank} writes, but ranks {surplus} were given an iterator too: pass None there"
        )
    elsewhere = [card.rank for card in cards if card.host != writer.host]
    if elsewhere:
        raise ConfigError(
            f"rank {writer.rank} cannot share memory with ranks {elsewhere} on other hosts; give the feed a source, "
            "which is read once on each host"
        )


def roster(cards: Sequence[Card], host: str) -> dict[int, Peer]:
    """The members on `host` by reader index. The pid of another namespace means nothing here and is left out as 0."""
    here = [card for card in cards if card.host == host]
    namespace = _pid_namespace()
    return {
        index: Peer(
            who=f"rank {card.rank}",
            rank=card.rank,
            pid=card.pid if card.pid_namespace == namespace else 0,
            started=card.started,
            pidfd=None,
        )
        for index, card in enumerate(here)
    }
