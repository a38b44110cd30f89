#!/usr/bin/env python
"""Hugging Face's Trainer with a patched model: one line more than without.

    python examples/hf_trainer.py                               # a minute on a CPU
    python examples/hf_trainer.py --model /models/gemma-3-270m --length 2048 --batch 8

Without --model, a small random Llama with a tokenizer trained on the spot.
"""

from __future__ import annotations

import argparse
import tempfile

import torch
from language_models import load
from text import articles
from transformers import Trainer, TrainingArguments

from flce_tune.integrations.transformers import apply

parser = argparse.ArgumentParser(description="Train a causal language model with Trainer.")
parser.add_argument("--model", help="a folder or name for from_pretrained")
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--batch", type=int, default=4)
parser.add_argument("--length", type=int, default=128)
options = parser.parse_args()

model, tokenizer = load(options.model)
apply(model)  # the loss without the logits

ids = tokenizer("\n\n".join(text for _, text in articles()[:100])).input_ids
starts = range(0, len(ids) - options.length, options.length)
windows = [ids[start : start + options.length] for start in starts]
dataset = [{"input_ids": window, "labels": window} for window in windows]

with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder, max_steps=options.steps, per_device_train_batch_size=options.batch,
        gradient_accumulation_steps=2, learning_rate=1e-3 if options.model is None else 2e-5,
        logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True,
        bf16=torch.cuda.is_available(),
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=dataset[32:], eval_dataset=dataset[:32])
    trainer.train()
    print(trainer.evaluate())
