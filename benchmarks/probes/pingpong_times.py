"""Check and time the hand-scheduled numerators kernel on a Hopper GPU.

    python benchmarks/probes/pingpong_times.py --time-budget 150 --out pingpong.json

Each schedule is checked by a process of its own, which is killed if it hangs. Those that pass are
timed in turn with the Triton kernel and cuBLAS, every round in another order, with a cold L2; a
shape by a process of its own. The table counts 2NDV.
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
from pingpong_schedule import Schedule, arguments, launch
from torch import Tensor

from flce_tune.kernels.config import Tile
from flce_tune.kernels.numerators import HEADROOM, padded
from flce_tune.kernels.triton import numerators as triton_kernels
from flce_tune.kernels.triton.arguments import cdiv
from flce_tune.kernels.values import Inputs, LossSpec

sys.path.insert(0, str(Path(__file__).parents[1]))
from cases import Shape
from environment import describe, write_json
from measure import Deadline

SCHEMA = "flce-tune-pingpong/1"
SLAB = 4096
FACTOR = 1.4426950408889634
TILE = Tile(128, 256, 64, 8, 3, 16)
SCHEDULES = (
    Schedule(64, 256, 64, 4, shared=True, lead=3),
    Schedule(64, 256, 64, 4, shared=True, lead=0),
    Schedule(64, 256, 64, 4, shared=True, lead=1),
    Schedule(64, 256, 64, 4, shared=True, lead=2),
    Schedule(64, 256, 32, 8, shared=True, lead=4),
    Schedule(64, 256, 32, 8, shared=True, lead=6),
    Schedule(64, 256, 64, 4, shared=True, lead=3, group=8),
    Schedule(64, 256, 64, 4, shared=True, lead=3, group=32),
    Schedule(128, 128, 64, 5, shared=False),
    Schedule(64, 256, 64, 4, shared=False),
)
SHAPES = (
    Shape(16384, 1024, 151936),
    Shape(8192, 2304, 256000),
    Shape(16384, 4096, 128256),
    Shape(16384, 4096, 32000),
)
CHECKS = (Shape(2048, 1024, 32768), Shape(333, 200, 5003), Shape(100, 64, 300))
CHECKS_AT_ONCE = 4


class Problem:
    """Inputs and reusable outputs of one shape."""

    def __init__(self, shape: Shape, label_spread: bool) -> None:
        self.n, self.width = shape.tokens, shape.vocab
        device = torch.device("cuda")
        generator = torch.Generator(device).manual_seed(0)

        def normal(*size: int) -> Tensor:
            return torch.randn(*size, generator=generator, device=device, dtype=torch.bfloat16)

        self.x, self.w = normal(self.n, shape.hidden), normal(self.width, shape.hidden)
        self.w *= 4 / shape.hidden**0.5
        self.reference = torch.zeros(self.n, device=device)
        if label_spread:  # rows without a label, and rows whose tiles take their own reference
            self.reference[::3] = torch.nan
            self.reference[1::5] = -100.0
        self.programs = torch.cuda.get_device_properties(device).multi_processor_count
        rows = cdiv(self.width, SLAB) * padded(self.n)
        self.out = torch.empty(rows, SLAB, device=device, dtype=torch.bfloat16)

    def tables(self, v_block: int) -> tuple[Tensor, Tensor]:
        """References and totals per tile, poisoned."""
        size = (2, cdiv(self.width, v_block), self.n)
        return torch.full(size, torch.nan, device="cuda").unbind()

    def scheduled(self, schedule: Schedule, store: bool = True) -> tuple[Callable[[], None], Any]:
        """The hand-scheduled kernel and its tables."""
        tables = self.tables(schedule.v_block)
        out = self.out if store else None
        given = arguments(
            schedule, self.x, self.w, self.reference, FACTOR, out, padded(self.n), SLAB, *tables
        )
        return lambda: launch(schedule, given, self.n, self.width, self.programs), tables

    def compiled(self, store: bool = True) -> tuple[Callable[[], None], Any]:
        """The Triton kernel and its tables."""
        tables = self.tables(TILE.v_block)
        inputs = Inputs(self.x, self.w, torch.zeros(self.n, device="cuda", dtype=torch.int64))
        out = self.out if store else None

        def run() -> None:
            triton_kernels.numerators(
                inputs, slice(0, self.width), self.reference, self.reference, LossSpec(), out,
                padded(self.n), SLAB, *tables, TILE,
            )  # fmt: skip

        return run, tables

    def stored(self) -> Tensor:  # [n, v]
        """Numerators, from their blocks."""
        blocks = self.out.view(-1, padded(self.n), SLAB)[:, : self.n]
        return blocks.transpose(0, 1).reshape(self.n, -1)[:, : self.width]


def check(schedule: Schedule, shape: Shape) -> str:
    """What is wrong, or nothing."""
    problem = Problem(shape, label_spread=True)
    theirs, their_tables = problem.compiled()
    problem.out.fill_(torch.nan)
    theirs()
    their_e = problem.stored()
    ours, (reference, total) = problem.scheduled(schedule)
    problem.out.fill_(torch.nan)
    ours()
    torch.cuda.synchronize()
    bits = problem.x.float() @ problem.w.float().t() * FACTOR
    width = len(reference) * schedule.v_block
    bits = torch.nn.functional.pad(bits, (0, width - problem.width), value=-torch.inf)
    parts = bits.view(problem.n, -1, schedule.v_block)
    largest, given = parts.amax(2), problem.reference[:, None]
    expected = torch.where(largest <= given + HEADROOM, given, largest.ceil())
    if (share := (expected == reference.t()).float().mean().item()) < 0.999:
        return f"{1 - share:.2%} of the references differ"
    e = torch.exp2(parts - reference.t()[:, :, None])
    if not torch.allclose(total.t(), e.sum(2), rtol=1e-3):
        return "sums differ"
    stored, e = problem.stored().float(), e.view(problem.n, -1)[:, : problem.width]
    if not torch.allclose(stored, e, rtol=6e-3, atol=1e-30):
        return "numerators differ"
    if schedule.v_block == TILE.v_block:
        same = (reference == their_tables[0]).t().repeat_interleave(TILE.v_block, 1)
        close = torch.isclose(stored, their_e.float(), rtol=2**-7, atol=1e-30)
        if not (close | ~same[:, : problem.width]).all():
            return "numerators are not the Triton kernel's"
    merged, their = (triton_kernels.merge(*t) for t in ((reference, total), their_tables))
    return "" if torch.allclose(merged.lse, their.lse, rtol=1e-5) else "lse differs"


def time_shape(shape: Shape, schedules: Sequence[Schedule], deadline: Deadline) -> None:
    """Print a JSON line per sample, so that a kernel that hangs costs only what follows."""
    problem = Problem(shape, label_spread=False)
    z = torch.empty(problem.n, problem.width, device="cuda", dtype=torch.bfloat16)
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    works: dict[str, Callable[[], Any]] = {
        "cuBLAS": lambda: torch.mm(problem.x, problem.w.t(), out=z),
        f"Triton {TILE}": problem.compiled()[0],
        f"Triton {TILE}, nothing stored": problem.compiled(store=False)[0],
    }
    for schedule in schedules:
        works[str(schedule)] = problem.scheduled(schedule)[0]
    if schedules:
        works[f"{schedules[0]}, nothing stored"] = problem.scheduled(schedules[0], store=False)[0]
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


def check_all(deadline: Deadline, patience: float) -> list[str]:
    """Of each schedule: what is wrong, or nothing."""

    def one(index: int) -> str:
        _, wrong = child(min(patience, deadline.remaining), "--check", str(index))
        print(f"{SCHEDULES[index]}: {wrong or 'correct'}", flush=True)
        return wrong

    with ThreadPoolExecutor(CHECKS_AT_ONCE) as pool:
        return list(pool.map(one, range(len(SCHEDULES))))


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


def time_all(deadline: Deadline, right: list[int]) -> dict[str, Any]:
    """Rows per shape, the fastest first; prints them."""
    shapes: dict[str, Any] = {}
    for left, shape in zip(range(len(SHAPES), 0, -1), SHAPES, strict=True):
        seconds = deadline.remaining / left
        n, d, v = shape.tokens, shape.hidden, shape.vocab
        output, wrong = child(
            min(deadline.remaining, 1.5 * seconds), "--time", f"{n},{d},{v}",
            "--schedules", *map(str, right), "--time-budget", f"{seconds * 0.7:.0f}",
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
    parser.add_argument("--check", type=int, help="check one schedule, in this process")
    parser.add_argument("--time", type=Shape.parse, help="time one shape, in this process")
    parser.add_argument("--schedules", type=int, nargs="*", default=[*range(len(SCHEDULES))])
    given = parser.parse_args(argv)
    deadline = Deadline(given.time_budget)
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        parser.error("the kernel is for Hopper GPUs, and there is none")
    if given.check is not None:
        for shape in CHECKS:
            if wrong := check(SCHEDULES[given.check], shape):
                sys.exit(f"{shape}: {wrong}")
        return 0
    if given.time is not None:
        time_shape(given.time, [SCHEDULES[i] for i in given.schedules], deadline)
        return 0
    wrong = check_all(deadline, given.patience)
    shapes = time_all(deadline, [i for i, reason in enumerate(wrong) if not reason])
    document = {
        "schema": SCHEMA,
        "environment": describe(torch.device("cuda", 0)),
        "checks": dict(zip(map(str, SCHEDULES), wrong, strict=True)),
        "shapes": shapes,
    }
    write_json(given.out, document)
    return 1 if any(wrong) else 0


if __name__ == "__main__":
    sys.exit(main())
