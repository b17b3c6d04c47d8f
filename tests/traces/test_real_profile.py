"""The whole way on a real job: torch.profiler writes, the planted rank is found. Two ranks over gloo."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from headrace.traces import analyze, to_document

pytest.importorskip("torch")

PROGRAM = textwrap.dedent(
    """
    import sys, time
    import torch
    import torch.distributed as dist
    from torch.profiler import ProfilerActivity, profile, record_function, schedule

    rank, folder, slow_ms = int(sys.argv[1]), sys.argv[2], float(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    weights = torch.randn(128, 128)

    def export(profiler):
        profiler.export_chrome_trace(f"{folder}/rank_{rank}.json.gz")

    steps = 6
    plan = schedule(wait=0, warmup=2, active=steps, repeat=1)
    options = {"schedule": plan, "record_shapes": True, "on_trace_ready": export}
    with profile(activities=[ProfilerActivity.CPU], **options) as profiler:
        for _ in range(steps + 2):
            if rank == 1:
                time.sleep(slow_ms / 1000)
            with record_function("forward"):
                out = weights @ weights
            dist.all_reduce(out)
            gathered = [torch.empty(64) for _ in range(2)]
            dist.all_gather(gathered, torch.ones(64))
            profiler.step()
    dist.destroy_process_group()
    """
)


def test_the_planted_rank_is_found_in_a_real_profile(tmp_path, watchdog):
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    ranks = [
        subprocess.Popen([sys.executable, script, str(rank), str(tmp_path), "150"], stderr=subprocess.DEVNULL)
        for rank in range(2)
    ]
    assert [process.wait() for process in ranks] == [0, 0]
    document = to_document(analyze([tmp_path / "rank_0.json.gz", tmp_path / "rank_1.json.gz"]))
    slow = document["slow_rank"]
    assert (slow["verdict"], slow["rank"], slow["num_steps"]) == ("host", 1, 6)
    assert document["unmatched_collectives"] == 0
    assert document["collectives"]["groups"][0]["paired_by"] == "order"
    assert {row["kind"] for row in document["collectives"]["kinds"]} == {"all_reduce", "all_gather"}
    asleep = [row["free"]["host_launch_us"] for row in document["breakdown"] if row["rank"] == 1]
    assert min(asleep) > 150_000  # exactly the sleep, and a little more
