"""The producer of the iceoryx2 contender: `python -m headrace.bench.iceoryx2_producer CHARGE`.

The same packing as the feeder's, into loaned samples, under the same scheduling policy. It never ends by itself: who
started it kills it, and the kernel does when that process dies.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys

from headrace.bench.iceoryx2_ring import Place, Publisher, Services
from headrace.feed.packed_tokens import PackedTokens

PR_SET_PDEATHSIG = 1


def main() -> None:
    die_with_parent()
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    charge = json.loads(sys.argv[1])
    source = PackedTokens(**charge["source"])
    services = Services(Place(**charge["place"]), num_slots=charge["num_slots"], num_readers=charge["num_readers"])
    publisher = Publisher(services, source.batch_spec())
    production = source.open_production(data_rank=0, data_size=1, consumed_samples=0)
    publisher.wait_for_readers()
    while production.advance() is not None:
        sample, counts, fields = publisher.begin()
        written = production.write(fields)
        counts[0], counts[1] = written.lengths[0], written.max_seqlen
        publisher.publish(sample)
    signal.pause()  # the samples that are still unread go when their publisher does


def die_with_parent() -> None:
    """SIGKILL when the thread that started this process ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    main()
