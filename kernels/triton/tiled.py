"""Launchers of the logits' GEMM in tiles: with statistics, or recomputed as a slab's gradient.

Tiles scheduled by hand serve what they have epilogues for, the compiler's the rest.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flce_tune.kernels.config import Tile
from flce_tune.kernels.triton import logits as logits_gemm
from flce_tune.kernels.triton import rows
from flce_tune.kernels.triton.arguments import (
    cdiv,
    descriptor,
    empty_statistics,
    gradient_flags,
    logits_grid,
    loss_scalars,
    merge_blocks,
    statistics_flags,
    tile_arguments,
)
from flce_tune.kernels.triton.labels import target_logits
from flce_tune.kernels.values import Coefficients, Inputs, LossSpec, Statistics, Wanted


def tiled_logits(
    inputs: Inputs, loss: LossSpec, wanted: Wanted, out: Tensor | None, tile: Tile
) -> Statistics:
    """Compute raw logits into ``out``, if any, and return their statistics, tile by tile."""
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
