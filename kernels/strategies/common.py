"""What strategies share: sizes, spaces of GEMM choices, evaluation, row slicing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flce_tune.kernels.backends import backend_of, even_parts, logits_buffer, must_be_packed
from flce_tune.kernels.config import Accumulator, Config, Tile
from flce_tune.kernels.limits import TENSOR_CORE_DTYPES, reject_tile
from flce_tune.kernels.problem import Device, Problem
from flce_tune.kernels.products import row_bytes
from flce_tune.kernels.splits import split_bytes
from flce_tune.kernels.values import (
    Coefficients,
    Inputs,
    LossSpec,
    Statistics,
    Wanted,
)

EVALUATION_BYTES = 48 << 20
"""Budget of an evaluation's logits or tile statistics."""

HOST_FLOPS = 1 << 40
"""What a large GPU does while a host launches a step."""

GEMMS = {"logits": "d", "dx": "v", "dw": "n"}
"""Each GEMM of a config and the dimension it sums over."""

TILES: dict[str, tuple[Tile, ...]] = {
    "logits": (
        Tile(128, 128, 64, num_warps=8, num_stages=5, group=16, schedule="ping_pong"),
        Tile(128, 256, 64, num_warps=8, num_stages=4, group=16, schedule="shared"),
        Tile(64, 256, 64, num_warps=8, num_stages=4, group=16, schedule="ping_pong"),
        Tile(128, 256, 64, num_warps=8, num_stages=3, group=16),
        Tile(128, 256, 64, num_warps=8, num_stages=3, group=32),
        Tile(256, 128, 64, num_warps=8, num_stages=3, group=8),
        Tile(128, 128, 64, num_warps=4, num_stages=3, group=8),
        Tile(128, 128, 32, num_warps=4, num_stages=3, group=8),
    ),
    "dx": (
        Tile(128, 64, 256, num_warps=8, num_stages=4, group=16, schedule="shared"),
        Tile(128, 64, 256, num_warps=8, num_stages=4, group=8, schedule="shared"),
        Tile(128, 64, 256, num_warps=8, num_stages=3, group=8),
        Tile(128, 64, 256, num_warps=8, num_stages=3, group=16),
        Tile(256, 64, 128, num_warps=8, num_stages=3, group=8),
        Tile(128, 64, 128, num_warps=4, num_stages=3, group=8),
        Tile(128, 32, 128, num_warps=4, num_stages=3, group=8),
    ),
    "dw": (
        Tile(64, 128, 256, num_warps=8, num_stages=4, group=16, schedule="shared"),
        Tile(64, 128, 256, num_warps=8, num_stages=4, group=8, schedule="shared"),
        Tile(64, 128, 256, num_warps=8, num_stages=3, group=8),
        Tile(64, 128, 256, num_warps=8, num_stages=3, group=16),
        Tile(64, 256, 128, num_warps=8, num_stages=3, group=8),
        Tile(64, 128, 128, num_warps=4, num_stages=3, group=8),
        Tile(32, 128, 128, num_warps=4, num_stages=3, group=8),
    ),
}
"""Per GEMM, the preferred tiles of Hopper first; small ones at the end fit every GPU."""


@dataclass(frozen=True, slots=True)
class Gemms:
    """How the three GEMMs run; None is cuBLAS."""

    logits: Tile | None = None
    dx: Tile | None = None
    dw: Tile | None = None

    def config(
        self,
        strategy: str,
        *,
        chunk: int | None = None,
        slab: int | None = None,
        accumulator: Accumulator = "fp32",
    ) -> Config:
        """Complete a config."""
        return Config(strategy, chunk, slab, self.logits, self.dx, self.dw, accumulator)


def gradient_dtype(compute: torch.dtype) -> torch.dtype:
    """The dtype gradients are returned in: the compute dtype, but float32 for float16."""
    return torch.float32 if compute == torch.float16 else compute


