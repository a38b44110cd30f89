"""Time every stage of the op by itself on a GPU: GEMMs by cuBLAS and by each tile, row kernels.

    python benchmarks/stages.py --shape 4096,4096,128256 --out benchmarks/results/stages.json

A stage runs with a cold L2 cache and a clock that short work does not throttle. TFLOP/s count 2NDV
per GEMM, GB/s the bytes named in the kernels' notes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from cases import Shape
from environment import describe, write_json

from flce_tune.kernels.backends import logits_buffer
from flce_tune.kernels.config import Tile
from flce_tune.kernels.limits import reject_tile
from flce_tune.kernels.problem import Problem, describe_device
from flce_tune.kernels.strategies.common import GEMMS, TILES
from flce_tune.kernels.values import Coefficients, Inputs, LossSpec, Wanted

SCHEMA = "flce-tune-stages/1"
Work = Callable[[], Any]


@dataclass(frozen=True)
class Stage:
    """One way to do one stage."""

    name: str
    how: str
    work: Work
    flops: float = 0.0
    bytes: float = 0.0


def stages(shape: Shape, device: torch.device) -> Iterator[Stage]:
    """All stages of a shape; tensors live as long as the iterator."""
    from flce_tune.kernels.triton import backend
    from flce_tune.kernels.triton.launch import launch_product

    n, d, v = shape.tokens, shape.hidden, shape.vocab
    generator = torch.Generator(device).manual_seed(0)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator, device=device, dtype=torch.bfloat16)

    x, w = normal(n, d), normal(v, d) / d**0.5
    target = torch.randint(0, v, (n,), generator=generator, device=device)
    inputs, loss, wanted = Inputs(x, w, target), LossSpec(), Wanted(dx=True, dw=True)
    z = logits_buffer(n, v, x)
    torch.mm(x, w.t(), out=z)
    stats = backend.statistics(z, inputs, loss, wanted)
    row = torch.full((n,), 1.0 / n, device=device)
    given = Coefficients(row, row)
    problem, gpu = Problem(n, d, v), describe_device(device)
    gemm = 2.0 * n * d * v
    dx, dw = torch.empty_like(x), torch.empty_like(w)
    low = torch.empty(v, d, dtype=torch.uint8, device=device)
    total = torch.empty(v, d, device=device)
    g = z.t()

    yield Stage("statistics", "row kernel", lambda: backend.statistics(z, inputs, loss, wanted),
                bytes=2.0 * n * v)  # fmt: skip
    yield Stage("gradient", "row kernel, in place",
                lambda: backend.gradient(z, inputs, stats, given, loss, z),
                bytes=4.0 * n * v)  # fmt: skip
    torch.mm(x, w.t(), out=z)
    yield Stage("logits", "cuBLAS", lambda: torch.mm(x, w.t(), out=z), gemm)
    yield Stage("dx", "cuBLAS", lambda: torch.mm(z, w, out=dx), gemm)
    yield Stage("dw", "cuBLAS", lambda: torch.mm(g, x, out=dw), gemm)
    yield Stage("dw += bfloat16", "cuBLAS", lambda: torch.addmm(dw, g, x, out=dw), gemm)
    yield Stage("dw += float32", "cuBLAS",
                lambda: torch.addmm(total, g, x, out_dtype=torch.float32, out=total),
                gemm)  # fmt: skip

    def tiled(name: str, tile: Tile) -> Iterator[Stage]:
        how = str(tile)
        if name == "logits":
            everything = slice(0, v)
            yield Stage("logits + statistics", how,
                        lambda: backend.logits(inputs, loss, wanted, z, tile), gemm)  # fmt: skip
            yield Stage("statistics only", how,
                        lambda: backend.logits(inputs, loss, wanted, None, tile), gemm)  # fmt: skip
            yield Stage("recomputed gradient", how,
                        lambda: backend.slab_gradient(
                            inputs, everything, stats, given, loss, z, tile), gemm)  # fmt: skip
        elif name == "dx":
            yield Stage("dx", how, lambda: launch_product(
                z, w, dx, None, tile, "v", "weight_dtype", False, True), gemm)  # fmt: skip
        else:
            yield Stage("dw", how, lambda: launch_product(
                g, x, dw, None, tile, "n", "weight_dtype", False, True), gemm)  # fmt: skip
            yield Stage("dw += split24", how, lambda: launch_product(
                g, x, dw, low, tile, "n", "split24", True, False), gemm)  # fmt: skip
            if reject_tile(tile, "n", problem, gpu, "fp32") is None:
                yield Stage("dw += float32", how, lambda: launch_product(
                    g, x, dw, total, tile, "n", "fp32", True, False), gemm)  # fmt: skip

    for name, contraction in GEMMS.items():
        for tile in TILES[name]:
            if reject_tile(tile, contraction, problem, gpu) is None:
                yield from tiled(name, tile)


def median_ms(work: Work, rounds: int, flush: torch.Tensor) -> float:
    """Median time after a warm-up, by CUDA events."""
    work()
    samples = []
    for _ in range(rounds):
        flush.zero_()
        start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start.record()
        work()
        end.record()
        end.synchronize()
        samples.append(float(start.elapsed_time(end)))
    return statistics.median(samples)


def measure(stage: Stage, rounds: int, flush: torch.Tensor) -> dict[str, Any]:
    """One row; whatever a stage raises becomes its reason."""
    row: dict[str, Any] = {"name": stage.name, "how": stage.how}
    try:
        ms = median_ms(stage.work, rounds, flush)
    except Exception as error:  # noqa: BLE001 one variant may not compile; the others count
        return row | {"reason": f"{type(error).__name__}: {error}"[:300]}
    return row | {"ms": ms, "tflops": stage.flops / ms / 1e9, "gbps": stage.bytes / ms / 1e6}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", type=Shape.parse, action="append", required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("stages.json"))
    arguments = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("stages are those of a CUDA GPU, and there is none")
    device = torch.device("cuda", torch.cuda.current_device())
    flush = torch.empty(128 << 20, dtype=torch.uint8, device=device)
    shapes: dict[str, list[dict[str, Any]]] = {}
    for shape in arguments.shape:
        rows = shapes[str(shape)] = []
        for stage in stages(shape, device):
            rows.append(measure(stage, arguments.rounds, flush))
            print(rows[-1], file=sys.stderr, flush=True)
    document = {"schema": SCHEMA, "environment": describe(device), "shapes": shapes}
    write_json(arguments.out, document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
