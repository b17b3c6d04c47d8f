"""Train with the Hugging Face Trainer, fed by headrace: packed documents, no padding, exact resume.

    python examples/feed_trainer.py CORPUS [--steps 20] [--output FOLDER] [--resume]

CORPUS is a .bin/.idx pair; `headrace prepare texts/ -o corpus -t gpt2 --append-eod` makes one. One process as it
stands; with tensor parallelism give the feed the group of ranks that share a replica, `group=`, and all else stays.
"""

import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from headrace import PackedTokens
from headrace.adapters.transformers import FeedTrainer
from headrace.store import vocab_size_of
from headrace.torch import Feed


def main(corpus: str, steps: int = 20, output: str = "trained", resume: bool = False) -> FeedTrainer:
    torch.manual_seed(0)
    vocab_size = vocab_size_of(corpus)  # of its tokenizer: `headrace prepare` writes it beside the pair
    config = LlamaConfig(
        vocab_size=vocab_size, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
    )
    model = LlamaForCausalLM(config)
    source = PackedTokens(
        corpus, seq_length=64, micro_batch_size=2, num_epochs=1000, layout="transformers", vocab_size=vocab_size
    )
    arguments = TrainingArguments(
        output_dir=output, max_steps=steps, gradient_accumulation_steps=2, learning_rate=1e-2, save_steps=steps // 2,
        logging_steps=1, report_to=[], use_cpu=not torch.cuda.is_available(), disable_tqdm=True,
    )  # fmt: skip
    with Feed(source, owned=True) as feed:
        trainer = FeedTrainer(model=model, args=arguments, feed=feed)
        trainer.train(resume_from_checkpoint=resume)
    return trainer


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("corpus")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--output", default="trained")
    parser.add_argument("--resume", action="store_true")
    main(**vars(parser.parse_args()))
