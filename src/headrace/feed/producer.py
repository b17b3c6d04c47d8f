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
        # The first batch is known already: the slots were sized by it.
        self._prepared: list[BatchSpec | None] = [first]
        self.on_growth: Callable[[], None] = lambda: None
        self.finished = False
        self.error: Exception | None = None
        """What ended the data, if it was a failure."""

    def produce(self) -> None:
        """Write one batch, END, or ERROR. Blocks while the slot is still read.

        What the production raises reaches every rank in band; what the ring raises (PeerGone, FeedTimeout,
        EverybodyLeft) is the caller's.
        """
        try:
            spec = self._prepared.pop() if self._prepared else self._production.advance()
        except Exception as error:
            self._fail(error)
            return
        if spec is None:
            self._writer.finish(END)
            self.finished = True
            return
        try:
            self._write(spec)
        except _ProductionFailed as failed:
            self._fail(failed.error)
        except BatchTooLarge as error:
            self._fail(error)

    def _write(self, spec: BatchSpec) -> None:
        blob_bytes = 0
        while True:
            try:
                slot, arrays = self._writer.begin(spec)
                try:
                    written = self._production.write(arrays)
                except Exception as error:
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
        except ConfigError as error:  # no memory for it: the readers are told, as of any other failure
            raise _ProductionFailed(error) from error
        self.on_growth()

    def _fail(self, error: Exception) -> None:
        self.error = error
        self._writer.finish(ERROR, failure.encode(error))
        self.finished = True


class _ProductionFailed(Exception):
    """Keeps what the production raised apart from what the ring raises."""

    def __init__(self, error: Exception) -> None:
        self.error = error
