#!/usr/bin/env python
"""Measure the promises beside the time-and-memory front: evaluation, ragged sizes, ignored rows,
host time, given logits.

    python benchmarks/bars.py --out benchmarks/results/bars-h200.json
    python benchmarks/bars.py --profile
    python benchmarks/bars.py --table benchmarks/results/bars-h200.json

Interleaved rounds, medians, each number beside its reference of the same run. Prints a table and
writes JSON after each section.
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
from bar_host import breakdown
from bar_rows import Bench, table
from bar_sections import SECTIONS
from environment import default_device, describe, write_json
from measure import Deadline, Stopwatch, release

SCHEMA = "flce-tune-bars/1"
LAST_GRACE = 60.0  # seconds past the budget after which a hung device call is cut off


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--only", default=",".join(SECTIONS), help=f"of {tuple(SECTIONS)}, comma-separated")
    add("--profile", action="store_true", help="print where the host's time goes, and nothing else")
    add("--table", type=Path, help="print the table of a JSON file, and nothing else")
    add("--rounds", type=int, default=9)
    add("--time-budget", type=float, default=200.0, help="seconds; less of it, fewer rounds")
    add("--shrink", type=int, default=1, help="divide all sizes, to try it without a GPU")
    add("--device", type=torch.device, default=None)
    add("--out", type=Path, default=Path("bars.json"))
    arguments = parser.parse_args(argv)
    arguments.only = arguments.only.split(",")
    if unknown := sorted(set(arguments.only) - set(SECTIONS)):
        parser.error(f"unknown section {unknown}; known are {', '.join(SECTIONS)}")
    return arguments


def run(bench: Bench, sections: Sequence[str], out: Path) -> list[dict[str, Any]]:
    """Run the sections; one that fails is reported, and the others go on."""
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "environment": describe(bench.device),
        "rounds": bench.rounds,
        "rows": [],
        "failed": {},
    }
    for name in sections:
        print(f"{name}, {bench.deadline.remaining:.0f} s left", file=sys.stderr, flush=True)
        try:
            document["rows"].extend(row.to_dict() for row in SECTIONS[name](bench))
        except Exception as error:  # noqa: BLE001 the other sections count
            document["failed"][name] = f"{type(error).__name__}: {error}"[:500]
            print(f"  {document['failed'][name]}", file=sys.stderr, flush=True)
        release(bench.device)
        write_json(out, document)
    return list(document["rows"])


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    if arguments.table is not None:
        print(table(json.loads(arguments.table.read_text())["rows"]))
        return 0
    device = arguments.device or default_device()
    deadline = Deadline(arguments.time_budget)
    bench = Bench(device, arguments.rounds, deadline, arguments.shrink, Stopwatch(device))
    if arguments.profile:
        print(breakdown(bench))
        return 0
    # a device call that hangs cannot be interrupted from Python: then the process ends here
    faulthandler.dump_traceback_later(arguments.time_budget + LAST_GRACE, exit=True, file=2)
    try:
        rows = run(bench, arguments.only, arguments.out)
    finally:
        faulthandler.cancel_dump_traceback_later()
    print(table(rows))
    return 0 if rows else 1


if __name__ == "__main__":
    sys.exit(main())
