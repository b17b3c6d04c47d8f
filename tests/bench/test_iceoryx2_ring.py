"""The opponent is set up well: it loses nothing, and leaves nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from headrace.bench.iceoryx2_ring import Place, Publisher, Services, lay_out, missing_reason
from headrace.spec import BatchSpec, Field

if missing_reason() is not None:
    pytest.skip(f"no iceoryx2 here: {missing_reason()}", allow_module_level=True)

SPEC = BatchSpec(fields=(Field(name="a", dtype="int64", shape=(5,)), Field(name="b", dtype="float32", shape=(2, 3))))
NUM_BATCHES = 40

READER = """
import json, sys, time
from headrace.bench.iceoryx2_ring import *
from tests.bench.test_iceoryx2_ring import NUM_BATCHES, SPEC
places, nbytes = lay_out(SPEC)
subscriber = Subscriber(Services(Place(**json.loads(sys.argv[1])), num_slots=4, num_readers=2))
got = []
for index in range(NUM_BATCHES):
    address = subscriber.receive()
    if index % 8 == 0: time.sleep(0.01)  # the publisher is held up now and then
    fields = fields_of(memory_at(address, nbytes), places)
    got.append([counts_at(address)[0], int(fields["a"].sum()), float(fields["b"][1, 2])])
print(json.dumps(got))
"""


@pytest.mark.usefixtures("watchdog")
def test_every_reader_gets_every_batch_and_the_files_go():
    place = Place.make()
    readers = []
    try:
        publisher = Publisher(Services(place, num_slots=4, num_readers=2), SPEC)
        command = [sys.executable, "-c", READER, json.dumps(asdict(place))]
        readers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
        publisher.wait_for_readers()
        for index in range(NUM_BATCHES):
            sample, counts, fields = publisher.begin()
            counts[0] = index
            fields["a"][:] = index
            fields["b"][1, 2] = -index
            publisher.publish(sample)
        expected = [[index, 5 * index, -float(index)] for index in range(NUM_BATCHES)]
        assert [json.loads(reader.stdout.read()) for reader in readers] == [expected, expected]
    finally:
        for reader in readers:
            reader.kill()
            reader.communicate()
        place.sweep()
    assert not [name for name in os.listdir("/dev/shm") if name.startswith(place.prefix)]
    assert not Path(place.folder).exists()


def test_fields_lie_on_lines_behind_the_counts():
    places, nbytes = lay_out(SPEC)
    assert places["a"] == (128, 40, "int64", (5,))
    assert places["b"] == (256, 24, "float32", (2, 3))
    assert nbytes == 384
