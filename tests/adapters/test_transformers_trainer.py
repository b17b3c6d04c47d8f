"""A real Trainer on a CPU: what it trains on, and that a resumed one goes on as if it had never stopped."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from headrace import PackedTokens
from headrace.errors import ConfigError
from headrace.store import vocab_size_of
from tests.adapters.launching import make_corpus

transformers = pytest.importorskip("transformers", reason="needs the extra demo")
pytest.importorskip("accelerate", reason="Trainer needs accelerate")
pytestmark = pytest.mark.filterwarnings("ignore")  # theirs

EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS = 4


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    prefix = tmp_path_factory.mktemp("trainer") / "corpus"
    make_corpus(prefix)
    return str(prefix)


def losses(trainer: Any) -> list[tuple[int, float]]:
    return [(entry["step"], entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]


def test_a_resumed_trainer_goes_on_as_if_it_had_never_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_corpus(tmp_path / "corpus", vocab_size=1000)
    corpus = str(tmp_path / "corpus")
    assert vocab_size_of(corpus) > 512, "more ids than a number in the example would allow for"
    seen: list[list[Any]] = []
    from headrace.adapters.transformers import FeedTrainer

    plainly = FeedTrainer.training_step

    def training_step(self: Any, model: Any, inputs: Any, *rest: Any) -> Any:
        seen.append(inputs["input_ids"].tolist())
        return plainly(self, model, inputs, *rest)

    monkeypatch.setattr(FeedTrainer, "training_step", training_step)
    main = example("feed_trainer").main
    whole = losses(main(corpus, steps=STEPS, output=str(tmp_path)))
    assert [step for step, _ in whole] == [1, 2, 3, 4]
    assert whole[-1][1] < whole[0][1]
    shutil.rmtree(tmp_path / f"checkpoint-{STEPS}")
    resumed = losses(main(corpus, steps=STEPS, output=str(tmp_path), resume=True))
    assert resumed == whole

    source = PackedTokens(corpus, seq_length=64, micro_batch_size=2, num_epochs=1000, layout="transformers")
    batches = source.open_batches()
    expected = [batches[i]["input_ids"].tolist() for i in range(2 * STEPS)]
    assert seen == expected + expected[STEPS:], "two micro batches a step, none drawn twice or dropped"


def test_the_labels_are_those_a_model_without_the_feed_would_be_given(corpus: str) -> None:
    """Row by row, document by document: the loss Trainer reports is that of the targets, not of the token after."""
    torch = pytest.importorskip("torch")
    batch = PackedTokens(corpus, seq_length=64, layout="transformers").open_batches()[0]
    tensors = {name: torch.from_numpy(batch[name]) for name in ("input_ids", "labels", "shift_labels", "position_ids")}
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
        )
    )
    with torch.no_grad():
        found = model(**tensors, use_cache=False)
        logits = found.logits[0].log_softmax(-1)
    targets = tensors["shift_labels"][0]
    counted = [-logits[i, t].item() for i, t in enumerate(targets.tolist()) if t != -100]
    assert found.loss.item() == pytest.approx(sum(counted) / len(counted), rel=1e-5)
    assert targets[:-1].tolist() == [
        t if t == -100 else int(tensors["input_ids"][0, i + 1]) for i, t in enumerate(targets[:-1].tolist())
    ]


class NoFeed:
    """Enough of a feed to be refused."""

    def __init__(self, *, owned: bool = True, hold: int = 1, data_size: int = 1, source: Any = None) -> None:
        self.config = SimpleNamespace(owned=owned, hold=hold)
        topology, request = SimpleNamespace(data_size=data_size), SimpleNamespace(source=source)
        self._member = SimpleNamespace(topology=topology, request=request, rank=0)

    def state_dict(self) -> dict[str, Any]:
        return {"source": "mine.photographs"}


def trainer(folder: Path, feed: Any) -> Any:
    from headrace.adapters.transformers import FeedTrainer

    torch = pytest.importorskip("torch")
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), max_steps=2, gradient_accumulation_steps=2, use_cpu=True, report_to=[]
    )
    return FeedTrainer(model=torch.nn.Linear(1, 1), args=arguments, feed=feed)


def test_a_feed_that_would_overwrite_a_steps_batches_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="takes 2 batches before it uses the first, the feed holds 1"):
        trainer(tmp_path, NoFeed(owned=False, hold=1))
    trainer(tmp_path, NoFeed(owned=False, hold=2))


@pytest.mark.parametrize(
    ("feed", "message"),
    [
        (
            {},
            "Trainer has 4 data ranks in 4 processes, the feed of rank 0 has data_size 1: .* make it with data_size=4",
        ),
        ({"data_size": 8}, "the feed of rank 0 has data_size 8"),
        ({"data_size": 4, "source": print}, "the source must be PackedTokens, got mine.photographs"),
        ({"data_size": 4}, "the source must be PackedTokens, got mine.photographs"),
        ({"data_size": 4, "source": PackedTokens("corpus", seq_length=8)}, None),
    ],
)
def test_data_ranks_that_would_train_on_the_same_batches_are_refused(
    feed: dict[str, Any], message: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformers.TrainingArguments, "world_size", 4)
    with pytest.raises(ConfigError, match=message) if message else contextlib.nullcontext():
        trainer(tmp_path, NoFeed(**feed))


# Ranks share one stdout, where their words mix: each writes files of its own.
TWO_RANKS = """
import json, os, sys
from pathlib import Path

import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from headrace import ConfigError, PackedTokens
from headrace.adapters.transformers import FeedTrainer
from headrace.torch import Feed

rank, folder = int(os.environ["RANK"]), Path(sys.argv[2])
arguments = TrainingArguments(
    output_dir=str(folder / "trained"), max_steps=2, use_cpu=True, report_to=[], save_strategy="no"
)
sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=512, **sizes))
source = PackedTokens(sys.argv[1], seq_length=64, layout="transformers")
with Feed(source, owned=True) as feed:
    try:
        FeedTrainer(model=model, args=arguments, feed=feed)
    except ConfigError as error:
        (folder / f"refused-{rank}").write_text(str(error))
seen = []
with Feed(source, owned=True, data_rank=rank, data_size=2) as feed:
    trainer = FeedTrainer(model=model, args=arguments, feed=feed)
    plainly = trainer.training_step
    trainer.training_step = lambda model, inputs, *rest: (
        seen.append(inputs["input_ids"].tolist()), plainly(model, inputs, *rest)
    )[1]
    trainer.train()
(folder / f"seen-{rank}.json").write_text(json.dumps(seen))
dist.destroy_process_group()
"""


def test_each_of_two_ranks_trains_on_its_own_shard(corpus: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TWO_RANKS)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(tmp_path / "train.py"), corpus, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert "Trainer has 2 data ranks in 2 processes" in (tmp_path / f"refused-{rank}").read_text()
    seen = [json.loads((tmp_path / f"seen-{rank}.json").read_text()) for rank in range(2)]
    batches = PackedTokens(corpus, seq_length=64, layout="transformers").open_batches()
    rows = [batches[number]["input_ids"].tolist() for number in range(4)]
    assert seen == [rows[0::2], rows[1::2]]


def test_a_checkpoint_without_a_state_of_the_feed_is_refused(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-1").mkdir()
    one = trainer(tmp_path, NoFeed(owned=True, hold=1))
    with pytest.raises(ConfigError, match=r"checkpoint-1/feed\.pt does not exist"):
        one.train(resume_from_checkpoint=True)
