"""The primitives of softmax numerators on plain torch; see ``numerators``."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flce_tune.kernels.config import Tile
from flce_tune.kernels.loss import coefficients, out_of_range, scaled_logits, statistics_dtype
from flce_tune.kernels.numerators import (
    HEADROOM,
    LN2_HIGH,
    LN2_LOW,
    LOWEST,
    Blocks,
    Factors,
    Merged,
    tile_columns,
)
from flce_tune.kernels.torch_backend import raw_logits, rounded_sum, slab_gradient
from flce_tune.kernels.values import Coefficients, Inputs, LossSpec, Statistics


def label_logits(inputs: Inputs, loss: LossSpec) -> Tensor:  # [n], NaN where there is no label
    """z of each row's label, by one dot product a row."""
    vocab = inputs.vocab
    known = (inputs.target >= 0) & (inputs.target < vocab)
    target = inputs.target.clamp(0, vocab - 1)
    dtype = statistics_dtype(inputs.x.dtype)
    raw = torch.linalg.vecdot(inputs.x.to(dtype), inputs.weight[target].to(dtype))
    if inputs.bias is not None:
        raw = raw + inputs.bias[target]
    return scaled_logits(raw, loss).masked_fill(~known, torch.nan)


def numerators(
    inputs: Inputs,  # of some tokens
    columns: slice,  # of the vocabulary
    reference: Tensor,  # [n] R, NaN for the tile's own
    label_logit: Tensor,  # [n]; overwritten where the label is in columns
    loss: LossSpec,
    out: Tensor | None,  # [..., slab] from the first of these rows on; None: statistics only
    block_rows: int,  # rows from one block to the next
    slab: int,
    tile_reference: Tensor,  # [tiles of the columns, n] what each tile took for R
    tile_total: Tensor,  # [tiles of the columns, n] Σ 2^(t - R)
    tile: Tile | None,
) -> None:
    """Compute the numerators of some columns and their sums per tile."""
    n, v_block = len(inputs.x), tile_columns(tile, slab)
    for index, start in enumerate(range(columns.start, columns.stop, v_block)):
        part = slice(start, min(start + v_block, columns.stop))
        raw = inputs.x.new_empty(n, part.stop - part.start)
        raw_logits(inputs.columns(part), raw)
        z = scaled_logits(raw, loss)
        local = inputs.target - start
        inside = (local >= 0) & (local < z.shape[1])
        picked = z.gather(1, local.clamp(0, z.shape[1] - 1)[:, None])[:, 0]
        label_logit.copy_(torch.where(inside, picked, label_logit))
        largest = z.amax(1) * math.log2(math.e)
        own = largest.ceil().clamp(min=LOWEST)
        chosen = torch.where(largest <= reference + HEADROOM, reference, own)
        near = (z - (LN2_HIGH * chosen)[:, None]) - (LN2_LOW * chosen)[:, None]
        e = torch.exp(near)  # 2^(t - R); z·log2(e) rounded would cost as much as z is large
        tile_reference[index] = chosen
        tile_total[index] = e.sum(1)
        if out is not None:
            block, column = divmod(start - columns.start, slab)
            rows = out[block * block_rows :][:n]
            rows[:, column : column + e.shape[1]] = e.to(out.dtype)


def merge(
    tile_reference: Tensor,  # [T, n]
    tile_total: Tensor,  # [T, n]
) -> Merged:
    """Each row's R, Σ 2^(t - R) and lse."""
    reference = tile_reference.amax(0)
    total = (tile_total * torch.exp2(tile_reference - reference)).sum(0)
    lse, low = rounded_sum(LN2_HIGH * reference, LN2_LOW * reference + torch.log(total))
    return Merged(reference, total, lse, low)


def gradients(
    inputs: Inputs,
    blocks: Blocks,  # G of their columns afterwards
    statistics: Statistics,
    given: Coefficients,
    loss: LossSpec,
    tile: Tile | None,
) -> None:
    """Recompute the logits of the blocks' columns and turn them into G."""
    for columns, g in blocks.parts():
        slab_gradient(inputs, columns, statistics, given, loss, g, tile)


