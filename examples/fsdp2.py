#!/usr/bin/env python
"""Fully sharded training (FSDP2) of a model whose head is sharded too.

    torchrun --nproc-per-node 2 examples/fsdp2.py               # a minute on a CPU
    torchrun --nproc-per-node 8 examples/fsdp2.py --vocab 128256 --hidden 4096 --layers 16 \
        --length 4096 --batch 2

The head belongs to the root's group of parameters, which FSDP2 gathers once per step; inside
``forward`` its weight is a plain tensor, and the op takes it as it is.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from decoder import Decoder
from text import byte_windows
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

parser = argparse.ArgumentParser(description="Train a decoder sharded over processes.")
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--batch", type=int, default=4, help="windows per process and step")
parser.add_argument("--length", type=int, default=128)
parser.add_argument("--vocab", type=int, default=8192)
parser.add_argument("--hidden", type=int, default=128)
parser.add_argument("--layers", type=int, default=2)
options = parser.parse_args()

on_gpu = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
if on_gpu:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if on_gpu else "gloo")
rank, world = dist.get_rank(), dist.get_world_size()
mesh = dist.init_device_mesh(device.type, (world,))

torch.manual_seed(0)  # the same initial weights everywhere
model = Decoder(options.vocab, options.hidden, options.layers, options.length).to(device)
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if on_gpu else MixedPrecisionPolicy()
for block in model.blocks:
    fully_shard(block, mesh=mesh, mp_policy=policy)
fully_shard(model, mesh=mesh, mp_policy=policy)
optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)

windows = byte_windows(options.length)[rank::world]
torch.manual_seed(1 + rank)
for step in range(options.steps):
    ids = windows[torch.randint(len(windows), (options.batch,))].to(device)
    loss = model(ids)
    loss.backward()  # FSDP averages the gradients over the processes
    optimiser.step()
    optimiser.zero_grad()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    if rank == 0:
        print(f"step {step + 1:3}  loss {float(mean) / world:.4f}", flush=True)
if on_gpu and rank == 0:
    print(f"peak {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB on rank 0")
dist.barrier()  # nobody leaves while others still talk to it
dist.destroy_process_group()
