"""Numerators GEMM: 2^(x·Wᵀ - R) and its row sums; see ``kernels.numerators`` for the algebra.

Algorithm: the persistent GEMM of ``logits``. Its epilogue takes the tile's maximum per row (to see
whether the given reference R will do), one fused multiply-add and one exp2 a logit, their sum, and
stores the exponentials block after block. Small kernels merge the sums, write the labels' entries,
and bring the rare tile that took its own reference to its row's.

FLOPs 2NDV. Bytes beyond the operands: 2NV written, 8·N·V / V_BLOCK of tile sums.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from flce_tune.kernels.config import Tile
from flce_tune.kernels.numerators import HEADROOM, LN2_HIGH, LN2_LOW, LOWEST, Blocks, Merged
from flce_tune.kernels.triton.arguments import (
    cdiv,
    descriptor,
    logits_grid,
    loss_scalars,
    merge_blocks,
    next_power_of_2,
    tile_arguments,
)
from flce_tune.kernels.triton.factors import factors as factors
from flce_tune.kernels.triton.labels import target_gradients, target_logits
from flce_tune.kernels.triton.logits import tile_logits, tile_position, with_bias
from flce_tune.kernels.triton.relaunch import relaunched
from flce_tune.kernels.triton.rows import finite_or_zero, two_sum
from flce_tune.kernels.triton.tiled import tiled_slab_gradient
from flce_tune.kernels.values import Coefficients, Inputs, LossSpec, Statistics

BITS = tl.constexpr(HEADROOM)
BOTTOM = tl.constexpr(LOWEST)
HIGH = tl.constexpr(LN2_HIGH)
LOW = tl.constexpr(LN2_LOW)
LABEL_ROWS = 128


@relaunched
@triton.jit
def numerators_kernel(
    x_desc,  # [n, D]
    w_desc,  # [v, D]
    out_desc,  # [blocks · block_rows, SLAB], blocks of N_BLOCK × V_BLOCK
    bias_ptr,  # [v]
    reference_ptr,  # [n]
    tile_reference_ptr,  # [tiles, n]
    tile_total_ptr,  # [tiles, n]
    n,
    hidden,
    width,  # v
    block_rows,
    factor,  # bits per unit of a raw logit
    N_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr,
    D_BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    SLAB: tl.constexpr,
    STORE: tl.constexpr,
    EVEN: tl.constexpr,  # v is a multiple of V_BLOCK
    HAS_BIAS: tl.constexpr,
):
    tiles_n = tl.cdiv(n, N_BLOCK)
    tiles_v = tl.cdiv(width, V_BLOCK)
    for tile in tl.range(tl.program_id(0), tiles_n * tiles_v, tl.num_programs(0), flatten=True):
        tile_n, tile_v = tile_position(tile, tiles_n, tiles_v, GROUP)
        row = tile_n * N_BLOCK
        column = tile_v * V_BLOCK
        acc = tile_logits(x_desc, w_desc, row, column, hidden, N_BLOCK, V_BLOCK, D_BLOCK)
        rows = row + tl.arange(0, N_BLOCK)
        columns = column + tl.arange(0, V_BLOCK)
        raw = with_bias(acc, bias_ptr, columns, width, HAS_BIAS)
        if not EVEN:  # noqa: SIM102 Triton drops the outer one, and branches on the inner
            if column + V_BLOCK > width:
                raw = tl.where((columns < width)[None, :], raw, float("-inf"))
        largest = tl.max(raw, axis=1) * factor
        given = tl.load(reference_ptr + rows, mask=rows < n, other=0.0)
        own = tl.maximum(tl.ceil(largest), BOTTOM, propagate_nan=tl.PropagateNan.ALL)
        reference = tl.where(largest <= given + BITS, given, own)
        e = tl.exp2(raw * factor - reference[:, None])
        places = tile_v.to(tl.int64) * n + rows
        tl.store(tile_reference_ptr + places, reference, mask=rows < n)
        tl.store(tile_total_ptr + places, tl.sum(e, axis=1), mask=rows < n)
        if STORE:
            place = column // SLAB * block_rows + row
            out_desc.store([place, column % SLAB], e.to(out_desc.dtype))


@relaunched
@triton.jit
def merge_kernel(
    tile_reference_ptr,  # [T, n]
    tile_total_ptr,  # [T, n]
    reference_ptr,  # [n]
    total_ptr,
    lse_ptr,
    lse_low_ptr,
    n,
    tiles,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    lanes = tl.arange(0, TILES)
    reference = tl.full([TILES, ROWS], float("-inf"), tl.float32)
    total = tl.zeros([TILES, ROWS], tl.float32)
    for start in range(0, tiles, TILES):
        tile = start + lanes
        offsets = tile[:, None].to(tl.int64) * n + rows[None, :]
        ok = (tile < tiles)[:, None] & (rows < n)[None, :]
        of_tile = tl.load(tile_reference_ptr + offsets, mask=ok, other=float("-inf"))
        new = tl.maximum(reference, of_tile, propagate_nan=tl.PropagateNan.ALL)
        anchor = finite_or_zero(new)
        total = total * tl.exp2(reference - anchor)
        total += tl.load(tile_total_ptr + offsets, mask=ok, other=0.0) * tl.exp2(of_tile - anchor)
        reference = new
    of_row = tl.max(reference, axis=0)
    total = tl.sum(total * tl.exp2(reference - finite_or_zero(of_row)[None, :]), axis=0)
    tl.store(reference_ptr + rows, of_row, mask=rows < n)
    tl.store(total_ptr + rows, total, mask=rows < n)
    lse, low = two_sum(HIGH * of_row, LOW * of_row + tl.log(total))
    tl.store(lse_ptr + rows, lse, mask=rows < n)
    tl.store(lse_low_ptr + rows, low, mask=rows < n)


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


def label_logits(inputs: Inputs, loss: LossSpec) -> Tensor:
    """z of each row's label, by one dot product a row."""
    into = torch.empty(len(inputs.x), dtype=torch.float32, device=inputs.x.device)
    target_logits(inputs, loss, None, into)
    return into


