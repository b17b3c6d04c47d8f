"""Becoming a member of a feed: agree with the other ranks, start the feeder if it is this rank's to start, attach.

Two writers, one contract: a feeder process that reads a source, or the rank that already has an iterator.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from headrace.errors import ConfigError, HeadraceError, PeerGone
from headrace.feed import agreement, shard
from headrace.feed.agreement import Card
from headrace.feed.batch import Array
from headrace.feed.digests import HostDigests
from headrace.feed.feeder import Feeder, pickled
from headrace.feed.hosting import Host, OwnReader, bring_up
from headrace.feed.items import ItemProduction
from headrace.feed.production import Production
from headrace.feed.rendezvous import Rendezvous
from headrace.feed.request import ITERATOR_IDENTITY, FeedRequest
from headrace.feed.resume import check_fits, encode, source_state
from headrace.position import Position
from headrace.shm import handover, placement
from headrace.shm.handover import Door
from headrace.shm.peers import WRITER, Peer, Watch
from headrace.shm.placement import Placement
from headrace.shm.ring_reader import RingReader
from headrace.shm.waiting import Patience
from headrace.topology import Topology

log = logging.getLogger("headrace")
# Whoever writes knows which rank is missing: it may say so before the others give up, although it starts later.
_FIRST_WORD_S = 10.0


@dataclass(kw_only=True, slots=True)
class Membership:
    """A rank's place in a feed, before and after it attaches. What it owns is in `resources`."""

    request: FeedRequest
    topology: Topology
    cards: list[Card]
    door: Door | None
    """Open on the rank that writes itself; the feeder has taken the others'."""
    host_card: Card
    """Whose invitation to follow: the rank that started the feeder, or that writes itself."""
    resources: contextlib.ExitStack
    writer: Peer
    placement: Placement | None = None
    """Where the feeder runs, on the rank that started it."""
    digests: HostDigests | None = None
    """The comparison with other hosts, for a group over several."""
    has_knocked: bool = False
    host: Host | None = None
    """The ring itself, on the rank that writes itself."""

    @property
    def rank(self) -> int:
        return self.topology.rank

    def identity(self) -> str:
        """What a checkpoint remembers of the data."""
        return ITERATOR_IDENTITY if self.request.source is None else shard.identity(self.request.source)

    def attach(
        self, beginning: Position, wrap: Callable[[Any], Array], check_open: Callable[[], None]
    ) -> RingReader[Array]:
        """Blocks until all ranks of the host attach and the first batch is known. Any error of the tree.

        `check_open` is called with every tick, and raises once this process has closed the feed.
        """
        if self.digests is not None:
            self.digests.begin(encode(beginning))
        if self.door is not None:
            ring = self._attach_here(beginning, wrap, check_open)
        else:
            ring = self._attach_there(beginning, wrap, check_open)
        if self.topology.leads_host:
            total_mib = self.request.config.num_slots * ring.slot_bytes / 2**20
            log.info(
                "feed up: %d slots of %d bytes, %.1f MiB of host memory for %d ranks, written by %s (pid %d)",
                self.request.config.num_slots, ring.slot_bytes, total_mib, len(self.topology.local_ranks),
                self.writer.who, self.writer.pid,
            )  # fmt: skip
        return ring

    def _attach_there(
        self, beginning: Position, wrap: Callable[[Any], Array], check_open: Callable[[], None]
    ) -> RingReader[Array]:
        connection = self._knock(encode(beginning))
        self.resources.callback(handover.hang_up, connection)
        waiting = _FirstWait(self, check_open)
        try:
            admission = handover.enter(connection, self.writer, timeout_s=math.inf, check=waiting.check)
        except PeerGone:
            self.miss_the_dead()  # whose end may be why the writer hung up
            raise
        self.writer = admission.peers[WRITER]
        watch = Watch(admission.peers)
        self.resources.callback(watch.close)
        try:
            ring = RingReader(
                self.request.config.ring,
                index=self.topology.reader_index,
                who=f"rank {self.rank}",
                control_fd=admission.control_fd,
                data_fd=admission.data_fd,
                slot_bytes=admission.slot_bytes,
                watch=watch,
                receive_data=lambda: handover.receive_data(
                    connection, self.writer, timeout_s=self.request.config.timeout_s
                ),
                wrap=wrap,
            )
        finally:
            os.close(admission.control_fd)
            os.close(admission.data_fd)
        self.resources.callback(ring.close)
        return ring

    def _knock(self, state: bytes) -> socket.socket:
        invitation = self.host_card.invitation
        assert invitation is not None, "every rank that can host sends an invitation"
        self.has_knocked = True
        try:
            return handover.knock(invitation, index=self.topology.reader_index, rank=self.rank, state=state)
        except PeerGone as error:
            self.miss_the_dead()  # whose end may be why the writer's door is closed
            raise PeerGone(
                self.writer.who, rank=self.writer.rank, pid=self.writer.pid, version=0, reason="ended"
            ) from error

    def miss_the_dead(self) -> None:
        """PeerGone for a rank of this host that has ended, before there is a ring that tells who left in good order."""
        for peer in agreement.roster(self.cards, self.topology.hosts[self.topology.index]).values():
            if peer.pid and not peer.is_alive():
                raise PeerGone(peer.who, rank=peer.rank, pid=peer.pid, version=0, reason="ended")

    def excuse(self) -> None:
        """This rank goes without having asked for a batch: whoever writes must not wait for it."""
        if not self.has_knocked and self.door is None:
            with contextlib.suppress(HeadraceError):
                handover.hang_up(self._knock(b""))

    def _attach_here(
        self, beginning: Position, wrap: Callable[[Any], Array], check_open: Callable[[], None]
    ) -> RingReader[Array]:
        assert self.door is not None
        index, who = self.topology.reader_index, f"rank {self.rank}"
        expected = agreement.roster(self.cards, self.host_card.host)
        del expected[index]
        self.host = host = bring_up(
            self.door,
            self.request.config,
            self.request.config.ring,
            self._open_iterator,
            expected=expected,
            who=who,
            rank=self.rank,
            own=OwnReader(index=index, state=encode(beginning)),
            check_open=check_open,
        )
        self.resources.callback(host.close)
        ring = RingReader(
            self.request.config.ring,
            index=index,
            who=who,
            control_fd=host.writer.control_fd,
            data_fd=host.writer.data_fd,
            slot_bytes=host.writer.slot_bytes,
            watch=host.watch,
            receive_data=host.local_segments.popleft,
            wrap=wrap,
        )
        self.resources.callback(ring.close)
        host.producer.on_growth = ring.absorb_resize
        return ring

    def _open_iterator(self, position: Position) -> Production:
        assert self.request.iterator is not None
        check_fits(position, source=ITERATOR_IDENTITY, data_size=self.topology.data_size, counts_samples=True)
        if position.source_state is not None and not hasattr(self.request.iterator, "load_state_dict"):
            raise ConfigError(
                "the checkpoint holds the iterator's own state, but the one given now is a "
                f"{type(self.request.iterator).__name__} without load_state_dict"
            )
        production = ItemProduction(self.request.iterator, num_shards=self.topology.data_size)
        # Whoever passes an iterator has set it to where it should begin; only its own state moves it.
        production.resume(
            source_state=source_state(position.source_state), num_drawn=0, consumed_samples=position.consumed_samples
        )
        return production


