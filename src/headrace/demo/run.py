"""The whole run as the command line sees it: a corpus, ranks that measure, a document."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from headrace.demo.corpus import find_corpus, source_of
from headrace.demo.document import document
from headrace.demo.progress import Progress
from headrace.demo.results import ORDER_FILE, RESULTS_FILE, Measured
from headrace.demo.run_folder import run_folder
from headrace.demo.settings import DemoSettings, WorkOrder
from headrace.errors import ConfigError

NEEDED_PACKAGES = ("torch", "transformers", "tokenizers")


def run_demo(
    settings: DemoSettings, *, corpus_prefix: str | None = None, text_folder: str | None = None
) -> dict[str, Any]:
    """Train and measure; returns the JSON-able document. Takes minutes; shows its progress on standard error.

    ConfigError and FormatError for what the caller can correct, before any rank starts where that is possible; other
    errors of the tree when a rank failed. No process and no file outside the cache outlives the call; what a run leaves
    that is killed, the next one removes.
    """
    require_packages()
    with Progress("corpus: look for it", 1) as progress:
        corpus = find_corpus(
            prefix=corpus_prefix,
            text_folder=text_folder,
            progress=lambda stage, done, total: progress.move_to(f"corpus: {stage}", done, total),
        )
    # Everything that a rank would refuse is found here, once and before torch is loaded.
    source_of(corpus, settings).open_batches().close()
    if settings.trace_dir is not None:
        make_folder(settings.trace_dir)
    order = WorkOrder(settings=settings, corpus=corpus)
    with run_folder() as folder:
        (folder / ORDER_FILE).write_bytes(msgspec.json.encode(order))
        from headrace.demo.launch import launch

        launch(folder, tp=settings.tp)
        measured = msgspec.json.decode((folder / RESULTS_FILE).read_bytes(), type=Measured)
    return document(order, measured)


def require_packages() -> None:
    """ConfigError, with the command that helps, unless the demo's extra is installed."""
    missing = [name for name in NEEDED_PACKAGES if find_spec(name) is None]
    if missing:
        raise ConfigError(f"the demo needs {', '.join(missing)}: pip install 'headrace[demo]'")


def make_folder(folder: str) -> None:
    """ConfigError unless traces can be written into `folder`, which is made if it is missing."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"traces cannot be written to {folder}: {error.strerror}") from error
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"traces cannot be written to {folder}: it is not writable")
