"""Stand-in: arguments, tokenizer, and the place of the batch path that HEADRACE_STAND_IN names."""

import argparse
import os
from types import SimpleNamespace

PLACE = os.environ.get("HEADRACE_STAND_IN", "training")

_ARGS = None


def get_args():
    assert _ARGS is not None, "args is not initialized."
    return _ARGS


def get_tokenizer():
    return SimpleNamespace(eod=_ARGS.eod, pad=-1, unique_identifiers={"class": "Numbers"}, vocab_size=_ARGS.vocab_size)


def parse_args(arguments=None):
    """A few of Megatron's flags, under its names and with its defaults."""
    global _ARGS
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name, default in (
        ("tensor-model-parallel-size", 1),
        ("pipeline-model-parallel-size", 1),
        ("micro-batch-size", 1),
        ("global-batch-size", 1),
        ("seq-length", 16),
        ("train-iters", 4),
        ("eval-iters", 0),
        ("eval-interval", 1000),
        ("seed", 1234),
        ("vocab-size", 64),
        ("eod", 0),
        ("mtp-num-layers", None),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name in ("reset-position-ids", "reset-attention-mask", "eod-mask-loss", "sft"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument(
        "--no-create-attention-mask-in-dataloader", dest="create_attention_mask_in_dataloader", action="store_false"
    )
    parser.add_argument("--data-path", nargs="*")
    parser.add_argument("--split", default="969,30,1")
    parser.add_argument("--save")
    parser.add_argument("--dataloader-type", default="single")
    parser.add_argument("--hybrid-context-parallel", action="store_true")
    parser.add_argument("--schedules-method")
    _ARGS = parser.parse_args(arguments)
    _ARGS.iteration = _ARGS.consumed_train_samples = _ARGS.consumed_valid_samples = 0
    _ARGS.skip_train, _ARGS.train_samples, _ARGS.context_parallel_size = False, None, 1
    return _ARGS
