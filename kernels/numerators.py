"""Softmax numerators kept in place of logits: G = diag(f)·E, so that no pass makes G of them.

Where the loss is a weighted sum of -log p_y and lse² (no softcap, no smoothing), row i of its
gradient is A_i·p_i - B_i·[c = y_i]. With t = log2(e)·z the logits in bits and R_i a whole number
near t_iy, let

    E_ic = 2^(t_ic - R_i), 0 at the label,    f_i = A_i / Σ_c 2^(t_ic - R_i)

Then G_ic = f_i·E_ic off the label, and f is applied to rows: of dX after E·W, of x before
Eᵀ·(f·x). The label's entry G_iy joins both products by itself. The GEMM that makes the logits needs
the exponentials for the lse anyway and stores them instead, so the pass over all logits that other
strategies make (2 bytes read, 2 written each) falls away. ``overlay``, which keeps few numerators,
has no room for f·x and makes G of them in place.

Numerics: R comes from the label's logit, computed first. No row's largest exponent is below it, so
nothing that counts underflows; a tile whose maximum is above R + HEADROOM (or whose row has no
label to go by) takes its own maximum and is brought to the row's R afterwards, exactly, as both
are whole powers of two. E has the relative rounding error of its dtype, as G would; bfloat16
logits have an absolute one in the exponent, which is larger. f·x is rounded once more, but not for
the label, whose share of dW is the largest by far: G_iy is rounded as plain torch rounds it, and
multiplies x itself. float16 has no exponents to spare and is not supported. Plain torch, which has
no product to add the labels to, keeps G_iy / f_i in E at the label instead.

This file holds the storage and the algebra; the primitives are in ``torch_numerators`` (plain
torch, the reference) and ``triton/numerators``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from flce_tune.kernels.backends import has_kernels
from flce_tune.kernels.config import Tile
from flce_tune.kernels.values import Coefficients, Inputs, LossSpec, Statistics

HEADROOM = 64.0
"""Bits a numerator may exceed the label's; sums of V of them, times W, stay finite."""
LOWEST = -1e30
"""R of a tile whose logits are all -inf: below every other, and no NaN comes of it."""
LN2_HIGH = 0.693145751953125
"""ln 2 to 16 bits, so that its product with R is exact."""
LN2_LOW = math.log(2) - LN2_HIGH
ROW_MULTIPLE = 256
"""Rows of a block are padded to a multiple of every tile's, so that no tile enters the next."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """Numerators of consecutive vocabulary columns, ``slab`` columns a block, block after block."""

    data: Tensor  # [blocks · padded rows, slab]
    rows: int  # n
    columns: slice  # of the vocabulary

    @property
    def slab(self) -> int:
        """Columns of a block; the last may use fewer."""
        return self.data.shape[1]

    @property
    def padded_rows(self) -> int:
        """Rows from one block to the next."""
        return padded(self.rows)

    def __len__(self) -> int:
        """How many blocks there are."""
        return self.data.shape[0] // self.padded_rows

    def after(self, row: int) -> Tensor:  # [., slab]
        """The storage from a row of the first block on."""
        return self.data[row:] if row else self.data

    def some(self, first: int, end: int) -> Blocks:
        """Blocks first to end - 1."""
        start = self.columns.start + first * self.slab
        stop = min(self.columns.start + end * self.slab, self.columns.stop)
        rows = self.data[first * self.padded_rows : end * self.padded_rows]
        return Blocks(rows, self.rows, slice(start, stop))

    def parts(self) -> Iterator[tuple[slice, Tensor]]:
        """Each block's columns of the vocabulary, and its numerators [n, v]."""
        first, end = self.columns.start, self.columns.stop
        for index, start in enumerate(range(first, end, self.slab)):
            columns = slice(start, min(start + self.slab, end))
            rows = self.data[index * self.padded_rows :][: self.rows]
            yield columns, rows[:, : columns.stop - columns.start]


def tile_columns(tile: Tile | None, slab: int) -> int:
    """Columns of a tile: a whole block where plain torch computes it."""
    return slab if tile is None else tile.v_block


def padded(rows: int) -> int:
    """Round the rows of a block up."""
    return -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE


def first_reference(
    label_logit: Tensor,  # [n] z_iy; NaN where there is none
) -> Tensor:  # [n] R, NaN where a tile has only itself to go by
    """The whole number of bits at or above the label's logit."""
    bits = torch.ceil(label_logit * math.log2(math.e))
    return torch.where(bits.isfinite(), bits, torch.nan)


class Merged(NamedTuple):
    """Sums over all columns, each [n]."""

    reference: Tensor  # R
    total: Tensor  # Σ_c 2^(t - R)
    lse: Tensor  # R·ln 2 + ln(total), rounded
    lse_low: Tensor  # what the rounding left out


