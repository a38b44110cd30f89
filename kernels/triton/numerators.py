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
    tile_arguments,
)
from flce_tune.kernels.triton.blocks import align as align
from flce_tune.kernels.triton.blocks import scale_blocks as scale_blocks
from flce_tune.kernels.triton.blocks import scaled_rows as scaled_rows
from flce_tune.kernels.triton.blocks import set_labels as set_labels
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
