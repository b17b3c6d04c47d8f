"""A large batch is packed without the GIL, and one packer serves several threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np

from headrace.packing import Packer, PackRules, pack
from tests.another_thread import runs_beside

RULES = PackRules(eod=0, pad=1, reset_position_ids=True, reset_attention_mask=True, eod_mask_loss=True)
ROWS = np.random.default_rng(0).integers(0, 500, (1, 400_001)).astype(np.uint16)


def test_another_thread_runs_while_a_large_batch_is_packed():
    packer = Packer(RULES)
    assert runs_beside(lambda: packer.pack_into(ROWS, {}), most_calls=10_000)


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
