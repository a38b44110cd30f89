"""The strategies' primitives on Triton and cuBLAS; the counterpart of ``torch_backend``."""

from __future__ import annotations

import torch
from torch import Tensor

from flce_tune.kernels.config import Tile
from flce_tune.kernels.torch_backend import raw_logits
from flce_tune.kernels.triton import labels, rows
from flce_tune.kernels.triton import logits as logits_gemm
from flce_tune.kernels.triton.arguments import (
    begin_alike,
    cdiv,
    descriptor,
    empty_statistics,
    gradient_flags,
    logits_grid,
    loss_scalars,
    merge_blocks,
    next_power_of_2,
    statistics_flags,
    tile_arguments,
    units_before,
)
from flce_tune.kernels.triton.reduce import row_weights as row_weights
from flce_tune.kernels.triton.reduce import total_loss as total_loss
from flce_tune.kernels.values import (
    Coefficients,
    Inputs,
    Labels,
    LossSpec,
    Statistics,
    Wanted,
)

STATISTICS_LANES = 512
STATISTICS_DEPTH = 4
STATISTICS_WARPS = 2
GRADIENT = (1024, 2)
RAGGED_GRADIENT = (512, 1)
"""Columns and warps of a program. Neighbouring blocks of a ragged row share 128-byte lines, which
are written whole if one program follows the other."""
MOST_ROWS = 65535
"""Of a grid's second dimension."""
PICK_ROWS = 128


def logits(
    inputs: Inputs,
    loss: LossSpec,
    wanted: Wanted,
    out: Tensor | None,  # [n, V]; holds the raw logits afterwards; None: statistics only
    tile: Tile | None,  # None: cuBLAS, which needs ``out``
) -> Statistics:
    """Compute raw logits into ``out``, if any, and return their statistics."""
    if tile is not None:
        return _tiled_logits(inputs, loss, wanted, out, tile)
    if out is None:
        raise ValueError("statistics without storing logits need a tile, got None")
    raw_logits(inputs, out)
    return statistics(out, inputs, loss, wanted)


def statistics(
    raw: Tensor,  # [n, V]
    labels: Labels,
    loss: LossSpec,
    wanted: Wanted,
) -> Statistics:
    """Row statistics of stored logits."""
    n, vocab = raw.shape
    result = empty_statistics(n, raw.device, loss, wanted)
    rows.statistics_kernel[(n,)](
        raw,
        raw.stride(0),
        labels.target,
        labels.class_weight,
        result.lse,
        result.lse_low,
        result.target_logit,
        result.logit_sum,
        result.mean_logit,
        result.prediction,
        vocab,
        *loss_scalars(loss),
        **statistics_flags(labels, loss, wanted),
        LANES=min(STATISTICS_LANES, next_power_of_2(vocab)),
        DEPTH=STATISTICS_DEPTH if vocab > STATISTICS_LANES else 1,
        num_warps=STATISTICS_WARPS,
    )
    return result


def gradient(
    raw: Tensor,  # [n, v] raw logits of columns first, first + 1, ...
    labels: Labels,
    stats: Statistics,
    coefficients: Coefficients,
    loss: LossSpec,
    out: Tensor,  # [n, v] ∂L/∂a; may be raw itself
    first_column: int = 0,
) -> None:
    """Turn raw logits into their gradient."""
    n, width = raw.shape
    before = units_before(raw)
    most, warps = RAGGED_GRADIENT if before else GRADIENT
    block = min(most, next_power_of_2(width))
    blocks = cdiv(width + before, block)
    by_row = before > 0 and n <= MOST_ROWS
    rows.gradient_kernel[(blocks, n) if by_row else (n, blocks)](
        raw,
        raw.stride(0),
        out,
        out.stride(0),
        stats.lse,
        labels.target,
        coefficients.a,
        coefficients.b,
        coefficients.c,
        coefficients.e,
        labels.class_weight,
        first_column,
        width,
        labels.vocab,
        *loss_scalars(loss),
        **gradient_flags(labels, coefficients, loss),
        ALIKE=begin_alike(raw, out),
        BY_ROW=by_row,
        BLOCK=block,
        num_warps=warps,
    )


