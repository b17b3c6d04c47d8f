"""The two flags: how Megatron's parser learns of them, what they need, and that all ranks were given the same.

Megatron builds its parser anew in every version and MindSpeed-LLM once more, but all of them parse with argparse: the
flags are added to any parser that knows `--tensor-model-parallel-size`, just before it parses.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch.distributed as dist

from headrace.errors import ConfigError, FeedTimeout
from headrace.feed.corpora import read_corpora, read_data_path

_MEGATRONS = "--tensor-model-parallel-size"
_KEYS = "headrace/megatron/flags"
_PATIENCE = "--distributed-timeout-minutes"
_GOODBYE_S = 10.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Flags:
    """What the command line says, as far as all ranks must agree on it."""

    enabled: bool
    feeder: bool
    seq_length: int | None
    micro_batch_size: int | None
    reset_position_ids: bool
    reset_attention_mask: bool
    timeout_s: float
    """How long ranks wait for each other at the start: Megatron's --distributed-timeout-minutes."""

    @property
    def terms(self) -> str:
        """For comparing, and for the sentence that says who differs."""
        flags = ("enable-share-memory", self.enabled), ("headrace-feeder", self.feeder)
        resets = ("reset-position-ids", self.reset_position_ids), ("reset-attention-mask", self.reset_attention_mask)
        given = " ".join(f"--{name}" for name, is_set in flags + resets if is_set) or "none of the flags"
        return f"{given}, --seq-length {self.seq_length}, --micro-batch-size {self.micro_batch_size}"


def register(parser: argparse.ArgumentParser) -> None:
    """Add the flags; MindSpeed-LLM has `--enable-share-memory` already."""
    for name, text in (
        ("--enable-share-memory", "Ranks of a tensor-parallel group take batches from shared memory: no broadcast."),
        ("--headrace-feeder", "With --enable-share-memory: a feeder process per group reads the .bin/.idx data."),
    ):
        if name not in parser._option_string_actions:
            parser.add_argument(name, action="store_true", help=text)


