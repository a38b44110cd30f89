#!/usr/bin/env python
"""Which kernels a step's time goes to, config by config, beside the three dense GEMMs.

    python benchmarks/step_kernels.py --shape 4096,4096,128256 --configs CONFIGS.json

Forward and backward of the mean loss on trained-like logits and the floor take turns under torch's
profiler, so that both run in the same heat; times are a step's. Prints the largest kernels of each.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from cases import Shape, make_inputs
from comparison import Floor, forward_backward
from environment import default_device, describe, write_json
from implementations import Loss, ours_from_configs
from measure import release
from torch.profiler import ProfilerActivity, profile, record_function

from flce_tune.kernels.config import Config

SCHEMA = "flce-tune-step-kernels/1"
LARGEST = 12  # kernels printed


def kernel_times(step: Callable[[], Any], device: torch.device, steps: int) -> list[dict[str, Any]]:
    """Time on the device of each kernel of a step, the largest first."""
    on_gpu = device.type == "cuda"
    kind = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    step()
    release(device)
    with profile(activities=[kind]) as profiler:
        for _ in range(steps):
            with record_function("step"):
                step()
        if on_gpu:
            torch.cuda.synchronize(device)
    rows = []
    for event in profiler.key_averages():
        spent = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        if spent > 0 and event.key != "step":
            rows.append(
                {"kernel": event.key, "ms": spent / steps / 1e3, "launches": event.count / steps}
            )
    return sorted(rows, key=lambda row: -row["ms"])


def table(name: str, rows: Sequence[dict[str, Any]]) -> str:
    """The largest kernels, and their sum."""
    lines = [name, f"  {sum(row['ms'] for row in rows):9.3f} ms in all"]
    lines += [
        f"  {row['ms']:9.3f} ms {row['launches']:6.1f} × {row['kernel'][:80]}"
        for row in rows[:LARGEST]
    ]
    return "\n".join(lines)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add = parser.add_argument
    add("--shape", type=Shape.parse, required=True, metavar="N,D,V")
    add("--configs", type=Path, required=True, help="JSON list of configs")
    add("--accumulate", choices=("fp32", "weight_dtype"), default="fp32")
    add("--steps", type=int, default=6)
    add("--device", type=torch.device, default=None)
    add("--out", type=Path, default=Path("step_kernels.json"))
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    device = arguments.device or default_device()
    inputs = make_inputs(arguments.shape, "peaked", torch.bfloat16, device)
    floor = Floor(inputs)
    results = []
    configs = [Config.from_dict(entry) for entry in json.loads(arguments.configs.read_text())]
    for ours in ours_from_configs(configs, arguments.accumulate):
        loss = ours.build()

        def step(loss: Loss = loss) -> None:
            forward_backward(loss, inputs)
            floor()

        rows = kernel_times(step, device, arguments.steps)
        print(table(ours.name, rows), flush=True)
        results.append({"config": ours.details["config"], "kernels": rows})
    document = {
        "schema": SCHEMA,
        "environment": describe(device),
        "shape": str(arguments.shape),
        "accumulate": arguments.accumulate,
        "steps": arguments.steps,
        "results": results,
    }
    write_json(arguments.out, document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
