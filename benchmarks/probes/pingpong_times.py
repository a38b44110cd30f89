"""Check and time the hand-scheduled GEMMs on a Hopper GPU.

    python benchmarks/probes/pingpong_times.py --time-budget 150 --out pingpong.json

Each kernel and schedule is checked by a process of its own, which is killed if it hangs. Those that
pass are timed in turn with the Triton kernels and cuBLAS, every round in another order, with a cold
L2; a shape by a process of its own. The table counts 2NDV.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from pingpong_problems import KERNELS, TILE, Data
from pingpong_race import Timing, check_all, on_hopper, race, time_all

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
    """Print a JSON line per sample of every kernel, and of cuBLAS."""
    data = Data(shape, hard=False)
    x, w = data.inputs.x, data.inputs.weight
    z = torch.empty(data.n, data.width, device="cuda", dtype=torch.bfloat16)
    works: dict[str, Callable[[], Any]] = {"cuBLAS": lambda: torch.mm(x, w.t(), out=z)}
    for name in names:
        kernel = KERNELS[name](data)
        right = [case for case in cases if CASES[case][0] == name]
        for store in kernel.stores:
            suffix = "" if store else ", nothing stored"
            works[f"{name}, Triton {TILE}{suffix}"] = kernel.compiled(store)
            for case in right if store else right[:1]:
                works[label(case) + suffix] = kernel.scheduled(CASES[case][1], store)
    race(works, 10, deadline)


def timings(names: str, right: Sequence[int]) -> list[Timing]:
    """Each shape, for a process of its own."""
    found = []
    for shape in SHAPES:
        n, d, v = shape.tokens, shape.hidden, shape.vocab
        words = ("--time", f"{n},{d},{v}", "--kernels", names, "--cases", *map(str, right))
        found.append(Timing(str(shape), 2.0 * n * d * v, words))
    return found


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
    if not on_hopper():
        parser.error("the kernels are for Hopper GPUs, and there is none")
    if given.check is not None:
        sys.exit(check(given.check) or 0)
    if given.time is not None:
        time_shape(given.time, names, given.cases, deadline)
        return 0
    cases = [case for case in given.cases if CASES[case][0] in names]
    wrong = check_all(__file__, cases, label, deadline, given.patience)
    right = [case for case, reason in wrong.items() if not reason]
    document = {
        "schema": SCHEMA,
        "environment": describe(torch.device("cuda", 0)),
        "checks": {label(case): reason for case, reason in wrong.items()},
        "shapes": time_all(__file__, timings(given.kernels, right), deadline),
    }
    write_json(given.out, document)
    return 1 if any(wrong.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
