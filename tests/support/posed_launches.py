"""Launches what a problem's configs launch on a GPU, with CPU tensors posing as its own.

    python posed_launches.py

A program, without the interpreter. It takes the way of a measuring worker, on tensors with storage
and addresses; only the launches themselves do nothing. Each line of its input is a question,
``{"cache": folder, "problem": {...}, "configs": [{...}, ...]}``, answered in a process of its own:
one JSON line for each kernel, its name and whether it was found on disk instead of compiled, and a
last line, ``{"status": 0}``.
"""

from __future__ import annotations

import json
import multiprocessing
import os
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


def launch(asked: dict[str, Any]) -> None:
    """Answer a question."""
    os.environ["TRITON_CACHE_DIR"] = asked["cache"]
    problem = Problem(**asked["problem"])
    configs = [Config.from_dict(one) for one in asked["configs"]]
    pretend()
    knobs.compilation.listener = tell
    for one in (problem, ragged_neighbour(problem)):
        bench = OpBench(one, torch.device("cpu"), 0)
        for config in configs:
            bench._run(config)


def main() -> None:
    torch.set_num_threads(1)  # so that a process may be forked
    for line in sys.stdin:
        context = multiprocessing.get_context("fork")
        one = context.Process(target=launch, args=(json.loads(line),))
        one.start()
        one.join()
        print(json.dumps({"status": one.exitcode}), flush=True)


if __name__ == "__main__":
    main()