def slab_gradient(
    inputs: Inputs,
    columns: slice,  # of the vocabulary
    stats: Statistics,
    coefficients: Coefficients,
    loss: LossSpec,
    out: Tensor,  # [N, v], compute dtype
    tile: Tile | None,
) -> None:
    """Recompute the raw logits of a vocabulary slab and turn them into their gradient."""
    slab = inputs.columns(columns)
    if tile is None:
        raw_logits(slab, out)
        gradient(out, inputs, stats, coefficients, loss, out, columns.start)
    else:
        tiled_slab_gradient(slab, inputs, stats, coefficients, loss, out, tile)
    target_gradients(inputs, columns.start, stats, coefficients, loss, out)


def tiled_slab_gradient(
    slab: Inputs,  # of v columns
    inputs: Inputs,
    stats: Statistics,
    coefficients: Coefficients,
    loss: LossSpec,
    out: Tensor,  # [N, v], or blocks of some columns, ``block_rows`` rows from each to the next
    tile: Tile,
    block_rows: int = 0,
) -> None:
    """Write G of a slab, but for the labels' entries."""
    (n, hidden), width = inputs.x.shape, slab.vocab
    flags = gradient_flags(inputs, coefficients, loss)
    if tile.schedule != "compiler":
        if not (flags["HAS_SOFTCAP"] or flags["HAS_C"] or flags["HAS_E"]):
            from flce_tune.kernels.hopper.launch import launch_gradient

            launch_gradient(
                slab, inputs.vocab, stats, coefficients, loss_scalars(loss)[0], out, block_rows,
                tile,
            )  # fmt: skip
            return
        tile = tile.compiled
    logits_gemm.slab_gradient_kernel[logits_grid(tile, n, width, inputs.x)](
        descriptor(inputs.x, [tile.n_block, tile.d_block]),
        descriptor(slab.weight, [tile.v_block, tile.d_block]),
        descriptor(out, [tile.n_block, tile.v_block]),
        slab.bias,
        inputs.target,
        stats.lse,
        coefficients.a,
        coefficients.b,
        coefficients.c,
        coefficients.e,
        slab.class_weight,
        n,
        hidden,
        width,
        inputs.weight.shape[0],
        block_rows,
        *loss_scalars(loss),
        **tile_arguments(tile),
        SLAB=out.shape[1] if block_rows else 0,
        HAS_BIAS=slab.bias is not None,
        HAS_SCALE=loss.logit_scale is not None,
        **flags,
    )


def target_gradients(
    inputs: Inputs,
    first_column: int,
    stats: Statistics,
    coefficients: Coefficients,
    loss: LossSpec,
    out: Tensor,  # [N, v]
) -> None:
    """Write G at the labels, from the label logits the lse was computed with.

    Recomputed logits may round differently, and p - 1 has no digits to spare where p is near 1.
    """
    n, width = out.shape
    labels.target_gradient_kernel[(cdiv(n, PICK_ROWS),)](
        out,
        out.stride(0),
        inputs.target,
        stats.target_logit,
        stats.lse,
        coefficients.a,
        coefficients.b,
        coefficients.c,
        coefficients.e,
        inputs.class_weight,
        n,
        first_column,
        width,
        *loss_scalars(loss),
        **gradient_flags(inputs, coefficients, loss),
        ROWS=PICK_ROWS,
    )


