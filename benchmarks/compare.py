#!/usr/bin/env python
"""Compare flce-tune with plain PyTorch and its peers: time, memory and accuracy side by side.

One process, interleaved rounds, medians; forward and backward of the mean loss. Writes JSON and
prints a table per shape and kind of data. ``plot.py`` draws the figures from the JSON.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from cases import DATA_KINDS, DEFAULT_SHAPES, Shape
from comparison import Comparison, Contestant
from environment import default_device, describe, write_json
from implementations import OURS, Implementation, ours, ours_from_configs, parse_size, peers
from measure import GIB, Deadline, OutOfTime

from flce_tune.kernels.config import Config
from flce_tune.kernels.problem import DTYPES

SCHEMA = "flce-tune-comparison/1"
FAMILIES = (*(peer.family for peer in peers(DEFAULT_SHAPES[0])), *OURS)
DEFAULT_LIMITS = "128MiB,256MiB,512MiB,1GiB,2GiB,3GiB,4GiB,none"
LAST_GRACE = 20.0  # seconds past the budget after which a hung device call is cut off


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add = parser.add_argument
    add("--shape", action="append", type=Shape.parse, metavar="N,D,V", help="repeatable")
    add("--data", default=",".join(DATA_KINDS), help=f"of {DATA_KINDS}, comma-separated")
    add("--implementations", default=",".join(FAMILIES), help=f"of {FAMILIES}")
    add("--workspace-limits", default=DEFAULT_LIMITS, help="where the dispatcher is asked")
    add("--configs", type=Path, help="JSON list of configs to run as well, as ours_configs")
    add("--accumulate", choices=("fp32", "weight_dtype"), default="fp32", help="for --configs")
    add("--dtype", choices=sorted(DTYPES), default="bfloat16")
    add("--device", type=torch.device, default=None)
    add("--rounds", type=int, default=11)
    add("--time-budget", type=float, default=520.0, help="seconds for the whole run")
    add("--prepare-seconds", type=float, default=60.0, help="for one implementation's first calls")
    add("--out", type=Path, default=Path("comparison.json"))
    arguments = parser.parse_args(argv)
    for name, known in (("data", DATA_KINDS), ("implementations", FAMILIES)):
        chosen = getattr(arguments, name).split(",")
        if unknown := sorted(set(chosen) - set(known)):
            parser.error(f"unknown {name} {unknown}; known are {', '.join(known)}")
        setattr(arguments, name, chosen)
    return arguments


def implementations_for(shape: Shape, arguments: argparse.Namespace) -> list[Implementation]:
    """Everything asked for, the peers first."""
    wanted = arguments.implementations
    found = [peer for peer in peers(shape) if peer.family in wanted]
    limits = [parse_size(text) for text in arguments.workspace_limits.split(",")]
    place = (shape, DTYPES[arguments.dtype], arguments.device, limits)
    if "ours" in wanted:
        found += ours(*place, "fp32")
    if "ours_weight_dtype" in wanted:
        found += ours(*place, "weight_dtype")
    if "ours_configs" in wanted and arguments.configs is not None:
        configs = [Config.from_dict(entry) for entry in json.loads(arguments.configs.read_text())]
        found += ours_from_configs(configs, arguments.accumulate)
    return found


def table(result: dict[str, Any]) -> str:
    """A table of one result for the terminal."""
    shape = Shape(result["tokens"], result["hidden"], result["vocab"])
    floor = result["floor_ms"]
    head = f"{shape} {result['dtype']} {result['data']}, mean loss {result['mean_loss']:.2f}"
    if floor:
        head += f", floor {floor:.2f} ms ({result['floor_tflops_6ndv']:.0f} TFLOP/s at 6NDV)"
    lines = [head, f"  {'':<44}{'ms':>9}{'x floor':>9}{'GiB':>8}{'dX error':>10}{'dW error':>10}"]
    for row in sorted(result["implementations"], key=lambda row: row.get("median_ms", 1e99)):
        if "median_ms" not in row:
            lines.append(f"  {row['name'][:42]:<44}{row['status']}")
            continue
        extra, errors = row.get("extra_bytes"), row.get("errors", {})
        memory = f"{extra / GIB:.2f}" if extra is not None else "-"
        lines.append(
            f"  {row['name'][:42]:<44}{row['median_ms']:>9.2f}{row['times_floor']:>9.3f}{memory:>8}"
            f"{errors.get('dx', float('nan')):>10.1e}{errors.get('dw', float('nan')):>10.1e}"
        )
    return "\n".join(lines)


def compare(arguments: argparse.Namespace) -> list[str]:
    """Run every case within the budget, rewriting the JSON after each; return the tables."""
    deadline = Deadline(arguments.time_budget)
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "environment": describe(arguments.device),
        "results": [],
        "left_out": [],
    }
    comparison = Comparison(
        device=arguments.device,
        dtype=DTYPES[arguments.dtype],
        rounds=arguments.rounds,
        prepare_seconds=arguments.prepare_seconds,
        log=lambda line: print(line, file=sys.stderr, flush=True),
    )
    shapes: list[Shape] = arguments.shape or list(DEFAULT_SHAPES)
    cases = [(shape, data) for shape in shapes for data in arguments.data]
    built: dict[Shape, list[Contestant]] = {}
    tables = []
    for index, (shape, data) in enumerate(cases):
        comparison.log(f"{shape} {data}, {deadline.remaining:.0f} s left")
        if shape not in built:
            built[shape] = [Contestant(i) for i in implementations_for(shape, arguments)]
        built[shape] = [contestant.again() for contestant in built[shape]]
        share = Deadline(deadline.remaining / (len(cases) - index))
        try:
            result = comparison.run(shape, data, built[shape], share)
        except (torch.cuda.OutOfMemoryError, OutOfTime) as error:
            comparison.log(f"  left out: {error}")
            document["left_out"].append({"shape": str(shape), "data": data, "reason": str(error)})
        else:
            document["results"].append(result)
            tables.append(table(result))
        write_json(arguments.out, document)
    return tables


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    arguments.device = arguments.device or default_device()
    # a device call that hangs cannot be interrupted from Python: then the process ends here
    faulthandler.dump_traceback_later(arguments.time_budget + LAST_GRACE, exit=True, file=2)
    try:
        print("\n\n".join(compare(arguments)))
    finally:
        faulthandler.cancel_dump_traceback_later()
    return 0


if __name__ == "__main__":
    sys.exit(main())
