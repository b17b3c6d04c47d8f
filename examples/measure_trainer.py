"""Measure the Hugging Face Trainer with a callback: no subclass, no change of the training script but one argument.

    python examples/measure_trainer.py [--steps 40] [--records FOLDER]

Trainer fetches the batches of a step before `on_step_begin`, so `data` is the time from the end of a step to there.
Evaluation and saving happen after `on_step_end`, when the control object already says that they will.
"""

import argparse
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from headrace.torch import measure


class MeasureCallback(TrainerCallback):
    """Times the phases of every optimizer step. `tokens_per_sample` is the length every sample has."""

    def __init__(self, tokens_per_sample: int, records: str | None = None) -> None:
        self.tokens_per_sample, self.records = tokens_per_sample, records
        self.run: measure.Run | None = None
        self.open: list = []

    def on_train_begin(self, args, state, control, model=None, optimizer=None, **_):
        optimizer = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps the one that really steps
        self.run = measure.start(model, optimizer, records=self.records, end_with_optimizer=False)
        self.samples = args.per_device_train_batch_size * args.gradient_accumulation_steps
        self.enter(self.run.step.data)

    def on_step_begin(self, args, state, control, **_):
        self.leave()

    def on_step_end(self, args, state, control, **_):
        self.run.count(samples=self.samples, tokens=self.samples * self.tokens_per_sample)
        self.run.end()
        if control.should_evaluate:
            self.enter(self.run.step.evaluation)
        elif control.should_save:
            self.enter(self.run.step.checkpoint)
        else:
            self.enter(self.run.step.data)

    def on_evaluate(self, args, state, control, **_):
        self.leave()
        self.enter(self.run.step.checkpoint if control.should_save else self.run.step.data)

    def on_save(self, args, state, control, **_):
        self.leave()
        self.enter(self.run.step.data)

    def on_train_end(self, args, state, control, **_):
        self.leave()
        print(self.run.close())

    def enter(self, span):
        span.__enter__()
        self.open.append(span)

    def leave(self):
        while self.open:
            self.open.pop().__exit__(None, None, None)


def main(steps: int = 40, records: str | None = None) -> measure.Run:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
    )
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, 256, (8 * steps, 32))]
    callback = MeasureCallback(tokens_per_sample=32, records=records)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, max_steps=steps, per_device_train_batch_size=4, gradient_accumulation_steps=2,
            eval_strategy="steps", eval_steps=steps // 2, save_steps=steps // 2, report_to=[], use_cpu=True,
            disable_tqdm=True,
        )  # fmt: skip
        Trainer(
            model=LlamaForCausalLM(config), args=arguments, train_dataset=rows, eval_dataset=rows[:8],
            callbacks=[callback],
        ).train()  # fmt: skip
    return callback.run


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--records", default=None)
    main(**vars(parser.parse_args()))