def _tiled_logits(
    inputs: Inputs, loss: LossSpec, wanted: Wanted, out: Tensor | None, tile: Tile
) -> Statistics:
    n, vocab = len(inputs.x), inputs.vocab
    tiles = cdiv(vocab, tile.v_block)
    result = empty_statistics(n, inputs.x.device, loss, wanted)

    def per_tile(needed: bool, dtype: torch.dtype = torch.float32) -> Tensor | None:
        return torch.empty(tiles, n, dtype=dtype, device=inputs.x.device) if needed else None

    tile_max, tile_total = per_tile(True), per_tile(True)
    tile_sum = per_tile(loss.label_smoothing > 0)
    tile_moment = per_tile(wanted.entropy)
    tile_best = per_tile(wanted.prediction, torch.int32)
    flags = statistics_flags(inputs, loss, wanted)
    tables = (tile_max, tile_total, tile_sum, tile_moment, tile_best)
    _launch_logits(inputs, loss, flags, out, tables, tile)
    blocks = merge_blocks(n)
    rows.merge_kernel[(cdiv(n, blocks["ROWS"]),)](
        tile_max,
        tile_total,
        tile_sum,
        tile_moment,
        tile_best,
        result.lse,
        result.lse_low,
        result.logit_sum,
        result.mean_logit,
        result.prediction,
        n,
        tiles,
        WANT_SUM=flags["WANT_SUM"],
        WANT_MEAN=flags["WANT_MEAN"],
        WANT_PREDICTION=flags["WANT_PREDICTION"],
        **blocks,
    )
    target_logits(inputs, loss, out, result.target_logit)
    return result


def _launch_logits(
    inputs: Inputs,
    loss: LossSpec,
    flags: dict[str, bool],
    out: Tensor | None,
    tables: tuple[Tensor | None, ...],  # each [tiles, n]
    tile: Tile,
) -> None:
    (n, hidden), vocab = inputs.x.shape, inputs.vocab
    if tile.schedule != "compiler":
        others = ("HAS_SOFTCAP", "WANT_SUM", "WANT_MEAN", "WANT_PREDICTION")
        if not any(flags[name] for name in others):
            from flce_tune.kernels.hopper.launch import launch_logits

            launch_logits(inputs, out, tables[:2], loss_scalars(loss)[0], tile)
            return
        tile = tile.compiled
    logits_gemm.logits_kernel[logits_grid(tile, n, vocab, inputs.x)](
        descriptor(inputs.x, [tile.n_block, tile.d_block]),
        descriptor(inputs.weight, [tile.v_block, tile.d_block]),
        None if out is None else descriptor(out, [tile.n_block, tile.v_block]),
        inputs.bias,
        inputs.class_weight,
        *tables,
        n,
        hidden,
        vocab,
        *loss_scalars(loss),
        **tile_arguments(tile),
        STORE=out is not None,
        EVEN=vocab % tile.v_block == 0,
        HAS_BIAS=inputs.bias is not None,
        **flags,
    )


def target_logits(inputs: Inputs, loss: LossSpec, stored: Tensor | None, into: Tensor) -> None:
    """Write z of each row's label: from the stored logits, or else from the label's row of W."""
    n, hidden = inputs.x.shape
    vocab = inputs.weight.shape[0]
    has_softcap = loss.softcap is not None
    if stored is not None:
        labels.stored_target_logit_kernel[(cdiv(n, PICK_ROWS),)](
            stored,
            stored.stride(0),
            inputs.target,
            into,
            n,
            vocab,
            *loss_scalars(loss),
            HAS_SOFTCAP=has_softcap,
            ROWS=PICK_ROWS,
        )
        return
    labels.target_logit_kernel[(n,)](
        inputs.x,
        inputs.weight,
        inputs.bias,
        inputs.target,
        into,
        vocab,
        hidden,
        inputs.x.stride(0),
        inputs.weight.stride(0),
        *loss_scalars(loss),
        HAS_BIAS=inputs.bias is not None,
        HAS_SOFTCAP=has_softcap,
        BLOCK=min(1024, next_power_of_2(hidden)),
        num_warps=4,
    )