def accumulators(problem: Problem, name: str = "dw") -> tuple[Accumulator, ...]:
    """The accumulators that keep the accuracy the problem asks for, the default first.

    ``accumulate`` speaks of dW; dX is summed exactly. Evaluation sums neither.
    """
    if problem.mode == "eval":
        return ("fp32",)
    if name == "dw" and problem.accumulate == "weight_dtype":
        return ("weight_dtype",)
    return ("fp32", "split24") if problem.dtype == "bfloat16" else ("fp32",)


def _reject_accumulator(config: Config, problem: Problem, accumulated: str) -> str | None:
    """Say why the config's accumulator does not suit the problem, or None."""
    if config.accumulator == "weight_dtype" and problem.accumulate != "weight_dtype":
        return 'accumulator weight_dtype needs accumulate="weight_dtype"'
    if config.accumulator == "split24":
        if problem.dtype != "bfloat16":
            return f"accumulator split24 holds bfloat16 results, the problem is {problem.dtype}"
        if accumulated and getattr(config, accumulated) is None:
            return f"accumulator split24 needs a {accumulated} tile"
    return None


def reject_gemms(config: Config, problem: Problem, device: Device, accumulated: str) -> str | None:
    """Say why the accumulator or a tile cannot run, or None.

    ``accumulated`` names the GEMM that adds to a sum: "dx", "dw" or "" for neither.
    """
    if reason := _reject_accumulator(config, problem, accumulated):
        return reason
    for name, contraction in GEMMS.items():
        tile = getattr(config, name)
        accumulator = config.accumulator if name == accumulated else ""
        if tile and (reason := reject_tile(tile, contraction, problem, device, accumulator)):
            return f"{name}: {reason}"
    return None


def gemms(problem: Problem) -> tuple[str, ...]:
    """The GEMMs a problem needs."""
    return {
        "train": ("logits", "dx", "dw"),
        "train_frozen_weight": ("logits", "dx"),
        "eval": ("logits",),
    }[problem.mode]


def preferred_tile(name: str, problem: Problem, device: Device) -> Tile | None:
    """The tile known to be fast where one is known, on sm_90; else None.

    One that can keep the smallest of exact sums. Logits that nobody stores go by the tile that
    reads least.
    """
    fitting = _fitting(name, problem, device, name, accumulators(problem, name)[-1])
    if problem.mode == "eval":
        fitting.sort(key=lambda tile: tile.schedule != "shared")
    return fitting[0] if fitting and device.capability >= (9, 0) else None


def preferred_tiles(problem: Problem, device: Device) -> Gemms:
    """The preferred tile of every GEMM."""
    return Gemms(*(preferred_tile(name, problem, device) for name in GEMMS))


def by_hand(problem: Problem, device: Device) -> tuple[Gemms, Accumulator]:
    """The products that can be scheduled by hand, dW's sum among them, and what keeps that.

    None of a problem so small that the host's time counts, of which a library takes less.
    """
    kept = accumulators(problem)[-1]
    if problem.flops < HOST_FLOPS:
        return Gemms(), accumulators(problem)[0]
    found = {n: _fitting(n, problem, device, "dw", kept)[:1] for n in gemms(problem)}
    tiles = {n: tile for n, some in found.items() for tile in some if tile.schedule != "compiler"}
    return Gemms(**tiles), kept if "dw" in tiles else accumulators(problem)[0]


def gemm_bases(
    problem: Problem, device: Device, accumulated: str = "", accumulator: str = ""
) -> list[Gemms]:
    """All cuBLAS, and all with the first tile that fits, where tiles fit at all.

    ``accumulated`` names the GEMM that adds to a sum, kept in ``accumulator``; "": none does.
    """
    none = Gemms()
    fitting = {n: _fitting(n, problem, device, accumulated, accumulator) for n in gemms(problem)}
    first = Gemms(**{name: next(iter(tiles), None) for name, tiles in fitting.items()})
    return [none] if first == none else [none, first]


def gemm_variations(
    problem: Problem, device: Device, accumulated: str = "", accumulator: str = ""
) -> Iterator[Gemms]:
    """The bases, then the last base with one GEMM at a time changed to each other choice.

    The GEMMs run one after the other, so their times add up and each can be chosen by itself;
    the tuner combines the best of each afterwards.
    """
    bases = gemm_bases(problem, device, accumulated, accumulator)
    yield from bases
    for name in gemms(problem):
        for tile in (None, *_fitting(name, problem, device, accumulated, accumulator)):
            yield replace(bases[-1], **{name: tile})


