"""A reader written from docs/transport.md alone: struct, mmap and a socket, nothing of headrace."""

from __future__ import annotations

import subprocess
import sys
import textwrap

from .company import Company

STRANGER = """
    import array, json, mmap, os, socket, struct, sys, time

    address, nonce = sys.argv[1:]
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.connect("\\0" + address)
    state, pidfd = os.memfd_create("state"), os.pidfd_open(os.getpid())
    hello = dict(nonce=nonce, index=1, rank=1, pid=os.getpid(), started=0, has_pidfd=True)
    socket.send_fds(sock, [json.dumps(hello).encode()], [state, pidfd])

    def receive():
        message, fds, _, _ = socket.recv_fds(sock, 1 << 18, 250)
        return json.loads(message), fds

    welcome, (control_fd, data_fd, *pidfds) = receive()
    assert list(welcome["people"]) == ["-1", "0", "1"] and len(pidfds) == 3
    control = mmap.mmap(control_fd, 0)
    data, slot_bytes = mmap.mmap(data_fd, 0), welcome["slot_bytes"]
    u32 = lambda memory, at: struct.unpack_from("<I", memory, at)[0]
    u64 = lambda memory, at: struct.unpack_from("<Q", memory, at)[0]
    assert control[:8] == b"HEADRACE" and u32(control, 8) == 1
    num_slots, num_readers, hold = struct.unpack_from("<III", control, 12)
    line = 512 + 128 * 1
    assert u32(control, line + 8) == 0
    struct.pack_into("<I", control, line + 8, 1)

    version, texts = 0, []
    while True:
        struct.pack_into("<Q", control, line, max(0, version - (hold - 1)))
        while u64(control, 256) <= version:
            time.sleep(0.001)  # the simplest of waits; the writer looks again every 100 ms without our wake-ups
        slot = version % num_slots * slot_bytes
        assert u64(data, slot) == version
        kind = u32(data, slot + 8)
        if kind == 3:
            grown, (data_fd,) = receive()
            data, slot_bytes = mmap.mmap(data_fd, 0), grown["slot_bytes"]
        elif kind == 0:
            assert u32(data, slot + 40) == 1
            name, dtype, offset = struct.unpack_from("<40s16sQ", data, slot + 256)
            (length,) = struct.unpack_from("<q", data, slot + 256 + 64)
            assert (name.rstrip(b"\\0"), dtype.rstrip(b"\\0")) == (b"values", b"<i8")
            values = struct.unpack_from(f"<{length}q", data, slot + offset)
            blob_at, blob_bytes = struct.unpack_from("<QQ", data, slot + 24)
            blob = data[slot + blob_at : slot + blob_at + blob_bytes]
            assert set(values) == {version} and int(blob) == version
            texts.append(f"{version}x{length}")
        else:
            struct.pack_into("<Q", control, line, 2**64 - 1)
            break
        version += 1
    assert "headrace" not in sys.modules
    print(*texts, kind)
"""


def test_a_reader_can_be_written_from_the_documentation(company: Company) -> None:
    host, reader = company.add("host"), company.add("reader")
    invitation = host.listen()
    reader.knock(invitation, 0)
    command = [sys.executable, "-c", textwrap.dedent(STRANGER), invitation["address"], invitation["nonce"]]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as stranger:
        host.admit(2)
        host.open(num_slots=3, hold=2)
        reader.begin_call("enter", num_slots=3, hold=2)
        host.welcome()
        reader.answer()
        reader.begin_call("next", 6)
        host.publish(num_values=10, count=4)
        host.grow(9_000)
        host.publish(num_values=9_000, count=2)
        host.end()
        assert reader.answer()["version"] == 6
        output, errors = stranger.communicate(timeout=60)
    assert (output.strip(), errors) == ("0x10 1x10 2x10 3x10 5x9000 6x9000 1", "")
