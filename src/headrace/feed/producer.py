"""The writer's work: one batch after another from a production into the ring."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from headrace.errors import BatchTooLarge, ConfigError
from headrace.feed.production import Production
from headrace.shm import failure
from headrace.shm.ring_writer import END, ERROR, RingWriter
from headrace.spec import BatchSpec


class Producer:
    """Fills the ring. Owns nothing: production and writer belong to the host, which closes them.

    `hand_out(fd, slot_bytes)` gives a larger data segment to the readers; `on_growth` is called once its RESIZE is
    published, for a reader that lives in this process and would otherwise hold the writer up.
    """

    def __init__(
        self,
        production: Production,
        first: BatchSpec | None,
        writer: RingWriter,
        hand_out: Callable[[int, int], None],
    ) -> None:
        self._production, self._writer, self._hand_out = production, writer, hand_out
        # What is to be written next, until it is: a wait that times out or is interrupted loses no batch. The first is
        # known already, since the slots were sized by it.
        self._prepared: list[BatchSpec | None] = [first]
        self.on_growth: Callable[[], None] = lambda: None
        self.finished = False
        self.error: BaseException | None = None
        """What ended the data, if it was a failure."""

    def produce(self) -> None:
        """Write one batch, END, or ERROR. Blocks while the slot is still read.

        What the production raises reaches every rank in band; what the ring raises (PeerGone, FeedTimeout,
        EverybodyLeft) is the caller's, who may try again.
        """
        if self.error is None:
            try:
                self._produce()
            except _ProductionFailed as failed:
                self.error = failed.error
        if self.error is not None:
            self._writer.finish(ERROR, failure.encode(self.error))
            self.finished = True

    def _produce(self) -> None:
        if not self._prepared:
            try:
                self._prepared.append(self._production.advance())
            except (Exception, SystemExit) as error:
                raise _ProductionFailed(error) from error
        spec = self._prepared[0]
        if spec is None:
            self._writer.finish(END)
            self.finished = True
        else:
            self._write(spec)
        self._prepared.clear()

    def _write(self, spec: BatchSpec) -> None:
        blob_bytes = 0
        while True:
            try:
                slot, arrays = self._writer.begin(spec)
                try:
                    written = self._production.write(arrays)
                except (Exception, SystemExit) as error:
                    raise _ProductionFailed(error) from error
                blob = msgspec.msgpack.encode(written.metadata)
                blob_bytes = len(blob)
                self._writer.publish(slot, counts=written.counts, lengths=written.lengths, blob=blob)
                return
            except BatchTooLarge:
                self._grow(spec, blob_bytes)

    def _grow(self, spec: BatchSpec, blob_bytes: int) -> None:
        try:
            self._writer.grow(spec, blob_bytes=blob_bytes, hand_out=self._hand_out)
            self.on_growth()
        except (BatchTooLarge, ConfigError) as error:  # beyond the limit, or no memory for it: the readers are told
            raise _ProductionFailed(error) from error


class _ProductionFailed(Exception):
    """Keeps what the production raised, and what it asked for in vain, apart from what the ring raises."""

    def __init__(self, error: BaseException) -> None:
        self.error = error
