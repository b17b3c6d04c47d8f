"""A large batch is packed without the GIL, and one packer serves several threads."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from headrace.packing import Packer, PackRules, pack

RULES = PackRules(eod=0, pad=1, reset_position_ids=True, reset_attention_mask=True, eod_mask_loss=True)
ROWS = np.random.default_rng(0).integers(0, 500, (1, 400_001)).astype(np.uint16)


@pytest.fixture
def no_forced_switch():
    """No thread is made to give up the GIL by the interpreter: it moves on only if its holder lets go."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    yield
    sys.setswitchinterval(interval)


def test_another_thread_runs_while_a_large_batch_is_packed(no_forced_switch):
    packer, started, blocked, ran = Packer(RULES), threading.Event(), threading.Lock(), []
    blocked.acquire()

    def wait_and_say_so():
        started.set()
        with blocked:
            ran.append(True)

    thread = threading.Thread(target=wait_and_say_so)
    thread.start()
    started.wait()
    blocked.release()
    assert not ran, "releasing a lock does not release the GIL"
    for _ in range(10_000):  # ends with the first pack that lets the thread in; without release none ever does
        packer.pack_into(ROWS, {})
        if ran:
            break
    let_in = bool(ran)
    thread.join()
    assert let_in


def test_one_packer_in_two_threads():
    packer = Packer(RULES)
    texts = [ROWS, ROWS[:, ::-1].copy()]

    def pack_often(rows):
        outputs = {"tokens": np.empty((1, 400_000), np.int64), "position_ids": np.empty((1, 400_000), np.int64)}
        for _ in range(5):
            packer.pack_into(rows, outputs)
        return outputs

    with ThreadPoolExecutor(2) as pool:
        for rows, outputs in zip(texts, pool.map(pack_often, texts), strict=True):
            alone = pack(rows, RULES)
            assert np.array_equal(outputs["tokens"], alone["tokens"])
            assert np.array_equal(outputs["position_ids"], alone["position_ids"])
