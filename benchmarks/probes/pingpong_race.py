"""How the hand-scheduled kernels are checked and timed: by processes that may hang."""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from measure import Deadline

CHECKS_AT_ONCE = 8


@dataclass(frozen=True)
class Timing:
    """One GEMM that a process times."""

    name: str
    flops: float
    words: tuple[str, ...]  # of its command line


def child(script: str, seconds: float, *words: str) -> tuple[str, str]:
    """Output of a script with some arguments, and why it failed if it did."""
    command = [sys.executable, script, *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=max(seconds, 1))
    except subprocess.TimeoutExpired as late:
        output = (late.stdout or b"").decode()
        return output, f"killed after {seconds:.0f} s: it hangs, or compiles too long"
    return done.stdout, "" if done.returncode == 0 else done.stderr[-600:]


def check_all(
    script: str,
    cases: Sequence[int],
    label: Callable[[int], str],
    deadline: Deadline,
    patience: float,  # seconds
) -> dict[int, str]:
    """Of each case, which ``--check`` of the script checks: what is wrong, or nothing."""

    def one(case: int) -> str:
        seconds = min(patience, deadline.remaining)
        output, wrong = child(script, seconds, "--check", str(case))
        if wrong and output:
            wrong = f"{wrong} (it had come to {output.splitlines()[-1:]})"
        print(f"{label(case)}: {wrong or 'correct'}", flush=True)
        return wrong

    with ThreadPoolExecutor(CHECKS_AT_ONCE) as pool:
        return dict(zip(cases, pool.map(one, cases), strict=True))


def time_all(script: str, timings: Sequence[Timing], deadline: Deadline) -> dict[str, Any]:
    """Rows per GEMM, the fastest first; prints them."""
    found: dict[str, Any] = {}
    for left, timing in zip(range(len(timings), 0, -1), timings, strict=True):
        seconds = deadline.remaining / left
        budget = ("--time-budget", f"{seconds * 0.7:.0f}")
        patience = min(deadline.remaining, 1.5 * seconds)
        output, wrong = child(script, patience, *timing.words, *budget)
        rows = rows_of(output, timing.flops)
        print(f"\n{timing.name} {wrong}")
        for row in rows:
            print(f"{row['median_ms']:9.3f} ms {row['tflops']:6.0f} TFLOP/s  {row['name']}")
        found[timing.name] = {"rows": rows, "failure": wrong}
    return found


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


def race(works: Mapping[str, Callable[[], Any]], rounds: int, deadline: Deadline) -> None:
    """Print a JSON line per sample, so that a kernel that hangs costs only what follows."""
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    for round in range(rounds):
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


def on_hopper() -> bool:
    """Whether there is a GPU that the kernels are for."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