def watch_parsers(on_parsed: Callable[[argparse.Namespace], None]) -> None:
    """Register the flags with Megatron's parser whenever it parses, and tell what came out. Once per process."""
    original = argparse.ArgumentParser.parse_known_args

    @wraps(original)
    def parse_known_args(parser: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> Any:
        if _MEGATRONS not in parser._option_string_actions:
            return original(parser, *args, **kwargs)
        register(parser)
        parsed, rest = original(parser, *args, **kwargs)
        on_parsed(parsed)
        return parsed, rest

    argparse.ArgumentParser.parse_known_args = parse_known_args  # type: ignore[method-assign, assignment]


def read_flags(parsed: argparse.Namespace) -> Flags:
    """ConfigError, the same on every rank that was started alike, for flags without what they need."""
    flags = Flags(
        enabled=bool(parsed.enable_share_memory),
        feeder=bool(parsed.headrace_feeder),
        seq_length=getattr(parsed, "seq_length", None),
        micro_batch_size=getattr(parsed, "micro_batch_size", None),
        reset_position_ids=bool(getattr(parsed, "reset_position_ids", False)),
        reset_attention_mask=bool(getattr(parsed, "reset_attention_mask", False)),
        timeout_s=60.0 * (getattr(parsed, "distributed_timeout_minutes", None) or 10),
    )
    if flags.feeder and not flags.enabled:
        raise ConfigError("--headrace-feeder needs --enable-share-memory, which was not given")
    if flags.enabled:
        _check_needs(parsed, flags)
    if flags.feeder:
        _check_feeder_needs(parsed)
    return flags


def _check_needs(parsed: argparse.Namespace, flags: Flags) -> None:
    """The constraints of the flag as MindSpeed-LLM publishes them, and what is not supported."""
    if getattr(parsed, "yaml_cfg", None) is not None:
        raise ConfigError("--enable-share-memory reads Megatron's flags from the command line, not from --yaml-cfg")
    has_thd_data = getattr(parsed, "sft", False) or getattr(parsed, "dataloader_inter_document_masking", False)
    if not (flags.reset_attention_mask or has_thd_data):
        raise ConfigError(
            "--enable-share-memory needs packed (TND/THD) attention: add --reset-attention-mask, or --sft or "
            "--dataloader-inter-document-masking where this Megatron has them; none of these was given"
        )
    if getattr(parsed, "hybrid_context_parallel", False):
        raise ConfigError("--enable-share-memory does not support --hybrid-context-parallel: leave one of them out")


def _check_feeder_needs(parsed: argparse.Namespace) -> None:
    words = getattr(parsed, "data_path", None)
    if not words:
        raise ConfigError("--headrace-feeder reads what --data-path names, one prefix or a blend; it names nothing")
    read_corpora(read_data_path(words))
    if getattr(parsed, "dataloader_type", None) not in (None, "single"):
        raise ConfigError(f"--headrace-feeder needs --dataloader-type single, got {parsed.dataloader_type}")
    refused = {
        "sft": "--sft",
        "mock_data": "--mock-data",
        "fim_data": "--fim-data",
        "full_validation": "--full-validation",
        "multiple_validation_sets": "--multiple-validation-sets",
        "phase_transition_iterations": "--phase-transition-iterations",
        "rampup_batch_size": "--rampup-batch-size",
        "dataloader_inter_document_masking": "--dataloader-inter-document-masking",
        "virtual_pipeline_model_parallel_size": "virtual pipeline stages",
        "num_layers_per_virtual_pipeline_stage": "--num-layers-per-virtual-pipeline-stage",
        "num_virtual_stages_per_pipeline_rank": "--num-virtual-stages-per-pipeline-rank",
        "pipeline_model_parallel_layout": "--pipeline-model-parallel-layout",
    }
    given = [flag for name, flag in refused.items() if getattr(parsed, name, None)]
    if given:
        raise ConfigError(f"--headrace-feeder does not support {', '.join(given)}: leave one of them out")
    if getattr(parsed, "create_attention_mask_in_dataloader", False):
        raise ConfigError(
            "--headrace-feeder makes no dense attention mask: add --no-create-attention-mask-in-dataloader"
        )


def agree(terms: str, *, timeout_s: float) -> None:
    """All ranks of the job were started alike; ConfigError, on every rank, if not. Blocks for all of them, FeedTimeout
    if they do not come.

    Two counters in torch.distributed's store instead of everybody's word to everybody: the cost per rank does not grow
    with the job.
    """
    store: Any = dist.distributed_c10d._get_default_store()
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    alike = f"{_KEYS}/alike/{hashlib.sha256(terms.encode()).hexdigest()[:16]}"
    store.add(alike, 1)
    if rank == 0:
        store.set(f"{_KEYS}/first", terms)
    _count(store, "arrived", num_ranks, timeout_s, "start through headrace.adapters.megatron")
    if store.add(alike, 0) == num_ranks:
        return
    first = store.get(f"{_KEYS}/first").decode()
    if first != terms:
        store.set(f"{_KEYS}/other", f"rank {rank} {terms}")
    _await(store, "other", timeout_s, lambda: "the rank that was started differently to say how")
    other = store.get(f"{_KEYS}/other").decode()
    # The rank that holds the store must not end before the others have read why; one that is gone reads nothing.
    with contextlib.suppress(FeedTimeout):
        _count(store, "read", num_ranks, _GOODBYE_S, "read that their flags differ")
    raise ConfigError(f"all ranks must be started with the same flags: rank 0 has {first}; {other}")


def _count(store: Any, what: str, num_ranks: int, timeout_s: float, purpose: str) -> None:
    """Returns once all ranks have come here."""
    counter = f"{_KEYS}/{what}"
    if store.add(counter, 1) == num_ranks:
        store.set(f"{counter}/all", b"")
    _await(
        store,
        f"{what}/all",
        timeout_s,
        lambda: f"the last of {num_ranks} ranks to {purpose} ({store.add(counter, 0)} did)",
    )


def _await(store: Any, key: str, timeout_s: float, whom: Callable[[], str]) -> None:
    # Not store.wait: torch's FileStore ends it by a RuntimeError after a second, its TCPStore prints two warnings each
    # time. Looking less and less often, since the ranks of a large job look together.
    deadline, pause_s = time.monotonic() + timeout_s, _FIRST_PAUSE_S
    while not store.check([f"{_KEYS}/{key}"]):
        if time.monotonic() >= deadline:
            # Nothing here knows the other processes: whether they are alive is not said.
            raise FeedTimeout(whom(), timeout_s=timeout_s, knob=_PATIENCE, all_alive=False)
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
