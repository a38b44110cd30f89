#!/usr/bin/env python
"""The article's memory table: peak memory and time of one training step of the head.

At 16384 × 4096 × 128256 in bf16: plain PyTorch with fp32 logits, the strategy
``atomic`` at D_BLOCK = V_BLOCK = 64, and what the dispatcher chooses. ``atomic`` is slow, so each
row is timed once or, if it is quick, a few times.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from cases import DATA_KINDS, Inputs, Shape, make_inputs
from comparison import forward_backward
from environment import default_device, describe, write_json
from implementations import Implementation, Loss, ours, ours_from_configs, parse_size, peers
from measure import GIB, OutOfTime, Stopwatch, at_most, peak_above, release

from flce_tune.kernels.config import Config
from flce_tune.kernels.problem import DTYPES
from flce_tune.kernels.strategies.atomic import article_config

SCHEMA = "flce-tune-article/1"
ARTICLE_SHAPE = Shape(16384, 4096, 128256)


@dataclass(frozen=True)
class Row:
    """A line of the table; None where the implementation could not run."""

    name: str
    config: dict[str, Any] | None
    median_ms: float | None = None
    samples_ms: tuple[float, ...] = ()
    peak_bytes: int | None = None  # in total, x, weight and target included
    extra_bytes: int | None = None  # above x, weight and target, so with dX and dW
    reason: str = ""

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {field: getattr(self, field) for field in self.__dataclass_fields__}


def implementations(
    shape: Shape,
    dtype: torch.dtype,
    device: torch.device,
    atomic: Config,
    limits: Sequence[int | None],
) -> list[Implementation]:
    """The rows of the table, in order."""
    plain = [peer for peer in peers(shape) if peer.family == "eager_fp32"]
    return [
        *plain,
        *ours_from_configs([atomic], "fp32"),
        *ours(shape, dtype, device, limits, "fp32"),
    ]


def warm_up(loss: Loss, shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
    """Compile on a few tokens, so that a slow kernel is not run in full more often than needed."""
    few = make_inputs(Shape(16, shape.hidden, shape.vocab), "flat", dtype, device)
    forward_backward(loss, few)


def measure(implementation: Implementation, inputs: Inputs, shape: Shape, seconds: float) -> Row:
    """Measure one row within ``seconds``. Isolates it: whatever it raises becomes its reason."""
    device, dtype = inputs.x.device, inputs.x.dtype
    config = implementation.details.get("config")
    name = implementation.name
    try:
        with at_most(seconds):
            loss = implementation.build()
            warm_up(loss, shape, dtype, device)
            release(device)
            begin = time.monotonic()
            extra = peak_above(lambda: forward_backward(loss, inputs), device)
            repeats = max(1, min(10, int(5.0 / (time.monotonic() - begin))))
            stopwatch = Stopwatch(device)
            samples = [
                stopwatch.time(lambda: forward_backward(loss, inputs)) for _ in range(repeats)
            ]
    except (Exception, OutOfTime) as error:  # noqa: BLE001 isolation is the purpose
        return Row(name, config, reason=f"{type(error).__name__}: {error}"[:500])
    held = sum(t.nbytes for t in (inputs.x, inputs.weight, inputs.target))
    return Row(
        name=name,
        config=config,
        median_ms=statistics.median(samples),
        samples_ms=tuple(samples),
        peak_bytes=None if extra is None else extra + held,
        extra_bytes=extra,
    )


def markdown(rows: Sequence[Row], shape: Shape, environment: dict[str, Any]) -> str:
    """The table for a reader."""
    versions, device = environment["versions"], environment["device"]
    lines = [
        f"{shape}, {device['name']}, torch {versions['torch']}, {environment['date'][:10]}",
        "",
        "| | peak memory, GiB | of it above the inputs, GiB | forward + backward, ms |",
        "|---|---|---|---|",
    ]
    for row in rows:
        cells = [
            "-" if row.peak_bytes is None else f"{row.peak_bytes / GIB:.2f}",
            "-" if row.extra_bytes is None else f"{row.extra_bytes / GIB:.2f}",
            row.reason or (f"{row.median_ms:.1f}" if row.median_ms is not None else "-"),
        ]
        lines.append(f"| {row.name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add = parser.add_argument
    add("--shape", type=Shape.parse, default=ARTICLE_SHAPE, metavar="N,D,V")
    add("--data", choices=DATA_KINDS, default="peaked")
    add("--dtype", choices=sorted(DTYPES), default="bfloat16")
    add("--device", type=torch.device, default=None)
    add("--block", type=int, default=64, help="D_BLOCK and V_BLOCK of atomic")
    add("--num-warps", type=int, default=4, help="of atomic")
    add("--workspace-limits", default="256MiB,none", help="where the dispatcher is asked")
    add("--row-seconds", type=float, default=120.0, help="at most, for one row")
    add("--out", type=Path, default=Path("article_table.json"), help="the .md lands beside it")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    device, dtype, shape = (
        arguments.device or default_device(),
        DTYPES[arguments.dtype],
        arguments.shape,
    )
    atomic = article_config(arguments.block, arguments.block, arguments.num_warps)
    inputs = make_inputs(shape, arguments.data, dtype, device)
    rows = []
    limits = [parse_size(text) for text in arguments.workspace_limits.split(",")]
    for implementation in implementations(shape, dtype, device, atomic, limits):
        print(implementation.name, file=sys.stderr, flush=True)
        rows.append(measure(implementation, inputs, shape, arguments.row_seconds))
        release(device)
    environment = describe(device)
    document = {
        "schema": SCHEMA,
        "environment": environment,
        "tokens": shape.tokens,
        "hidden": shape.hidden,
        "vocab": shape.vocab,
        "dtype": arguments.dtype,
        "data": arguments.data,
        "rows": [row.to_dict() for row in rows],
    }
    write_json(arguments.out, document)
    text = markdown(rows, shape, environment)
    arguments.out.with_suffix(".md").write_text(text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
