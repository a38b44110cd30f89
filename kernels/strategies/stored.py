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
from flce_tune.kernels.limits import HAND_PRODUCT
from flce_tune.kernels.numerators import (
    ROW_MULTIPLE,
    Blocks,
    Factors,
    padded,
    primitives_of,
    tile_columns,
)
from flce_tune.kernels.problem import Device, Problem
from flce_tune.kernels.strategies import common
from flce_tune.kernels.strategies.labels import Labels
from flce_tune.kernels.strategies.recompute import SLAB_MULTIPLE
from flce_tune.kernels.values import Inputs, LossSpec, Statistics

SLABS = (2048, 4096, 8448, 16896)
"""8448 columns are 33 tiles of 256 or 66 of 128: with 16 tiles of D = 4096, or 128 of N, whole
waves on 132 multiprocessors."""
WAVES = (1, 2, 3, 4, 8)
LEAST_STEP = 1024
"""Tokens of a step of the forward pass, if there are as many; a product of fewer is slower."""
UNIT = 16
"""Storage is taken in so many elements, so that blocks begin where tiles can read them."""


def whole_slab(vocab: int) -> int:
    """Columns of a block that holds the vocabulary, rounded up to tiles."""
    return -(-vocab // SLAB_MULTIPLE) * SLAB_MULTIPLE


def fitted_slabs(problem: Problem, device: Device) -> tuple[int, ...]:
    """Slabs whose dW, one launch each, has tiles for whole waves of the GPU's multiprocessors.

    The last wave of a slab that has a few tiles more takes as long as any: on an H200, 16384 × 1024
    × 151936, slabs of 3072 take 10 % longer than those of 4224.
    """
    if device.kind != "cuda":
        return SLABS
    rows, columns = HAND_PRODUCT
    across = -(-problem.hidden // columns)
    whole = whole_slab(problem.vocab)
    fitted = {min(waves * device.sm_count // across * rows, whole) for waves in WAVES}
    return tuple(sorted(fitted - {0})) or SLABS


def slab_of(config: Config, vocab: int) -> int:
    """Columns of a block: the config's, but no more than the vocabulary, rounded up to tiles."""
    assert config.slab is not None
    return min(config.slab, whole_slab(vocab))


def reject_numerators(name: str, problem: Problem) -> str | None:
    """Say what of the problem a strategy with softmax numerators cannot serve, or None."""
    if problem.dtype == "float16":
        return f"{name} keeps exponentials, for which float16 has too few exponents"
    unknown = {"softcap", "label_smoothing", "statistics"} & set(problem.features)
    if unknown and problem.mode != "eval":
        return f"{name} knows no {', '.join(sorted(unknown))}"
    return None


def reject_problem(config: Config, problem: Problem, device: Device) -> str | None:
    """Say why numerators cannot serve here, or None."""
    name = config.strategy
    if config.slab is None:
        return f"{name} needs a slab, the number of vocabulary columns per block"
    if device.kind == "cuda" and config.logits is None:
        return f"{name} needs a logits tile on a GPU: cuBLAS computes no exponentials"
    if (
        device.kind == "cuda"
        and (config.dx is None or config.dw is None)
        and problem.mode != "eval"
    ):
        return f"{name} needs dx and dw tiles on a GPU: cuBLAS cannot add the labels' share"
    if problem.mode == "train_frozen_weight":
        return f"{name} keeps numerators in dW, and a frozen weight has none"
    if reason := reject_numerators(name, problem):
        return reason
    slab = slab_of(config, problem.vocab)
    if config.logits is not None and slab % config.logits.v_block:
        return f"slab {slab} is not a multiple of the logits tile's {config.logits.v_block}"
    if config.dw is not None and slab % config.dw.v_block:
        return f"slab {slab} is not a multiple of the dw tile's {config.dw.v_block}"
    filled = tile_columns(config.logits, slab)
    if config.dx is not None and config.dx.v_block > filled:
        return f"the dx tile takes {config.dx.v_block} columns, a logits tile fills {filled}"
    return None


def in_one_pass(problem: Problem) -> bool:
    """Whether the forward pass computes the gradients; else the strategy is ``recompute``."""
    return problem.mode == "train" and "per_token" not in problem.features


@dataclass(frozen=True, slots=True)
class Home:
    """Storage of a gradient that is not written yet, as many elements for every column."""

    data: Tensor  # flat, dtype of the blocks; its length is a multiple of UNIT
    columns: int  # V
    per_column: int  # elements

    @classmethod
    def of(cls, gradient: Tensor, like: Tensor) -> Home:  # gradient [V, D], of any dtype
        """View a gradient, or its accumulator, as storage."""
        data = gradient.view(-1).view(like.dtype)
        per_column = len(data) // len(gradient)
        return cls(data[: len(data) // UNIT * UNIT], len(gradient), per_column)

    def blocks(self, rows: int, first: int, slab: int, count: int) -> Blocks:
        """Blocks of columns first, first + 1, ..., right-aligned."""
        data = self.data[len(self.data) - count * slab * padded(rows) :].view(-1, slab)
        return Blocks(data, rows, slice(first, min(first + count * slab, self.columns)))

    def groups(self, blocks: Blocks) -> Iterator[Blocks]:
        """Cut its blocks so that no group is overwritten by the gradient of its own columns."""
        count, start = len(blocks), 0
        while start < count:
            free = len(self.data) - (count - start) * blocks.slab * blocks.padded_rows
            end = (free // self.per_column - blocks.columns.start) // blocks.slab
            end = min(max(end, start + 1), count)
            yield blocks.some(start, end)
            start = end


def capacity(rows: int, per_column: int, vocab: int, first: int, slab: int) -> int:
    """How many blocks of columns first, first + 1, ... fit in a ``Home``.

    With B blocks, block j begins at element V·c - (B-j)·slab·rows, c elements a column and V·c
    rounded down to UNIT, and must not be reached by the gradient of columns up to
    first + (j+1)·slab. Both grow linearly, so the first and the last block decide.
    """
    rows = padded(rows)
    free = vocab * per_column // UNIT * UNIT - first * per_column
    blocks = min(
        (free - slab * per_column) // (slab * rows),
        (free - slab * rows) // (slab * per_column),
    )
    return max(0, blocks)


def rows_per_step(tiles: int, config: Config) -> int:
    """Tokens whose tile sums fit the forward pass's budget, and are few where chunks are."""
    rows = common.EVALUATION_BYTES // (8 * tiles) // ROW_MULTIPLE * ROW_MULTIPLE
    if config.chunk is not None:
        rows = min(rows, padded(max(config.chunk, LEAST_STEP)))
    return max(ROW_MULTIPLE, rows)


def forward_bytes(config: Config, problem: Problem, rows: int) -> int:
    """Bytes of the forward pass's tile sums."""
    tiles = -(-problem.vocab // tile_columns(config.logits, slab_of(config, problem.vocab))) + 2
    return 8 * min(rows, rows_per_step(tiles, config)) * tiles


def forward(
    inputs: Inputs,
    row_weight: Tensor,  # [n]
    loss: LossSpec,
    stored: Sequence[Blocks],  # the first columns of the vocabulary, in order
    config: Config,
    labels: Labels,  # of the same tokens
) -> tuple[Statistics, Tensor]:
    """Fill the blocks; return the statistics and Σ_c 2^(t - R) [n]."""
    primitives = primitives_of(inputs.x)
    n, vocab = len(inputs.x), inputs.vocab
    homes: list[Blocks | None] = [*stored]
    parts = [blocks.columns for blocks in stored]
    slabs = [blocks.slab for blocks in stored]
    rest = slice(parts[-1].stop if parts else 0, vocab)
    if rest.start < vocab:
        homes.append(None)
        parts.append(rest)
        slabs.append(slab_of(config, vocab))
    counts: list[int] = [
        -(-(part.stop - part.start) // tile_columns(config.logits, slab))
        for part, slab in zip(parts, slabs, strict=True)
    ]
    merged = []
    steps = list(even_parts(n, rows_per_step(sum(counts), config), ROW_MULTIPLE))

    def of_step(vector: Tensor, rows: slice) -> Tensor:
        return vector if len(steps) == 1 else vector[rows]

    for rows in steps:
        some, logit = inputs.rows(rows), of_step(labels.logit, rows)
        reference = of_step(labels.reference, rows)
        sums = logit.new_empty(2, sum(counts), rows.stop - rows.start).unbind()
        references, totals = (kind.split_with_sizes(counts) for kind in sums)
        for part, blocks, slab, of_tiles, total in zip(
            parts, homes, slabs, references, totals, strict=True
        ):
            primitives.numerators(
                some, part, reference, logit, loss,
                None if blocks is None else blocks.after(rows.start), padded(n), slab,
                of_tiles, total, config.logits,
            )  # fmt: skip
        merged.append(primitives.merge(*sums))
        for blocks, of_tiles in zip(stored, references, strict=False):
            primitives.align(
                blocks, rows, of_tiles, merged[-1].reference, of_step(row_weight, rows),
                config.logits,
            )  # fmt: skip
    _, total, lse, low = merged[0]
    if len(merged) > 1:
        _, total, lse, low = (torch.cat(sums) for sums in zip(*merged, strict=True))
    return Statistics(lse, low, labels.logit), total


def add_bias_gradient(
    db: Tensor,  # [V], statistics dtype
    blocks: Sequence[Blocks],
    target: Tensor,  # [n]
    found: Factors | None,  # None: the blocks hold G
) -> None:
    """Add Eᵀ·f and the labels' entries, which no E rounds, or Gᵀ·1, to the bias's gradient."""
    for some in blocks:
        if found is not None:
            primitives_of(some.data).set_labels(some, target, None)
            inside = (target >= some.columns.start) & (target < some.columns.stop)
            label = torch.where(inside, found.label, 0.0)
            db.index_put_((torch.where(inside, target, 0),), label, accumulate=True)
        for columns, e in some.parts():
            db[columns] += _weighted_sum(e, None if found is None else found.row, db.dtype)


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
