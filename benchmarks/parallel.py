#!/usr/bin/env python
"""A vocabulary split over the GPUs of a host, beside one GPU and beside Megatron-core's loss.

    python benchmarks/parallel.py --out benchmarks/results/parallel-h200x2.json
    python benchmarks/parallel.py --table benchmarks/results/parallel-h200x2.json

One process per GPU; forward and backward, bfloat16, interleaved rounds, the slowest rank's time,
medians. A profile of a few steps gives the time in collectives, and how much of it nothing else
hides. Megatron-core's part needs the package ``megatron-core``.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from cases import Shape
from environment import describe, write_json
from measure import GIB, Stopwatch, half_quartile_range, peak_above, release
from parallel_steps import SPLIT, WHOLE, Part, Step, steps
from parallel_trace import collective_times

from flce_tune import linear_cross_entropy
from flce_tune.kernels.parallel.choice import choose
from flce_tune.kernels.problem import Problem, describe_device

SCHEMA = "flce-tune-parallel/1"


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--shape", type=Shape.parse, default=Shape.parse("8192,4096,128256"), help="N,D,V")
    add("--ranks", type=int, default=2)
    add("--rounds", type=int, default=15)
    add("--time-budget", type=float, default=100.0, help="seconds; less of it, fewer rounds")
    add("--only", action="append", help="ways whose name contains this, beside one GPU; repeatable")
    add("--cpu", action="store_true", help="gloo on the CPU, to try it without GPUs")
    add("--table", type=Path, help="print the table of a JSON file, and nothing else")
    add("--out", type=Path, default=Path("parallel.json"))
    return parser.parse_args(argv)


def work(rank: int, arguments: argparse.Namespace, rendezvous: str) -> None:
    """One rank; the first writes the results."""
    end = time.monotonic() + arguments.time_budget
    device = torch.device("cpu") if arguments.cpu else torch.device("cuda", rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "gloo" if arguments.cpu else "cpu:gloo,cuda:nccl",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=arguments.ranks,
        timeout=timedelta(seconds=60),
    )
    group = dist.group.WORLD
    assert group is not None
    part = Part.make(arguments.shape, group, device)
    ways: dict[str, Step] = {WHOLE: whole(part), **dict(steps(part))}
    if not arguments.cpu:
        alone = dist.new_group(backend="nccl")
        ways["split: linear_cross_entropy, group without a CPU backend"] = lambda: (
            linear_cross_entropy(part.x, part.weight, part.target, process_group=alone)
        )
    if arguments.only:
        ways = {n: s for n, s in ways.items() if n == WHOLE or any(o in n for o in arguments.only)}
    rows = {name: first_run(part, name, step, device) for name, step in ways.items()}
    failed = [name for name, row in rows.items() if "failed" in row]
    for name in failed:
        del ways[name]
    for name, samples in race(part, ways, arguments.rounds, end, device).items():
        rows[name]["ms"] = statistics.median(samples)
        rows[name]["spread_ms"] = half_quartile_range(samples)
        rows[name]["rounds"] = len(samples)
    n, d, v = arguments.shape.tokens, arguments.shape.hidden, arguments.shape.vocab
    config = choose(Problem(n, d, v // arguments.ranks), describe_device(device), None)
    rows.get(SPLIT, {})["config"] = str(config)
    write = functools.partial(save, arguments, rank, device, rows)
    write()
    for name in ways:
        if device.type == "cuda":
            rows[name] |= collective_times(functools.partial(one, part, ways[name]), device)
    write()
    dist.barrier()
    dist.destroy_process_group()


def save(
    arguments: argparse.Namespace,
    rank: int,
    device: torch.device,
    rows: dict[str, dict[str, Any]],
) -> None:
    """Write what there is so far, from the first rank."""
    if rank:
        return
    write_json(arguments.out, {
        "schema": SCHEMA,
        "environment": describe(device),
        "shape": str(arguments.shape),
        "ranks": arguments.ranks,
        "rows": [{"name": name} | row for name, row in rows.items()],
    })  # fmt: skip


def whole(part: Part) -> Step:
    """The unsplit problem on each GPU by itself."""
    weight = torch.empty(
        part.weight.shape[0] * part.group.size(), part.weight.shape[1],
        dtype=part.weight.dtype, device=part.weight.device,
    )  # fmt: skip
    dist.all_gather_into_tensor(weight, part.weight.detach(), group=part.group)
    weight.requires_grad_()

    def step() -> torch.Tensor:
        weight.grad = None
        loss = linear_cross_entropy(part.x, weight, part.target)
        assert isinstance(loss, torch.Tensor)
        return loss

    return step


def one(part: Part, step: Step) -> torch.Tensor:
    """One step from scratch."""
    part.clear()
    loss = step()
    loss.backward()
    return loss.detach()


def first_run(part: Part, name: str, step: Step, device: torch.device) -> dict[str, Any]:
    """The loss, the memory and the host's time of one step; or why there is none."""
    try:
        loss = float(one(part, step))
        one(part, step)
        release(device)
        part.clear()
        peak = peak_above(lambda: one(part, step), device)
        begin = time.perf_counter()
        step()
        host = (time.perf_counter() - begin) * 1e3
    except Exception as error:  # noqa: BLE001 the others count
        print(f"{name}: {error}", file=sys.stderr, flush=True)
        return {"failed": f"{type(error).__name__}: {error}"[:500]}
    return {"loss": loss, "peak_bytes": peak, "forward_host_ms": host}