@dataclass(frozen=True, slots=True)
class Factors:
    """What makes G of E, each [n]."""

    row: Tensor  # f
    label: Tensor  # G_iy; 0 where there is none
    ordered: Tensor  # the same, in the order that was asked for


@dataclass(frozen=True)
class Entries:
    """A sparse matrix with one entry a token, which a product adds: value·rows[source] to a row."""

    ascending: Tensor | None  # [n] row of the product; None: each entry is of a row of its own
    source: Tensor  # [n]
    value: Tensor  # [n]
    rows: Tensor  # [., D]
    extent: int  # rows of the product
    block: int  # rows of a tile

    @functools.cached_property
    def row(self) -> Tensor:  # [n]
        """Row of the product, ascending."""
        if self.ascending is not None:
            return self.ascending
        return torch.arange(len(self.source), device=self.source.device)

    @functools.cached_property
    def offsets(self) -> Tensor:  # [tiles + 1] int32
        """The first entry of each tile of rows."""
        row, block = self.row, self.block
        bounds = torch.arange(
            0, self.extent + block, block, dtype=row.dtype, device=row.device
        ).clamp_(max=self.extent)
        return torch.searchsorted(row, bounds, out_int32=True)

    @functools.cached_property
    def carried(self) -> Tensor | None:  # [stretches, D] float32
        """What each stretch of them adds to a row that begins before it; None if they are few."""
        from flce_tune.kernels.triton.carried import launch_carried

        return launch_carried(self)

    @classmethod
    def of_dx(cls, value: Tensor, target: Tensor, weight: Tensor, block: int) -> Entries:
        """Label gradients [n] times the labels' rows of W [V, D]: one entry for each row."""
        return cls(None, target.clamp(0, len(weight) - 1), value, weight, len(target), block)

    @classmethod
    def of_dw(cls, value: Tensor, target: Tensor, x: Tensor, vocab: int, block: int) -> Entries:
        """Label gradients [n] times x [n, D], on the labels' rows."""
        label, order = torch.sort(target, stable=True)
        return cls(label, order, value[order], x, vocab, block)


def label_numerators(factors: Factors) -> Tensor:  # [n]
    """G_iy / f_i, for products that cannot add the labels by themselves."""
    # With z-loss, A may cancel to 0 where B does not.
    return torch.where(factors.label == 0, 0.0, factors.label / factors.row)


class Primitives(Protocol):
    """What a GPU has kernels for; documented in ``torch_numerators``."""

    def label_logits(self, inputs: Inputs, loss: LossSpec) -> Tensor:
        """z of each row's label."""

    def numerators(
        self,
        inputs: Inputs,
        columns: slice,
        reference: Tensor,
        label_logit: Tensor,
        loss: LossSpec,
        out: Tensor | None,
        block_rows: int,
        slab: int,
        tile_reference: Tensor,
        tile_total: Tensor,
        tile: Tile | None,
    ) -> None:
        """Compute the numerators of some columns and their sums per tile."""

    def merge(self, tile_reference: Tensor, tile_total: Tensor) -> Merged:
        """Sums over all columns."""

    def gradients(
        self,
        inputs: Inputs,
        blocks: Blocks,
        statistics: Statistics,
        given: Coefficients,
        loss: LossSpec,
        tile: Tile | None,
    ) -> None:
        """Recompute the logits of the blocks' columns and turn them into G."""

    def factors(
        self,
        inputs: Inputs,
        total: Tensor,
        local: Statistics,
        statistics: Statistics,
        given: Coefficients | None,
        row_weight: Tensor,
        loss: LossSpec,
        order: Tensor | None = None,
        first: int = 0,
    ) -> Factors:
        """What makes G of E."""

    def scaled_rows(self, x: Tensor, factor: Tensor, out: Tensor) -> None:
        """out = diag(factor)·x, rounded once."""

    def scale_blocks(self, blocks: Blocks, factor: Tensor) -> None:
        """Make G of E, but for the labels' entries."""

    def align(
        self,
        blocks: Blocks,
        rows: slice,
        tile_reference: Tensor,
        reference: Tensor,
        row_weight: Tensor,
        tile: Tile | None,
    ) -> None:
        """Bring tiles that took their own reference to their row's."""

    def set_labels(self, blocks: Blocks, target: Tensor, value: Tensor | None) -> None:
        """Write E, or G, at the labels."""


def primitives_of(tensor: Tensor) -> Primitives:
    """Choose the primitives for tensors like this one."""
    if has_kernels(tensor):
        from flce_tune.kernels.triton import numerators as kernels

        return kernels
    from flce_tune.kernels import torch_numerators

    return torch_numerators
