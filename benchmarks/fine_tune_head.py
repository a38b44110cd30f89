#!/usr/bin/env python
"""Loss curves of a trained head with and without ``tile_skip``.

    python benchmarks/fine_tune_head.py --states states-0.npz states-1.npz --steps 300

Fine-tunes a model's head, and an adapter before it (h + A·h, A from zero), on what ``trained.py
--save`` wrote: the body is frozen, so its hidden states are the data. The same batches in the same
order, float32 weights, bfloat16 products; AdamW. Some tokens are kept aside, and their loss is
that of dense evaluations.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from cases import Inputs
from environment import default_device, describe, write_json
from measure import Deadline
from states import unpack
from torch import Tensor

from flce_tune import linear_cross_entropy

SCHEMA = "flce-tune-fine-tune-head/1"
HELD_OUT = 2048  # tokens
EVERY = 25  # steps, between looks at them


class Model(torch.nn.Module):
    """An adapter and a head."""

    def __init__(self, head: Tensor) -> None:
        super().__init__()
        hidden = head.shape[1]
        self.adapter = torch.nn.Parameter(torch.zeros(hidden, hidden, device=head.device))
        self.head = torch.nn.Parameter(head.detach().float().clone())

    def forward(self, x: Tensor, target: Tensor, tile_skip: float | None) -> Tensor:
        h = (x.float() + x.float() @ self.adapter).to(x.dtype)
        return linear_cross_entropy(h, self.head.to(x.dtype), target, tile_skip=tile_skip)


def curve(
    inputs: Inputs, tile_skip: float | None, arguments: argparse.Namespace, deadline: Deadline
) -> dict[str, Any]:
    """Losses of every step, and of the tokens kept aside."""
    generator = torch.Generator().manual_seed(0)
    x, target = inputs.x.detach(), inputs.target
    model = Model(inputs.weight)
    optimiser = torch.optim.AdamW(model.parameters(), lr=arguments.learning_rate)
    losses, aside, times = [], [], []
    for step in range(arguments.steps):
        if deadline.remaining < 0:
            break
        if step % EVERY == 0:
            with torch.no_grad():
                aside.append(float(model(x[:HELD_OUT], target[:HELD_OUT], None)))
        some = HELD_OUT + torch.randperm(len(x) - HELD_OUT, generator=generator)
        some = some[: arguments.batch].to(x.device)
        begin = time.perf_counter()
        loss = model(x[some], target[some], tile_skip)
        loss.backward()
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        losses.append(loss.item())
        times.append((time.perf_counter() - begin) * 1e3)
    with torch.no_grad():
        aside.append(float(model(x[:HELD_OUT], target[:HELD_OUT], None)))
    return {"losses": losses, "held_out": aside, "step_ms": sorted(times)[len(times) // 2]}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add = parser.add_argument
    add("--states", type=Path, nargs="+", required=True)
    add("--steps", type=int, default=300)
    add("--batch", type=int, default=2048, help="tokens a step")
    add("--learning-rate", type=float, default=1e-4)
    add("--tolerance", type=float, default=1e-4)
    add("--time-budget", type=float, default=240.0)
    add("--device", type=torch.device, default=None)
    add("--out", type=Path, default=Path("fine_tune_head.json"))
    arguments = parser.parse_args(argv)
    device, deadline = arguments.device or default_device(), Deadline(arguments.time_budget)
    inputs = unpack(arguments.states, torch.bfloat16, device)
    runs = {
        "dense": curve(inputs, None, arguments, deadline),
        "tile_skip": curve(inputs, arguments.tolerance, arguments, deadline),
    }
    dense, skipped = (torch.tensor(run["losses"]) for run in runs.values())
    both = min(len(dense), len(skipped))
    apart = (dense[:both] - skipped[:both]).abs()
    write_json(
        arguments.out,
        {
            "schema": SCHEMA,
            "environment": describe(device),
            "shape": [arguments.batch, *reversed(inputs.weight.shape)],
            "tolerance": arguments.tolerance,
            "learning_rate": arguments.learning_rate,
            "runs": runs,
            "largest_difference": float(apart.max()),
            "mean_difference": float(apart.mean()),
        },
    )
    for name, run in runs.items():
        losses, aside = run["losses"], run["held_out"]
        print(
            f"{name}: loss {losses[0]:.4f} to {losses[-1]:.4f}, held out {aside[0]:.4f} to"
            f" {aside[-1]:.4f}, {run['step_ms']:.1f} ms a step"
        )
    print(f"apart: at most {float(apart.max()):.1e}, {float(apart.mean()):.1e} on average")
    return 0


if __name__ == "__main__":
    sys.exit(main())
