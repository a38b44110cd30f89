"""What holds the products back: time, clock and power of each while it runs for some seconds.

    python benchmarks/probes/power_limit.py --shape 4096,4096,128256 --out power_limit.json

The three dense cuBLAS GEMMs by themselves, the first on a weight of zeros too, whose products take
less power, and a step of each config. ``nvidia-smi`` samples the GPU's clock and power meanwhile;
``peak`` is what the tensor cores of a Hopper GPU could do at that clock: 4096 FLOPs a
multiprocessor and cycle.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from cases import Inputs, Shape, make_inputs
from comparison import dense_logit_gradient, forward_backward
from environment import describe, write_json
from implementations import ours_from_configs
from measure import release

from flce_tune.kernels.config import Config
from flce_tune.kernels.problem import Device, Problem, describe_device
from flce_tune.kernels.strategies.common import preferred_tiles
from flce_tune.kernels.strategies.stored import whole_slab

SCHEMA = "flce-tune-power-limit/1"
FIELDS = ("clocks.sm", "power.draw.instant", "clocks_event_reasons.sw_power_cap")
FLOPS_PER_CYCLE = 4096
SETTLED = 0.3  # of the samples are of a clock that is still falling


def watch(work: Callable[[], object], seconds: float) -> dict[str, float]:
    """Repeat some work: its time, and the medians of clock (MHz) and power (W)."""
    work()
    torch.cuda.synchronize()
    sampler = subprocess.Popen(
        ["nvidia-smi", f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits",
         "--id=0", "--loop-ms=50"],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    begin, runs = time.perf_counter(), 0
    while time.perf_counter() - begin < seconds:
        for _ in range(4):
            work()
        torch.cuda.synchronize()
        runs += 4
    taken = time.perf_counter() - begin
    sampler.terminate()
    samples = [line.split(", ") for line in sampler.communicate()[0].splitlines()]
    samples = [sample for sample in samples[int(SETTLED * len(samples)) : -1] if len(sample) == 3]
    return {
        "ms": 1e3 * taken / runs,
        "clock_mhz": statistics.median(float(clock) for clock, _, _ in samples),
        "power_w": statistics.median(float(power) for _, power, _ in samples),
        "power_capped": statistics.mean(cap == "Active" for _, _, cap in samples),
    }


def products(inputs: Inputs) -> dict[str, Callable[[], object]]:
    """The three GEMMs of the floor, and one on zeros."""
    x, weight = inputs.x.detach(), inputs.weight.detach()
    zeros, g = torch.zeros_like(weight), dense_logit_gradient(inputs)
    logits, dx, dw = torch.empty_like(g), torch.empty_like(x), torch.empty_like(weight)
    return {
        "X·Wᵀ, W zero": lambda: torch.mm(x, zeros.T, out=logits),
        "X·Wᵀ": lambda: torch.mm(x, weight.T, out=logits),
        "G·W": lambda: torch.mm(g, weight, out=dx),
        "Gᵀ·X": lambda: torch.mm(g.T, x, out=dw),
    }


def configs(problem: Problem, device: Device) -> list[Config]:
    """One chunk of all tokens, with and without a pass over the logits."""
    tiles = preferred_tiles(problem, device)
    slab = whole_slab(problem.vocab)
    return [
        tiles.config("full"),
        tiles.config("factored", chunk=problem.tokens, slab=slab, accumulator="split24"),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--shape", type=Shape.parse, default=Shape(4096, 4096, 128256), metavar="N,D,V")
    add("--seconds", type=float, default=2.0, help="for each")
    add("--out", type=Path, default=Path("power_limit.json"))
    given = parser.parse_args(argv)
    shape, device = given.shape, torch.device("cuda", 0)
    inputs = make_inputs(shape, "peaked", torch.bfloat16, device)
    flops = 2.0 * shape.tokens * shape.hidden * shape.vocab
    sm_count = describe_device(device).sm_count
    rows: list[dict[str, Any]] = []

    def note(name: str, work: Callable[[], object], gemms: int) -> None:
        row: dict[str, Any] = {"work": name, "gemms": gemms, **watch(work, given.seconds)}
        row["tflops"] = gemms * flops / row["ms"] / 1e9
        row["peak_tflops"] = sm_count * FLOPS_PER_CYCLE * row["clock_mhz"] / 1e6
        rows.append(row)
        print(
            f"{name[:40]:40} {row['ms']:8.3f} ms {row['tflops']:6.0f} TFLOP/s, "
            f"{row['clock_mhz']:.0f} MHz (peak {row['peak_tflops']:.0f}), {row['power_w']:.0f} W",
            flush=True,
        )

    for name, work in products(inputs).items():
        note(name, work, 1)
    release(device)
    problem = Problem(shape.tokens, shape.hidden, shape.vocab)
    for ours in ours_from_configs(configs(problem, describe_device(device)), "fp32"):
        note(ours.name, functools.partial(forward_backward, ours.build(), inputs), 3)
    write_json(
        given.out,
        {"schema": SCHEMA, "environment": describe(device), "shape": str(shape), "rows": rows},
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
