"""Check and time the hand-scheduled GEMMs on a Hopper GPU.

    python benchmarks/probes/pingpong_times.py --time-budget 150 --out pingpong.json

Each kernel and schedule is checked by a process of its own, which is killed if it hangs. Those that
pass are timed in turn with the Triton kernels and cuBLAS, every round in another order, with a cold
L2; a shape by a process of its own. The table counts 2NDV.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from pingpong_problems import KERNELS, TILE, Data

sys.path.insert(0, str(Path(__file__).parents[1]))
from cases import Shape
from environment import describe, write_json
from measure import Deadline

SCHEMA = "flce-tune-pingpong/2"
CASES = [(name, schedule) for name, kernel in KERNELS.items() for schedule in kernel.schedules]
SHAPES = (
    Shape(16384, 1024, 151936),
    Shape(8192, 2304, 256000),
    Shape(16384, 4096, 128256),
    Shape(16384, 4096, 32000),
)
CHECKS = (Shape(2048, 1024, 32768), Shape(336, 208, 5008), Shape(101, 72, 300))
"""Even; ragged, but compiled as the shapes are; ragged, with a bias."""
CHECKS_AT_ONCE = 8


def label(case: int) -> str:
    """What a case is called."""
    name, schedule = CASES[case]
    return f"{name}, {schedule}"


def check(case: int) -> str:
    """What is wrong, or nothing."""
    name, schedule = CASES[case]
    for shape in CHECKS:
        if wrong := KERNELS[name](Data(shape, hard=True)).wrong(schedule):
            return f"{shape}: {wrong}"
    return ""


def time_shape(
    shape: Shape, names: Sequence[str], cases: Sequence[int], deadline: Deadline
) -> None:
    """Print a JSON line per sample, so that a kernel that hangs costs only what follows."""
    data = Data(shape, hard=False)
    x, w = data.inputs.x, data.inputs.weight
    z = torch.empty(data.n, data.width, device="cuda", dtype=torch.bfloat16)
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    works: dict[str, Callable[[], Any]] = {"cuBLAS": lambda: torch.mm(x, w.t(), out=z)}
    for name in names:
        kernel = KERNELS[name](data)
        right = [case for case in cases if CASES[case][0] == name]
        for store in kernel.stores:
            suffix = "" if store else ", nothing stored"
            works[f"{name}, Triton {TILE}{suffix}"] = kernel.compiled(store)
            for case in right if store else right[:1]:
                works[label(case) + suffix] = kernel.scheduled(CASES[case][1], store)
    for round in range(10):
        for name in random.sample(sorted(works), len(works)):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            flush.zero_()
            start.record()
            works[name]()
            end.record()
            end.synchronize()
            if round:  # the first one compiles
                print(json.dumps([name, start.elapsed_time(end)]), flush=True)
        if deadline.remaining < 0 and round:
            break


def child(seconds: float, *words: str) -> tuple[str, str]:
    """Output of this script with other arguments, and why it failed if it did."""
    command = [sys.executable, __file__, *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=max(seconds, 1))
    except subprocess.TimeoutExpired as late:
        output = (late.stdout or b"").decode()
        return output, f"killed after {seconds:.0f} s: it hangs, or compiles too long"
    return done.stdout, "" if done.returncode == 0 else done.stderr[-600:]


def check_all(cases: Sequence[int], deadline: Deadline, patience: float) -> dict[int, str]:
    """Of each case: what is wrong, or nothing."""

    def one(case: int) -> str:
        _, wrong = child(min(patience, deadline.remaining), "--check", str(case))
        print(f"{label(case)}: {wrong or 'correct'}", flush=True)
        return wrong

    with ThreadPoolExecutor(CHECKS_AT_ONCE) as pool:
        return dict(zip(cases, pool.map(one, cases), strict=True))


def rows_of(output: str, flops: float) -> list[dict[str, Any]]:
    """Medians of the samples, the fastest first."""
    samples: dict[str, list[float]] = {}
    for line in output.splitlines():
        if line.endswith("]"):  # whole
            name, ms = json.loads(line)
            samples.setdefault(name, []).append(ms)
    medians = {name: statistics.median(ms) for name, ms in samples.items()}
    return [
        {"name": name, "ms": samples[name], "median_ms": ms, "tflops": flops / ms / 1e9}
        for name, ms in sorted(medians.items(), key=lambda item: item[1])
    ]


def time_all(names: str, right: list[int], deadline: Deadline) -> dict[str, Any]:
    """Rows per shape, the fastest first; prints them."""
    shapes: dict[str, Any] = {}
    for left, shape in zip(range(len(SHAPES), 0, -1), SHAPES, strict=True):
        seconds = deadline.remaining / left
        n, d, v = shape.tokens, shape.hidden, shape.vocab
        output, wrong = child(
            min(deadline.remaining, 1.5 * seconds), "--time", f"{n},{d},{v}", "--kernels", names,
            "--cases", *map(str, right), "--time-budget", f"{seconds * 0.7:.0f}",
        )  # fmt: skip
        rows = rows_of(output, 2.0 * n * d * v)
        print(f"\n{shape} {wrong}")
        for row in rows:
            print(f"{row['median_ms']:9.3f} ms {row['tflops']:6.0f} TFLOP/s  {row['name']}")
        shapes[str(shape)] = {"rows": rows, "failure": wrong}
    return shapes


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--time-budget", type=float, default=150.0, help="seconds")
    parser.add_argument("--patience", type=float, default=60.0, help="seconds a check may take")
    parser.add_argument("--out", type=Path, default=Path("pingpong.json"))
    parser.add_argument("--kernels", default=",".join(KERNELS), help="which, default %(default)s")
    parser.add_argument("--check", type=int, help="check one case, in this process")
    parser.add_argument("--time", type=Shape.parse, help="time one shape, in this process")
    parser.add_argument("--cases", type=int, nargs="*", default=[*range(len(CASES))])
    given = parser.parse_args(argv)
    deadline = Deadline(given.time_budget)
    names = given.kernels.split(",")
    if unknown := set(names) - set(KERNELS):
        parser.error(f"kernels are {', '.join(KERNELS)}, got {', '.join(unknown)}")
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        parser.error("the kernels are for Hopper GPUs, and there is none")
    if given.check is not None:
        sys.exit(check(given.check) or 0)
    if given.time is not None:
        time_shape(given.time, names, given.cases, deadline)
        return 0
    wrong = check_all([c for c in given.cases if CASES[c][0] in names], deadline, given.patience)
    shapes = time_all(given.kernels, [c for c, reason in wrong.items() if not reason], deadline)
    document = {
        "schema": SCHEMA,
        "environment": describe(torch.device("cuda", 0)),
        "checks": {label(case): reason for case, reason in wrong.items()},
        "shapes": shapes,
    }
    write_json(given.out, document)
    return 1 if any(wrong.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
