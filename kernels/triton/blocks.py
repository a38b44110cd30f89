"""Passes over stored numerators and over x: to one reference a row, to G, by a factor a row.

Algorithms: elementwise, in place but for ``scaled_rows``; ``align`` touches only the tiles that
took a reference of their own. Numerics: float32, rounded once more. Bytes: 2 read and 2 written for
each numerator, or element of x, that is touched.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from flce_tune.kernels.config import Tile
from flce_tune.kernels.numerators import Blocks
from flce_tune.kernels.triton.arguments import cdiv, next_power_of_2
from flce_tune.kernels.triton.relaunch import relaunched

LABEL_ROWS = 128


@relaunched
@triton.jit
def align_kernel(
    e_ptr,  # numerators of the first row, block after block
    tile_reference_ptr,  # [tiles, n]
    reference_ptr,  # [n]
    row_weight_ptr,  # [n]
    n,
    tiles,
    block_rows,
    SLAB: tl.constexpr,
    V_BLOCK: tl.constexpr,
    TILES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if tl.load(row_weight_ptr + row) == 0:
        return
    reference = tl.load(reference_ptr + row)
    for start in range(0, tiles, TILES):
        lanes = start + tl.arange(0, TILES)
        of_tiles = tl.load(
            tile_reference_ptr + lanes.to(tl.int64) * n + row, mask=lanes < tiles, other=reference
        )
        if tl.min(of_tiles, axis=0) != reference:
            for tile in range(start, min(start + TILES, tiles)):
                share = tl.exp2(
                    tl.load(tile_reference_ptr + tile * n.to(tl.int64) + row) - reference
                )
                if share != 1.0:
                    column = tile * V_BLOCK
                    block = (column // SLAB).to(tl.int64)
                    places = e_ptr + (block * block_rows + row) * SLAB + column % SLAB
                    places += tl.arange(0, V_BLOCK)
                    e = tl.load(places).to(tl.float32) * share
                    tl.store(places, e.to(e_ptr.dtype.element_ty))


@relaunched
@triton.jit
def scale_blocks_kernel(
    e_ptr,  # numerators, block after block
    factor_ptr,  # [n]
    n,
    block_rows,
    SLAB: tl.constexpr,
    BLOCK: tl.constexpr,
):
    parts: tl.constexpr = (SLAB + BLOCK - 1) // BLOCK
    program = tl.program_id(0)
    row = program // parts
    columns = program % parts * BLOCK + tl.arange(0, BLOCK)
    places = e_ptr + row.to(tl.int64) * SLAB + columns
    token = row % block_rows
    if token < n:
        e = tl.load(places, mask=columns < SLAB, other=0.0).to(tl.float32)
        factor = tl.load(factor_ptr + token)
        g = tl.where(factor == 0.0, 0.0, e * factor)
        tl.store(places, g.to(e_ptr.dtype.element_ty), mask=columns < SLAB)


@relaunched
@triton.jit
def set_labels_kernel(
    e_ptr,  # numerators, block after block
    target_ptr,  # [n]
    value_ptr,  # [n], or None for zeros
    n,
    first_column,
    width,
    block_rows,
    SLAB: tl.constexpr,
    ROWS: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    target = tl.load(target_ptr + rows, mask=rows < n, other=-1)
    column = target - first_column
    here = (column >= 0) & (column < width) & (rows < n)
    value = tl.zeros([ROWS], tl.float32)
    if value_ptr is not None:
        value = tl.load(value_ptr + rows, mask=here, other=0.0)
    places = (column // SLAB * block_rows + rows) * SLAB + column % SLAB
    tl.store(e_ptr + places, value.to(e_ptr.dtype.element_ty), mask=here)


@relaunched
@triton.jit
def scaled_rows_kernel(
    x_ptr,  # [n, D]
    x_stride,
    factor_ptr,  # [n]
    out_ptr,  # [n, D]
    out_stride,
    hidden,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * x_stride + d, mask=d < hidden, other=0.0).to(tl.float32)
    y = (x * tl.load(factor_ptr + row)).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * out_stride + d, y, mask=d < hidden)


# Launchers, with the signatures of the primitives in ``kernels.numerators``


def scaled_rows(x: Tensor, factor: Tensor, out: Tensor) -> None:
    """out = diag(factor)·x, rounded once."""
    n, hidden = x.shape
    block = min(2048, next_power_of_2(hidden))
    scaled_rows_kernel[(n, cdiv(hidden, block))](
        x, x.stride(0), factor, out, out.stride(0), hidden, BLOCK=block, num_warps=4
    )


def scale_blocks(blocks: Blocks, factor: Tensor) -> None:
    """Make G of E, but for the labels' entries, in the order of the memory."""
    block = min(1024, next_power_of_2(blocks.slab))
    scale_blocks_kernel[(len(blocks.data) * cdiv(blocks.slab, block),)](
        blocks.data, factor, len(factor), blocks.padded_rows, SLAB=blocks.slab, BLOCK=block,
        num_warps=2,
    )  # fmt: skip


def align(
    blocks: Blocks,
    rows: slice,
    tile_reference: Tensor,
    reference: Tensor,
    row_weight: Tensor,
    tile: Tile | None,
) -> None:
    """Bring tiles that took their own reference to their row's, exactly."""
    assert tile is not None, "numerators on a GPU need a tile"
    tiles, n = tile_reference.shape
    align_kernel[(n,)](
        blocks.after(rows.start), tile_reference, reference, row_weight, n, tiles,
        blocks.padded_rows, SLAB=blocks.slab, V_BLOCK=tile.v_block, TILES=128,
    )  # fmt: skip


def set_labels(blocks: Blocks, target: Tensor, value: Tensor | None) -> None:
    """Write E, or G, at the labels."""
    n = len(target)
    first, end = blocks.columns.start, blocks.columns.stop
    set_labels_kernel[(cdiv(n, LABEL_ROWS),)](
        blocks.data, target, value, n, first, end - first, blocks.padded_rows,
        SLAB=blocks.slab, ROWS=LABEL_ROWS,
    )  # fmt: skip
