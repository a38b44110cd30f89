"""What the tuner's benchmarks share: sweeps into fresh databases, and configs side by side."""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from flce_tune.cli.views import device_view, problem_view
from flce_tune.dispatch.convert import device_record, toolchain_record
from flce_tune.kernels.config import Config
from flce_tune.kernels.problem import Problem, describe_device
from flce_tune.sweep.events import ProblemReport, SweepOptions
from flce_tune.sweep.interval import FEWEST, median_interval
from flce_tune.sweep.measure import OpBench
from flce_tune.sweep.presets import PRESETS
from flce_tune.sweep.race import interleave
from flce_tune.sweep.sweep import sweep
from flce_tune.sweep.worker import Worker
from flce_tune.tuning_db.store import Store

TIMEOUT_S = 60.0


def device() -> torch.device:
    """The first GPU, or the CPU where there is none."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def parser(description: str | None) -> argparse.ArgumentParser:
    """A parser whose help is a script's description."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def add_problem(parser: argparse.ArgumentParser) -> None:
    """Add the options that name one problem, and where the result goes."""
    parser.add_argument("--preset", choices=PRESETS, default="llama3-8b")
    parser.add_argument("--tokens", type=int, help="default: the preset's first")
    parser.add_argument("--out", type=Path, help="a JSON file to write")


def problem_of(arguments: argparse.Namespace) -> Problem:
    """The problem that the options name."""
    preset = PRESETS[arguments.preset]
    return Problem(
        arguments.tokens or preset.tokens[0],
        preset.hidden,
        preset.vocab,
        dtype=preset.dtype,
        features=preset.features,
    )


def fresh_sweep(
    problem: Problem, options: SweepOptions, store: Store | None = None
) -> ProblemReport:
    """Sweep one problem into a store, by default a new one that is thrown away."""
    if store is not None:
        return sweep([problem], store, device(), options).problems[0]
    with (
        tempfile.TemporaryDirectory() as folder,
        Store.open(f"sqlite:///{folder}/tuning.sqlite3") as fresh,
    ):
        return fresh_sweep(problem, options, fresh)


def side_by_side(
    problem: Problem, configs: Sequence[Config], seconds: float = 15.0
) -> dict[Config, tuple[float, ...]]:
    """Time configs in turns, in one process; samples in ms, as many rounds as there is time for."""
    worker = Worker(OpBench, problem, device(), seed=1)
    try:

        def run(config: Config) -> float:
            ms: float = worker.call("time", config, timeout_s=TIMEOUT_S)
            return ms

        for config in configs:
            worker.call("trial", config, timeout_s=TIMEOUT_S)
        round_ms = sum(map(run, configs))
        return interleave(configs, max(FEWEST, min(25, int(seconds * 1e3 / round_ms))), run)
    finally:
        worker.close()


def summary(samples: Sequence[float]) -> str:
    """Median and 95 % interval."""
    interval = median_interval(samples)
    bounds = "" if interval is None else f" [{interval[0]:.3f}, {interval[1]:.3f}]"
    return f"{statistics.median(samples):.3f}{bounds} ms"


def say(line: str) -> None:
    """Print at once, for whoever watches or cuts the run short."""
    print(line, flush=True)


def write(path: Path | None, problem: Problem, results: dict[str, Any]) -> None:
    """Write results with what they were measured on; None: nowhere."""
    if path is None:
        return
    tools = toolchain_record(device())
    document = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join(["python", *sys.argv]),
        "device": device_view(device_record(describe_device(device()))),
        "toolchain": {name: getattr(tools, name) for name in ("torch", "triton", "cuda", "driver")},
        "problem": problem_view(problem),
        **results,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
