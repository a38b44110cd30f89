#!/usr/bin/env python
"""Make a pre-tuned file of the winners of a sweep and of comparisons on the same kind of GPU.

    python benchmarks/ship.py flce_tune/pretuned/nvidia-h200.json \
        HASH:benchmarks/results/compare-h200-numerators.json

Adds what ``compare.py --configs`` measured (interleaved rounds, with errors) to the winners of the
file and keeps the Pareto front of each problem; with ``--anew``, of what it measured alone, as
measurements of different days do not compare. HASH is the kernels' hash at the time
(``dispatch.convert.hash_sources``). Where a comparison holds a problem on two kinds of data, the
slower one counts.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from flce_tune.kernels.config import Config
from flce_tune.kernels.problem import Accumulate, Problem
from flce_tune.tuning_db.interchange import dump, parse_winners
from flce_tune.tuning_db.records import (
    DeviceRecord,
    Measurement,
    ProblemRecord,
    Status,
    ToolchainRecord,
    Winner,
)


def measured(path: Path, kernel_hash: str, device: DeviceRecord) -> Iterator[Winner]:
    """What a comparison says of our configs."""
    document = json.loads(path.read_text())
    environment = document["environment"]
    if environment["device"]["name"] != device.name:
        raise SystemExit(f"{path} is of {environment['device']['name']}, not of {device.name}")
    versions, hardware = environment["versions"], environment["device"]
    toolchain = ToolchainRecord(
        torch=versions["torch"], triton=versions["triton"], cuda=hardware["cuda"],
        driver=hardware["driver"], kernel_hash=kernel_hash,
    )  # fmt: skip
    for result in document["results"]:
        rows = result["implementations"]
        eager = [row["median_ms"] for row in rows if row["family"] == "eager"]
        for row in rows:
            if row["family"] != "ours_configs" or row["status"] != "ok":
                continue
            config = Config.from_dict(row["config"])
            eager_ms = eager[0] if eager else None
            for accumulate in serves(config, row["accumulate"]):
                problem = Problem(
                    result["tokens"], result["hidden"], result["vocab"], result["dtype"],
                    accumulate=accumulate,
                )  # fmt: skip
                measurement = of(row, config, problem, device, toolchain, environment["date"])
                yield Winner(measurement, eager_ms=eager_ms)


def serves(config: Config, accumulate: Accumulate) -> tuple[Accumulate, ...]:
    """What a measurement holds for: exact sums run alike where inexact ones are allowed."""
    exact = accumulate == "fp32" and config.accumulator != "weight_dtype"
    return ("fp32", "weight_dtype") if exact else (accumulate,)


def of(
    row: dict[str, Any],
    config: Config,
    problem: Problem,
    device: DeviceRecord,
    toolchain: ToolchainRecord,
    date: str,
) -> Measurement:
    """A row of a comparison as the database has it."""
    returned = (problem.tokens + problem.vocab) * problem.hidden * problem.itemsize
    return Measurement(
        device=device,
        toolchain=toolchain,
        problem=ProblemRecord(
            mode=problem.mode, dtype=problem.dtype, accumulate=problem.accumulate,
            hidden=problem.hidden, vocab=problem.vocab, token_bucket=problem.bucket,
        ),
        tokens=problem.tokens,
        config=config.to_dict(),
        status=Status.OK,
        samples_ms=tuple(row["samples_ms"]),
        median_ms=row["median_ms"],
        spread_ms=row["spread_ms"],
        workspace_bytes=row["extra_bytes"] - returned,
        errors=row["errors"],
        created_at=datetime.fromisoformat(date),
    )  # fmt: skip


def fronts(winners: Iterable[Winner]) -> list[Winner]:
    """The Pareto front of each problem, of each config's slowest measurement."""
    slowest: dict[Any, Winner] = {}
    for winner in winners:
        key = (winner.measurement.problem, json.dumps(winner.measurement.config, sort_keys=True))
        if key not in slowest or _time(slowest[key]) < _time(winner):
            slowest[key] = winner
    kept: list[Winner] = []
    least: dict[ProblemRecord, int] = {}
    for winner in sorted(slowest.values(), key=lambda winner: (_time(winner), _space(winner))):
        problem = winner.measurement.problem
        if problem not in least or _space(winner) < least[problem]:
            least[problem] = _space(winner)
            kept.append(winner)
    return kept


def _time(winner: Winner) -> float:
    return winner.measurement.median_ms or float("inf")


def _space(winner: Winner) -> int:
    return winner.measurement.workspace_bytes or 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("file", type=Path)
    parser.add_argument("comparisons", nargs="+", metavar="HASH:FILE")
    parser.add_argument("--anew", action="store_true", help="forget what the file has of a problem")
    arguments = parser.parse_args(argv)
    winners = parse_winners(arguments.file.read_text(), str(arguments.file))
    device = winners[0].measurement.device
    added: list[Winner] = []
    for comparison in arguments.comparisons:
        kernel_hash, _, path = comparison.partition(":")
        added += measured(Path(path), kernel_hash, device)
    if arguments.anew:
        problems = {winner.measurement.problem for winner in added}
        winners = [winner for winner in winners if winner.measurement.problem not in problems]
    winners += added
    chosen = [
        replace(winner, measurement=replace(winner.measurement, id=position))
        for position, winner in enumerate(fronts(winners), start=1)
    ]
    arguments.file.write_text(dump([winner.measurement for winner in chosen], chosen))
    print(f"{len(chosen)} winners of {len(winners)} measurements")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
