"""Megatron-LM and MindSpeed-LLM: one flag, the same samples, the same losses.

    torchrun ... -m headrace.adapters.megatron pretrain_gpt.py ARGS... --reset-attention-mask --enable-share-memory

runs the unmodified script with the flag registered; `install()`, called before Megatron parses its arguments, does the
same from code. Without the flag nothing is replaced. docs/megatron.md says what changes and how to check it.

flags.py       the flags, what they need, do all ranks have the same     __main__.py   running a script
places.py      where Megatron keeps its batch path, and replacing it     stages.py     what this rank is
fields.py      a loader's dict, the ring's fields, Megatron's dict       shared.py     the ring of one TP group
batch_path.py  what stands in the place of the broadcasts                mindspeed.py  what only MindSpeed-LLM has
feeder.py      --headrace-feeder, and iterators for `--dataloader-type external`
objections.py  what a rank that only reads has against the run
"""

from headrace.adapters.megatron.batch_path import boundaries
from headrace.adapters.megatron.feeder import FeedIterator
from headrace.adapters.megatron.fields import Boundaries
from headrace.adapters.megatron.installing import install

__all__ = ["Boundaries", "FeedIterator", "boundaries", "install"]
