#!/usr/bin/env python
"""A plain training loop with gradient accumulation.

    python examples/plain_torch.py                              # a minute on a CPU
    python examples/plain_torch.py --vocab 128256 --hidden 2048 --layers 16 --length 4096 --batch 8

The text is tokenised into bytes, whatever --vocab is: that only sizes the head.
"""

from __future__ import annotations

import argparse
import time

import torch
from decoder import Decoder
from text import byte_windows

parser = argparse.ArgumentParser(description="Train a small decoder on the manual of Python.")
parser.add_argument("--steps", type=int, default=30)
parser.add_argument("--batch", type=int, default=8, help="windows per step")
parser.add_argument("--micro-batch", type=int, default=4, help="windows per forward")
parser.add_argument("--length", type=int, default=128)
parser.add_argument("--vocab", type=int, default=8192)
parser.add_argument("--hidden", type=int, default=128)
parser.add_argument("--layers", type=int, default=2)
options = parser.parse_args()

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
model = Decoder(options.vocab, options.hidden, options.layers, options.length).to(device)
optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
windows = byte_windows(options.length)
tokens = options.batch * (options.length - 1)  # that have a label, in all micro-batches

for step in range(options.steps):
    begin = time.perf_counter()
    rows = torch.randint(len(windows), (options.batch,))
    total = 0.0
    for part in windows[rows].split(options.micro_batch):
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
            # the gradients of all micro-batches add up to those of the whole batch's mean
            loss = model(part.to(device), divisor=tokens)
        loss.backward()
        total += loss.detach()
    optimiser.step()
    optimiser.zero_grad()
    seconds = time.perf_counter() - begin
    print(f"step {step + 1:3}  loss {float(total):.4f}  {seconds * 1e3:.0f} ms", flush=True)
if device.type == "cuda":
    print(f"peak {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")