def join(request: FeedRequest, rendezvous: Rendezvous, resources: contextlib.ExitStack) -> Membership:
    """Exchange cards with the other ranks; ConfigError, the same on every rank, unless they agree. Blocks."""
    start_timeout_s = request.config.start_timeout_s
    with agreement.telling_others(request.rank, rendezvous, timeout_s=start_timeout_s):
        request.check()
        charge = b"" if request.source is None else pickled(request.source)
        terms = request.terms()
        listener, invitation = handover.listen()
        resources.callback(listener.close)
    card = agreement.make_card(
        request.rank,
        invitation=invitation,
        has_iterator=request.iterator is not None,
        device_node=request.device_node,
        terms=terms,
    )
    cards = agreement.exchange(card, rendezvous, timeout_s=start_timeout_s)
    if request.writer_rank is not None:
        agreement.check_iterators(cards, request.writer_rank)
    topology = request.topology(hosts=tuple(one.host for one in cards))
    first_here = topology.ranks.index(topology.local_ranks[0])
    host_card = cards[first_here if request.writer_rank is None else request.writer_rank]
    door, place = None, None
    spans_hosts = len(set(topology.hosts)) > 1
    if host_card.rank != request.rank:
        listener.close()
    elif request.source is None:
        door = Door(listener=listener, nonce=invitation.nonce)
        resources.callback(door.close)
    else:
        expected = agreement.roster(cards, card.host)
        place = _place_for_feeder(request, [one for one in cards if one.host == card.host])
        feeder = Feeder(
            charge, listener, invitation.nonce, request, placement=place, spans_hosts=spans_hosts, expected=expected
        )
        resources.callback(feeder.close)
    membership = Membership(
        request=request,
        topology=topology,
        cards=cards,
        door=door,
        host_card=host_card,
        resources=resources,
        writer=_future_writer(host_card, is_feeder=request.source is not None),
        placement=place,
        digests=HostDigests(rendezvous, topology.hosts, card.host, posts=topology.leads_host) if spans_hosts else None,
    )
    resources.callback(membership.excuse)
    return membership


def _place_for_feeder(request: FeedRequest, here: list[Card]) -> Placement:
    cores = placement.read_cores()
    if request.config.feeder_cpus is not None:
        return placement.chosen(request.config.feeder_cpus, cores)
    nodes = tuple(card.device_node for card in here if card.device_node is not None)
    return placement.plan(cores, ranks=placement.rank_cpus(card.pid for card in here), device_nodes=nodes)


def _future_writer(card: Card, *, is_feeder: bool) -> Peer:
    """Whom we wait for until the ring tells more."""
    if is_feeder:
        return Peer(who=f"the feeder of rank {card.rank}", rank=None, pid=0, started=0, pidfd=None)
    return Peer(who=f"rank {card.rank}", rank=card.rank, pid=card.pid, started=card.started, pidfd=None)


class _FirstWait:
    """A rank's wait for its first batch, when there is no ring yet to wait in."""

    def __init__(self, member: Membership, check_open: Callable[[], None]) -> None:
        self._check_open, self._miss_the_dead = check_open, member.miss_the_dead
        config = member.request.config.ring
        self._patience = Patience(
            dataclasses.replace(config, timeout_s=config.timeout_s + _FIRST_WORD_S),
            lambda: f"the first batch from {member.writer.describe() if member.writer.pid else member.writer.who}",
        )

    def check(self) -> None:
        """Once per tick. PeerGone for a rank that ended, FeedTimeout, FeedClosed."""
        self._check_open()
        self._miss_the_dead()
        self._patience.check()
