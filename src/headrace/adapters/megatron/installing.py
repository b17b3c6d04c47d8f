"""install(): from here on Megatron's command line knows the flags, and the flag does what it says."""

from __future__ import annotations

import argparse
import logging
import sys
from functools import wraps
from typing import Any

import torch.distributed as dist

from headrace.adapters.megatron import feeder
from headrace.adapters.megatron.batch_path import BatchPath
from headrace.adapters.megatron.flags import Flags, agree, read_flags, watch_parsers
from headrace.adapters.megatron.places import find_place

log = logging.getLogger("headrace")


class _Installation:
    """What has happened so far in this process."""

    def __init__(self) -> None:
        self.flags: Flags | None = None
        self.is_replaced = False
        self.has_agreed = False

    def on_parsed(self, parsed: argparse.Namespace) -> None:
        """Megatron's arguments are there, and so are all modules of the script: it parses in its last line."""
        if "megatron.training" not in sys.modules:
            return  # MindSpeed-LLM looks at the arguments while it is being imported, and parses them again later
        self.flags = read_flags(parsed)
        if self.flags.enabled and not self.is_replaced:
            place = find_place()
            BatchPath(place).put_in_place()
            if self.flags.feeder:
                feeder.build_here()
            self.is_replaced = True
            log.info("batches of a tensor-parallel group go through shared memory instead of broadcasts")
        self.agree_if_ready()

    def agree_if_ready(self) -> None:
        """Once the flags are known and the job is up, whichever comes last."""
        if self.flags is not None and dist.is_initialized() and not self.has_agreed:
            self.has_agreed = True
            agree(self.flags.terms, timeout_s=self.flags.timeout_s)


_installation: list[_Installation] = []


def install() -> None:
    """Register `--enable-share-memory` and `--headrace-feeder` with Megatron's parser. Idempotent.

    To be called on every rank before Megatron parses its arguments. What is wrong is raised there (ConfigError) or
    where torch.distributed starts, on every rank: flags without what they need, an unknown Megatron, ranks that were
    started differently.
    """
    if _installation:
        return
    installation = _Installation()
    _installation.append(installation)
    watch_parsers(installation.on_parsed)
    original = dist.init_process_group

    @wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        installation.agree_if_ready()

    dist.init_process_group = init_process_group
    dist.distributed_c10d.init_process_group = init_process_group
