"""A real Trainer on a CPU: what it trains on, and that a resumed one goes on as if it had never stopped."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from headrace import PackedTokens
from headrace.errors import ConfigError
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


def test_a_resumed_trainer_goes_on_as_if_it_had_never_stopped(
    corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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

    def __init__(self, *, owned: bool, hold: int) -> None:
        self.config = type("Config", (), {"owned": owned, "hold": hold})()


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


def test_a_checkpoint_without_a_state_of_the_feed_is_refused(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-1").mkdir()
    one = trainer(tmp_path, NoFeed(owned=True, hold=1))
    with pytest.raises(ConfigError, match=r"checkpoint-1/feed\.pt does not exist"):
        one.train(resume_from_checkpoint=True)