def _fitting(
    name: str, problem: Problem, device: Device, accumulated: str, accumulator: str
) -> list[Tile]:
    kept = accumulator if name == accumulated and name != "logits" else ""
    return [
        tile for tile in TILES[name] if not reject_tile(tile, GEMMS[name], problem, device, kept)
    ]


def logits_bytes(rows: int, columns: int, problem: Problem, tile: Tile | None) -> int:
    """Bytes of a buffer of logits with its padded rows, and of the tiles' statistics."""
    unit = 128 // problem.itemsize
    total = rows * -(-columns // unit) * unit * problem.itemsize
    if tile is not None:
        total += tile_statistics_bytes(rows, columns, tile)
    return total


def tile_statistics_bytes(rows: int, columns: int, tile: Tile) -> int:
    """Bytes of max and total of each tile and row."""
    return 8 * rows * -(-columns // tile.v_block)


def accumulator_bytes(config: Config, problem: Problem, rows: int) -> int:
    """Bytes of the accumulator of some rows, beside their result."""
    if problem.dtype not in TENSOR_CORE_DTYPES or problem.dtype == "float16":
        return 0
    sizes = {
        "fp32": 4 * problem.hidden,
        "split24": row_bytes(problem.hidden),
        "weight_dtype": 0,
    }
    return sizes[config.accumulator] * rows


def partial_sum_bytes(config: Config, problem: Problem, rows: int) -> int:
    """Most bytes of dX's partial sums, of some rows at a time."""
    if config.dx is None or config.dx.schedule == "compiler":
        return 0
    return split_bytes(rows, problem.hidden, problem.vocab)


def evaluation_rows(tokens: int, vocab: int, tile: Tile) -> int:
    """Tokens per step of an evaluation that stores no logits, within its budget."""
    rows = EVALUATION_BYTES // tile_statistics_bytes(1, vocab, tile)
    return min(max(128, rows // 128 * 128), tokens)


def evaluation_bytes(tile: Tile, problem: Problem) -> int:
    """Bytes ``evaluate`` holds at its peak where it stores no logits."""
    rows = evaluation_rows(problem.tokens, problem.vocab, tile)
    return tile_statistics_bytes(rows, problem.vocab, tile)


def evaluate(
    inputs: Inputs,
    loss: LossSpec,
    wanted: Wanted,
    config: Config,
    rows_per_step: int,
) -> Statistics:
    """Row statistics, without storing logits where a tile is given."""
    backend = backend_of(inputs.x)
    n, vocab = len(inputs.x), inputs.weight.shape[0]
    buffer = None
    if config.logits is None:
        packed = must_be_packed(inputs.bias, config)
        buffer = logits_buffer(rows_per_step, vocab, inputs.x, packed=packed)
    parts = []
    for rows in even_parts(n, rows_per_step):
        out = None if buffer is None else buffer[: rows.stop - rows.start]
        parts.append(backend.logits(inputs.rows(rows), loss, wanted, out, config.logits))
    return concatenate(parts)


def concatenate(parts: Sequence[Statistics]) -> Statistics:
    """Join the statistics of consecutive rows."""
    if len(parts) == 1:
        return parts[0]

    def join(name: str) -> Tensor | None:
        tensors = [getattr(part, name) for part in parts]
        return None if tensors[0] is None else torch.cat(tensors)

    return Statistics(
        lse=torch.cat([part.lse for part in parts]),
        lse_low=torch.cat([part.lse_low for part in parts]),
        target_logit=torch.cat([part.target_logit for part in parts]),
        logit_sum=join("logit_sum"),
        mean_logit=join("mean_logit"),
        prediction=join("prediction"),
    )


def coefficient_rows(given: Coefficients, rows: slice) -> Coefficients:
    """Restrict the coefficients to some tokens."""
    return Coefficients(
        a=given.a[rows],
        b=given.b[rows],
        c=None if given.c is None else given.c[rows],
        e=None if given.e is None else given.e[rows],
    )
