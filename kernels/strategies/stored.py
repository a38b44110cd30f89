"""What ``overlay`` and ``factored`` share: blocks in dW's storage, the forward pass, dW by blocks.

dW [V, D] is written last, so until then its storage is free for softmax numerators E (see
``numerators``), or for G. Blocks of ``slab`` columns lie right-aligned in the rows of dW that
belong to their columns and what follows. When dX has read them all, block j is turned into the
j-th ``slab`` rows of dW; the storage of block j begins where or behind where those rows end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flce_tune.kernels.backends import even_parts
from flce_tune.kernels.config import Config
from flce_tune.kernels.numerators import (
    ROW_MULTIPLE,
    Blocks,
    first_reference,
    padded,
    primitives_of,
    tile_columns,
)
from flce_tune.kernels.problem import Device, Problem
from flce_tune.kernels.products import Sum
from flce_tune.kernels.strategies import common
from flce_tune.kernels.values import Inputs, LossSpec, Statistics

SLAB_MULTIPLE = 256
SLABS = (2048, 4096, 8448, 16896)
"""8448 columns are 33 tiles of 256 or 66 of 128: with 16 tiles of D = 4096, or 128 of N, whole
waves on 132 multiprocessors."""


def slab_of(config: Config, vocab: int) -> int:
    """Columns of a block: the config's, but no more than the vocabulary, rounded up to tiles."""
    assert config.slab is not None
    return min(config.slab, -(-vocab // SLAB_MULTIPLE) * SLAB_MULTIPLE)


def reject_problem(config: Config, problem: Problem, device: Device) -> str | None:
    """Say why numerators cannot serve here, or None."""
    name = config.strategy
    if config.slab is None:
        return f"{name} needs a slab, the number of vocabulary columns per block"
    if device.kind == "cuda" and config.logits is None:
        return f"{name} needs a logits tile on a GPU: cuBLAS computes no exponentials"
    if problem.mode == "train_frozen_weight":
        return f"{name} keeps numerators in dW, and a frozen weight has none"
    if problem.dtype == "float16":
        return f"{name} keeps exponentials, for which float16 has too few exponents"
    unknown = {"softcap", "label_smoothing", "statistics"} & set(problem.features)
    if unknown and problem.mode != "eval":
        return f"{name} knows no {', '.join(sorted(unknown))}"
    slab = slab_of(config, problem.vocab)
    if config.logits is not None and slab % config.logits.v_block:
        return f"slab {slab} is not a multiple of the logits tile's {config.logits.v_block}"
    if config.dw is not None and slab % config.dw.v_block:
        return f"slab {slab} is not a multiple of the dw tile's {config.dw.v_block}"
    filled = tile_columns(config.logits, slab)
    if config.dx is not None and config.dx.v_block > filled:
        return f"the dx tile takes {config.dx.v_block} columns, a logits tile fills {filled}"
    return None


def blocks_in_dw(rows: int, hidden: int, columns: int, slab: int) -> int:
    """How many blocks of so many tokens fit in the dW of so many columns.

    With B blocks, block j begins at element columns·D - (B-j)·slab·rows, and must not be reached
    by the first j + 1 slabs of dW, (j+1)·slab·D elements. Both grow linearly, so the first and
    the last block decide.
    """
    rows = padded(rows)
    storage = columns * hidden
    return max(
        0,
        min(
            (storage - slab * hidden) // (slab * rows),
            (storage - slab * rows) // (slab * hidden),
        ),
    )


def in_dw(
    dw: Tensor,  # [c, D], of columns first, first + 1, ... and on
    rows: int,
    first: int,
    slab: int,
    count: int,
) -> Blocks:
    """Blocks right-aligned in rows of dW."""
    storage = dw.reshape(-1)
    data = storage[storage.numel() - count * slab * padded(rows) :].view(-1, slab)
    return Blocks(data, rows, slice(first, min(first + count * slab, first + len(dw))))


def without_overlap(blocks: Blocks, hidden: int, columns: int) -> Iterator[Blocks]:
    """Group blocks in the dW of so many columns so that no group overwrites what it reads."""
    count, slab = len(blocks), blocks.slab
    start = 0
    while start < count:
        free = columns * hidden - (count - start) * slab * blocks.padded_rows
        end = min(max(free // (slab * hidden), start + 1), count)
        yield blocks.some(start, end)
        start = end


def rows_per_step(tiles: int) -> int:
    """Tokens whose tile sums fit the forward pass's budget."""
    rows = common.EVALUATION_BYTES // (8 * tiles) // ROW_MULTIPLE * ROW_MULTIPLE
    return max(ROW_MULTIPLE, rows)


def forward_bytes(config: Config, problem: Problem, rows: int) -> int:
    """Bytes of the forward pass's tile sums."""
    tiles = -(-problem.vocab // tile_columns(config.logits, slab_of(config, problem.vocab))) + 2
    return 8 * min(rows, rows_per_step(tiles)) * tiles


def forward(
    inputs: Inputs,
    row_weight: Tensor,  # [n]
    loss: LossSpec,
    stored: Sequence[Blocks],  # the first columns of the vocabulary, in order
    config: Config,
) -> tuple[Statistics, Tensor]:
    """Fill the blocks; return the statistics and Σ_c 2^(t - R) [n]."""
    primitives = primitives_of(inputs.x)
    n, vocab = len(inputs.x), inputs.vocab
    slab = slab_of(config, vocab)
    step = tile_columns(config.logits, slab)
    homes: list[Blocks | None] = [*stored]
    parts = [blocks.columns for blocks in stored]
    rest = slice(parts[-1].stop if parts else 0, vocab)
    if rest.start < vocab:
        homes.append(None)
        parts.append(rest)
    counts: list[int] = [-(-(part.stop - part.start) // step) for part in parts]
    label_logit = primitives.label_logits(inputs, loss)
    first = first_reference(label_logit)
    merged = []
    for rows in even_parts(n, rows_per_step(sum(counts)), ROW_MULTIPLE):
        some = inputs.rows(rows)
        sums = first.new_empty(2, sum(counts), len(some.x))
        references, totals = (list(kind.split(counts)) for kind in sums)
        for part, blocks, of_tiles, total in zip(parts, homes, references, totals, strict=True):
            primitives.numerators(
                some, part, first[rows], label_logit[rows], loss,
                None if blocks is None else blocks.data[rows.start :], padded(n), slab,
                of_tiles, total, config.logits,
            )  # fmt: skip
        merged.append(primitives.merge(sums[0], sums[1]))
        for blocks, of_tiles in zip(stored, references, strict=False):
            primitives.align(
                blocks, rows, of_tiles, merged[-1].reference, row_weight[rows], config.logits
            )
    lse = torch.cat([step.lse for step in merged])
    return Statistics(lse, label_logit), torch.cat([step.total for step in merged])


@dataclass(frozen=True, slots=True)
class Products:
    """The gradients that blocks of numerators, or of G, are multiplied into."""

    weight: Tensor  # [V, D]
    dx: Sum | None
    db: Tensor | None  # [V], statistics dtype, zeros at first

    def add(
        self,
        blocks: Sequence[Blocks],
        rows: Tensor,  # [n, D] x, or diag(f)·x
        factor: Tensor | None,  # [n] f
        dw: Sum,
        groups: Sequence[Blocks],  # the blocks, in parts that dw may overwrite at once
    ) -> None:
        """Add to dX all blocks, then to dW, which may lie over them."""
        if self.dx is not None:
            self.dx.add_blocks(blocks, self.weight, factor)
        if self.db is not None:
            for columns, e in (part for some in blocks for part in some.parts()):
                self.db[columns] += _weighted_sum(e, factor, self.db.dtype)
        dw.add_transposed(groups, rows)


def _weighted_sum(
    e: Tensor,  # [n, v]
    factor: Tensor | None,  # [n]; None: ones
    dtype: torch.dtype,
) -> Tensor:  # [v]
    """Eᵀ·f; the factor as three bfloat16 terms, which are exact, where E is bfloat16 on a GPU."""
    if factor is None:
        return e.sum(0, dtype=dtype)
    if e.device.type != "cuda":
        return e.t().to(dtype) @ factor
    terms = []
    for _ in range(3):
        terms.append(factor.to(e.dtype))
        factor = factor - terms[-1].to(factor.dtype)
    return torch.mm(e.t(), torch.stack(terms, 1), out_dtype=dtype).sum(1)
