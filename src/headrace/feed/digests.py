"""A group over several hosts has one feeder on each: do they all deliver the same batches?

Each host's first rank posts a digest of batches 0, 1, 2, 4, 8, ... where the others look for it, from the next batch on
and without waiting: two corpora that differ show at once, and a check costs nothing worth speaking of in a long run.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Mapping, Sequence

import numpy as np

from headrace.errors import ConfigError
from headrace.feed.production import Production, Written
from headrace.feed.rendezvous import Rendezvous
from headrace.spec import BatchSpec


class DigestedProduction:
    """A production whose batches carry a CRC-32 of their bytes, made on the feeder's core: the ranks pay nothing."""

    def __init__(self, production: Production) -> None:
        self._production = production
        self._spec: BatchSpec | None = None

    def advance(self) -> BatchSpec | None:
        self._spec = self._production.advance()
        return self._spec

    def write(self, arrays: Mapping[str, np.ndarray]) -> Written:
        written = self._production.write(arrays)
        assert self._spec is not None, "advance() comes first"
        lengths = iter(written.lengths)
        digest = 0
        for field in self._spec.fields:
            array = arrays[field.name][: next(lengths)] if field.ragged else arrays[field.name]
            digest = zlib.crc32(field.name.encode(), digest)
            digest = zlib.crc32(np.ascontiguousarray(array).view(np.uint8).data if array.size else b"", digest)
        return dataclasses.replace(written, digest=digest)

    def close(self) -> None:
        self._production.close()


class HostDigests:
    """One rank's part in the comparison. `hosts`: of all members, in group order; `posts`: this rank speaks for its."""

    def __init__(self, rendezvous: Rendezvous, hosts: Sequence[str], here: str, *, posts: bool) -> None:
        self._rendezvous = rendezvous
        self._hosts = list(dict.fromkeys(hosts))
        self._here = self._hosts.index(here)
        self._posts = posts
        self._open: list[tuple[str, int, int]] = []  # what, digest here, and the host it is still to be compared with

    def begin(self, state: bytes) -> None:
        """Where this feed begins: every host must have been given the same state."""
        self._say("the state to begin with", zlib.crc32(state))

    def delivered(self, index: int, digest: int) -> None:
        """Once per batch. ConfigError when another host has something else. Does not wait for anybody."""
        if self._open:
            self._compare()
        if index & (index - 1) == 0:
            self._say(f"batch {index}", digest)

    def _say(self, what: str, digest: int) -> None:
        if self._posts:
            self._rendezvous.post(f"digest/{self._here}/{what}", str(digest).encode())
        self._open += [(what, digest, host) for host in range(len(self._hosts)) if host != self._here]

    def _compare(self) -> None:
        still_open = []
        for what, digest, host in self._open:
            theirs = self._rendezvous.look(f"digest/{host}/{what}")
            if theirs is None:
                still_open.append((what, digest, host))
            elif int(theirs) != digest:
                raise ConfigError(
                    f"the hosts of a feed do not read the same data: {what} has digest {digest:08x} on "
                    f"{self._hosts[self._here]} and {int(theirs):08x} on {self._hosts[host]}; give every host the same "
                    "files and a source that depends on nothing else"
                )
        self._open = still_open
