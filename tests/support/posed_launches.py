"""Launches what a problem's configs launch on a GPU, with CPU tensors posing as its own.

    python posed_launches.py '{"problem": {...}, "configs": [{...}, ...]}'

A program, without the interpreter. It takes the way of a measuring worker, on tensors with storage
and addresses; only the launches themselves do nothing. Prints one JSON line for each kernel: its
name, and whether it was found on disk instead of compiled.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import torch
from host_path import pretend
from triton import knobs

from flce_tune.kernels.config import Config
from flce_tune.kernels.problem import Problem
from flce_tune.sweep.measure import OpBench
from flce_tune.sweep.ragged import ragged_neighbour


def tell(*, src: Any, cache_hit: bool, **_: object) -> None:
    """Print what Triton says of a kernel."""
    print(json.dumps({"kernel": src.fn.__name__, "found": cache_hit}), flush=True)


def main() -> None:
    asked = json.loads(sys.argv[1])
    problem = Problem(**asked["problem"])
    configs = [Config.from_dict(one) for one in asked["configs"]]
    pretend()
    knobs.compilation.listener = tell
    for one in (problem, ragged_neighbour(problem)):
        bench = OpBench(one, torch.device("cpu"), 0)
        for config in configs:
            bench._run(config)


if __name__ == "__main__":
    main()
