"""A small language model of the transformers package, tensor parallel by its own plan: code that nobody here wrote.

Packed documents need nothing but position ids that restart: without an attention mask and without a cache,
transformers derives from them that documents do not see each other.
"""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig
from transformers.utils import logging as transformers_logging

from headrace.demo.feeds import Batch, model_inputs
from headrace.demo.settings import DemoSettings

LEARNING_RATE = 1e-3
HEAD_SIZE = 32
MIN_HEADS = 4
NUM_LAYERS = 2
NUM_EXPERTS = 4
EXPERTS_PER_TOKEN = 2


def config_of(settings: DemoSettings, vocab_size: int) -> Any:
    """Sizes that any number of ranks divides: heads the first multiple of `tp` from 4 on, the vocabulary padded."""
    heads = -(-MIN_HEADS // settings.tp) * settings.tp
    # As Megatron-LM's --make-vocab-size-divisible-by, with half its default.
    multiple = 64 * settings.tp
    sizes: dict[str, Any] = {
        "vocab_size": -(-vocab_size // multiple) * multiple,
        "hidden_size": heads * HEAD_SIZE,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "max_position_embeddings": settings.seq_length,
        "use_cache": False,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if settings.model == "moe":
        return MixtralConfig(
            **sizes,
            intermediate_size=2 * heads * HEAD_SIZE,
            num_local_experts=NUM_EXPERTS,
            num_experts_per_tok=EXPERTS_PER_TOKEN,
            sliding_window=None,
        )
    return LlamaConfig(**sizes, intermediate_size=3 * heads * HEAD_SIZE)


def write_model(folder: Path, settings: DemoSettings, vocab_size: int) -> int:
    """Draw the weights from the seed and save them; returns the number of parameters."""
    with quiet_transformers():
        torch.manual_seed(settings.seed)
        model = AutoModelForCausalLM.from_config(config_of(settings, vocab_size))
        model.save_pretrained(folder)
    return sum(weight.numel() for weight in model.parameters())


class Phases(Protocol):
    """Where the time of a step is booked: a headrace.measure.step.Step, or ranges of a profiler."""

    @property
    def forward(self) -> AbstractContextManager[Any]: ...
    @property
    def backward(self) -> AbstractContextManager[Any]: ...
    @property
    def optimizer(self) -> AbstractContextManager[Any]: ...


class Training:
    """A model with its optimizer, begun anew from the saved weights."""

    def __init__(self, folder: Path) -> None:
        """Loads this rank's shard of the weights. Every rank of the job does it together."""
        with quiet_transformers():
            self.model = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto", local_files_only=True)
        self.model.train()
        # foreach groups plain and sharded weights into one call, which DTensor refuses.
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, foreach=False)

    def step(self, batch: Batch, phases: Phases) -> torch.Tensor:
        """One optimizer step; the loss is a detached scalar. Times go to `phases`."""
        with phases.forward:
            loss: torch.Tensor = self.model(**model_inputs(batch)).loss
        with phases.backward:
            loss.backward()
        with phases.optimizer:
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()


class quiet_transformers(warnings.catch_warnings):  # noqa: N801  a context manager, named as the one it extends
    """No progress bars of single files, and no note that `tp_plan` will move into another argument some day."""

    def __enter__(self) -> None:
        super().__enter__()
        warnings.filterwarnings("ignore", category=FutureWarning)
        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()