def race(
    part: Part, ways: dict[str, Step], rounds: int, end: float, device: torch.device
) -> dict[str, list[float]]:
    """Milliseconds of each way and round, the slowest rank's."""
    watch = Stopwatch(device, products=40)  # the ranks agree on the host before each call
    samples: dict[str, list[float]] = {name: [] for name in ways}
    order = random.Random(0)  # the same on every rank
    for _ in range(rounds):
        for name, step in order.sample(list(ways.items()), len(ways)):
            dist.barrier()
            measured = torch.tensor([watch.time(lambda step=step: one(part, step))], device=device)
            dist.all_reduce(measured, op=dist.ReduceOp.MAX)
            samples[name].append(float(measured))
        left = torch.tensor([end - time.monotonic()], device=device)
        dist.all_reduce(left, op=dist.ReduceOp.MIN)
        if float(left) < 20.0:
            break
    return samples


def table(document: dict[str, Any]) -> str:
    """For a terminal or a page."""
    rows = {row["name"]: row for row in document["rows"]}
    alone = rows.get(WHOLE, {}).get("ms")
    config = rows.get(SPLIT, {}).get("config")
    lines = [
        f"{document['shape']}, {document['ranks']} ranks, config {config}",
        "",
        "| | ms | times one GPU | GiB per rank above x and its rows | collectives, ms (exposed) |"
        " idle, ms | host, ms | loss |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        if "failed" in row:
            lines.append(f"| {name} | failed: {row['failed']} | | | | | | |")
            continue
        faster = f"{alone / row['ms']:.3f}" if alone else ""
        memory = "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / GIB:.2f}"
        sent = idle = ""
        if "collective_ms" in row:
            sent = f"{row['collective_ms']:.2f} ({row['exposed_ms']:.2f})"
            idle = f"{row['idle_ms']:.2f}"
        lines.append(
            f"| {name} | {row['ms']:.2f} ± {row['spread_ms']:.2f} | {faster} | {memory} | {sent} | "
            f"{idle} | {row['forward_host_ms']:.1f} | {row['loss']:.4f} |"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    if arguments.table is not None:
        print(table(json.loads(arguments.table.read_text())))
        return 0
    if not arguments.cpu and torch.cuda.device_count() < arguments.ranks:
        print(f"needs {arguments.ranks} GPUs, here are {torch.cuda.device_count()}; --cpu tries it",
              file=sys.stderr)  # fmt: skip
        return 2
    with tempfile.TemporaryDirectory() as folder:
        context = mp.spawn(
            work, (arguments, f"{folder}/rendezvous"), nprocs=arguments.ranks, join=False
        )
        if not _joined(context.join, arguments.time_budget + 15.0):
            for process in context.processes:
                process.kill()
            print("gave up: a rank hangs, or --time-budget is too short", file=sys.stderr)
            return 1
    print(table(json.loads(arguments.out.read_text())))
    return 0


def _joined(join: Callable[..., bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if join(timeout=1.0):
            return True
    return False


if __name__ == "__main__":
    sys.exit(main())
