#!/usr/bin/env python
"""Supervised fine-tuning with TRL; prompts are ignored by the loss.

    python examples/trl_sft.py                                  # a minute on a CPU
    python examples/trl_sft.py --model /models/gemma-3-270m --length 2048 --batch 8

Without --model, a small random Llama with a tokenizer trained on the spot.
"""

from __future__ import annotations

import argparse
import tempfile

import torch
from datasets import Dataset
from language_models import load
from text import articles
from trl import SFTConfig, SFTTrainer

from flce_tune.integrations.trl import apply

parser = argparse.ArgumentParser(description="Fine-tune a causal language model with SFTTrainer.")
parser.add_argument("--model", help="a folder or name for from_pretrained")
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--batch", type=int, default=4)
parser.add_argument("--length", type=int, default=128)
options = parser.parse_args()

model, tokenizer = load(options.model)

examples = [
    {"prompt": f"What does the manual of Python say about {name}?\n", "completion": text}
    for name, text in articles()[: max(64, options.steps * options.batch)]
]

with tempfile.TemporaryDirectory() as folder:
    arguments = SFTConfig(
        output_dir=folder, max_steps=options.steps, per_device_train_batch_size=options.batch,
        max_length=options.length, learning_rate=1e-3 if options.model is None else 2e-5,
        logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True,
        bf16=torch.cuda.is_available(),
    )  # fmt: skip
    trainer = SFTTrainer(
        model, arguments, train_dataset=Dataset.from_list(examples), processing_class=tokenizer
    )
    apply(trainer)  # the loss without the logits, by the config tuned for this GPU
    trainer.train()