def numerators(
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
    assert tile is not None, "numerators on a GPU need a tile"
    part = inputs.columns(columns)
    n, hidden = inputs.x.shape
    width = columns.stop - columns.start
    scale, _ = loss_scalars(loss)
    factor = scale * math.log2(math.e)
    if tile.schedule != "compiler":
        from flce_tune.kernels.hopper.launch import launch_numerators

        launch_numerators(
            part, out, block_rows, slab, reference, tile_reference, tile_total, factor, tile
        )
        return
    numerators_kernel[logits_grid(tile, n, width, inputs.x)](
        descriptor(inputs.x, [tile.n_block, tile.d_block]),
        descriptor(part.weight, [tile.v_block, tile.d_block]),
        None if out is None else descriptor(out, [tile.n_block, tile.v_block]),
        part.bias,
        reference,
        tile_reference,
        tile_total,
        n,
        hidden,
        width,
        block_rows,
        factor,
        **tile_arguments(tile),
        SLAB=slab,
        STORE=out is not None,
        EVEN=width % tile.v_block == 0,
        HAS_BIAS=part.bias is not None,
    )


def merge(tile_reference: Tensor, tile_total: Tensor) -> Merged:
    """Each row's R, Σ 2^(t - R) and lse."""
    tiles, n = tile_reference.shape
    reference, total, lse, low = torch.empty(4, n, device=tile_total.device).unbind()
    blocks = merge_blocks(n)
    merge_kernel[(cdiv(n, blocks["ROWS"]),)](
        tile_reference, tile_total, reference, total, lse, low, n, tiles, **blocks
    )  # fmt: skip
    return Merged(reference, total, lse, low)


def gradients(
    inputs: Inputs,
    blocks: Blocks,
    statistics: Statistics,
    given: Coefficients,
    loss: LossSpec,
    tile: Tile | None,
) -> None:
    """Recompute the logits of the blocks' columns and turn them into G."""
    assert tile is not None, "numerators on a GPU need a tile"
    part = inputs.columns(blocks.columns)
    tiled_slab_gradient(
        part, inputs, statistics, given, loss, blocks.data, tile, blocks.padded_rows
    )
    for columns, g in blocks.parts():
        target_gradients(inputs, columns.start, statistics, given, loss, g)


def scaled_rows(x: Tensor, factor: Tensor, out: Tensor) -> None:
    """out = diag(factor)·x, rounded once."""
    n, hidden = x.shape
    block = min(2048, next_power_of_2(hidden))
    scaled_rows_kernel[(n, cdiv(hidden, block))](
        x, x.stride(0), factor, out, out.stride(0), hidden, BLOCK=block, num_warps=4
    )


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
    """Write E at the labels."""
    n = len(target)
    first, end = blocks.columns.start, blocks.columns.stop
    set_labels_kernel[(cdiv(n, LABEL_ROWS),)](
        blocks.data, target, value, n, first, end - first, blocks.padded_rows,
        SLAB=blocks.slab, ROWS=LABEL_ROWS,
    )  # fmt: skip