def factors(
    inputs: Inputs,  # of some tokens
    total: Tensor,  # [n] Σ_c 2^(t - R) of this rank's columns
    local: Statistics,  # of the same
    statistics: Statistics,  # of the whole vocabulary; ``local`` where that is all of it
    given: Coefficients | None,  # None: those of the loss, for the row weights
    row_weight: Tensor,  # [n]
    loss: LossSpec,
    order: Tensor | None = None,  # [n] tokens, counted from ``first``: of ``ordered``
    first: int = 0,
) -> Factors:
    """f and G_iy; f is NaN where the label is unknown, so that the row's gradient is."""
    if given is None:
        given = coefficients(inputs, statistics, row_weight, loss)
    if statistics is not local:
        total = _total_of_all(total, local, statistics)
    scale = 1.0 if loss.logit_scale is None else loss.logit_scale
    unknown = out_of_range(inputs.target, inputs.vocab, loss.ignore_index) & (given.b != 0)
    known = (inputs.target >= 0) & (inputs.target < inputs.vocab)
    p = torch.exp(statistics.target_logit - statistics.lse)
    # The total needs no lse, so A's factor for what lse's rounding left out comes off again.
    a = given.a * torch.exp(statistics.lse_low)
    row = torch.where(a == 0, 0.0, scale * a / total).masked_fill(unknown, torch.nan)
    label = torch.where(known & (given.b != 0), scale * (p * given.a - given.b), 0.0)
    return Factors(row, label, label if order is None else label[order - first])


def _total_of_all(total: Tensor, local: Statistics, merged: Statistics) -> Tensor:  # [n]
    """The sum over all ranks' columns in units of this rank's R; infinite where it has no share."""
    share = torch.exp((local.lse - merged.lse) + (local.lse_low - merged.lse_low))
    return torch.where(share == 0, torch.inf, total / share)


def scaled_rows(
    x: Tensor,  # [n, D]
    factor: Tensor,  # [n], statistics dtype
    out: Tensor,  # [n, D], as x
) -> None:
    """out = diag(factor)·x, rounded once."""
    torch.mul(x, factor[:, None], out=out)


def scale_blocks(
    blocks: Blocks,  # E; G afterwards, but for the labels' entries
    factor: Tensor,  # [n] f; where it is 0, so is G
) -> None:
    """Make G of E."""
    for _, e in blocks.parts():
        g = torch.where(factor[:, None] == 0, 0.0, e.to(factor.dtype) * factor[:, None])
        e.copy_(g)


def align(
    blocks: Blocks,
    rows: slice,
    tile_reference: Tensor,  # [tiles of the blocks, rows]
    reference: Tensor,  # [rows]
    row_weight: Tensor,  # [rows]; rows where it is 0 are left as they are
    tile: Tile | None,
) -> None:
    """Bring tiles that took their own reference to their row's, exactly."""
    v_block = tile_columns(tile, blocks.slab)
    share = torch.exp2(tile_reference - reference)
    share = torch.where(row_weight == 0, 1.0, share)
    per_block = blocks.slab // v_block
    for index, (_, e) in enumerate(blocks.parts()):
        of_tiles = share[index * per_block :][:per_block].t()
        of_columns = of_tiles.repeat_interleave(v_block, dim=1)[:, : e.shape[1]]
        e[rows] = (e[rows].to(share.dtype) * of_columns).to(e.dtype)


def set_labels(
    blocks: Blocks,
    target: Tensor,  # [n]
    value: Tensor | None,  # [n]; None: zeros
) -> None:
    """Write E, or G, at the labels."""
    for columns, e in blocks.parts():
        row = torch.nonzero((target >= columns.start) & (target < columns.stop))[:, 0]
        e[row, target[row] - columns.start] = 0.0 if value is None else value[row].to(e.dtype)
