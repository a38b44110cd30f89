"""Tile skipping on plain torch: the reference of the kernels; see ``skipping``."""

from __future__ import annotations

import torch
from torch import Tensor

from flce_tune.kernels.config import Tile
from flce_tune.kernels.loss import statistics_dtype
from flce_tune.kernels.numerators import Entries, Merged
from flce_tune.kernels.skipping import Layout

STEP = 4096
"""Columns of E multiplied at a time."""


def tile_sums(
    e: Tensor,  # [height, width]; its columns of tile sums are written
    layout: Layout,
    tile_reference: Tensor,  # [T, n]
    tile_total: Tensor,  # [T, n] Σ_c 2^(t - R') over a tile, R' its reference
    merged: Merged,  # R and Σ_c 2^(t - R) of each row
    label: Tensor,  # [n] 2^(t - R) of the label; 0 where it is none of these columns
    target: Tensor,  # [n]
    row_weight: Tensor,  # [n]; rows where it is 0 do not ask for a tile
    tolerance: float,
) -> Tensor:  # [row tiles, T] bool
    """Decide which tiles are kept, and write the sums of the others; 0 for the kept ones."""
    sums = tile_total * torch.exp2(tile_reference - merged.reference)
    tile = (target // layout.columns).clamp(0, len(sums) - 1)[None]
    rest = (sums.gather(0, tile) - label).clamp(min=0)
    sums.scatter_(0, tile, rest)
    share = torch.where(row_weight == 0, 0.0, sums / merged.total)
    padded = torch.zeros(len(sums), layout.row_end, dtype=sums.dtype, device=sums.device)
    padded[:, : layout.tokens] = share
    keep = ~(padded.view(len(sums), -1, layout.rows).amax(2) < tolerance)  # NaN is kept
    of_rows = keep.repeat_interleave(layout.rows, 1)[:, : layout.tokens]
    part = e[: layout.tokens, layout.column_end :]
    part[:, : len(sums)] = torch.where(of_rows, 0.0, sums).t()
    part[:, len(sums) :].zero_()
    return keep.t().contiguous()


def column_sums(
    e: Tensor,  # [height, width]; its rows of column sums are written, and those no token has
    layout: Layout,
    factor: Tensor,  # [n] f
    keep: Tensor,  # [row tiles, T]
) -> None:
    """Write Σ_i f_i·E_ic of each tile that is left out; 0 for the kept ones."""
    e[layout.tokens :].zero_()
    for index, start in enumerate(range(0, layout.tokens, layout.rows)):
        rows = slice(start, min(start + layout.rows, layout.tokens))
        part = e[rows, : layout.vocab].to(factor.dtype)
        left_out = (~keep[index]).repeat_interleave(layout.columns)[: layout.vocab]
        sums = torch.where(left_out, (part * factor[rows, None]).sum(0), 0.0)
        e[layout.row_end + index, : layout.vocab] = sums.to(e.dtype)


def kept_product(
    e: Tensor,  # [height, width]
    layout: Layout,
    keep: Tensor,  # [row tiles, T]
    b: Tensor,  # [width, D], or [height, D] if transposed
    out: Tensor,  # [n, D], or [V, D] if transposed
    factor: Tensor | None,  # [n] of the product's rows
    entries: Entries,
    tile: Tile | None,
    *,
    transposed: bool,
) -> None:
    """diag(f)·E·b over the tiles that are kept, or Eᵀ·b, and the labels' entries."""
    kind = statistics_dtype(e.dtype)
    rows = keep.repeat_interleave(layout.rows, 0)
    total = torch.zeros(out.shape, dtype=kind, device=out.device)
    for start in range(0, layout.vocab, STEP):
        columns = slice(start, min(start + STEP, layout.vocab))
        kept = rows.repeat_interleave(layout.columns, 1)[:, columns]
        part = torch.where(kept, e[: layout.row_end, columns].to(kind), 0.0)
        if transposed:
            sums = e[layout.row_end :, columns].to(kind)
            total[columns] = part.t() @ b[: layout.row_end].to(kind)
            total[columns] += sums.t() @ b[layout.row_end :].to(kind)
        else:
            total += part[: layout.tokens] @ b[columns].to(kind)
    if not transposed:
        sums = e[: layout.tokens, layout.column_end :].to(kind)
        total += sums @ b[layout.column_end :].to(kind)
    if factor is not None:
        total *= factor[:, None]
    inside = (entries.row >= 0) & (entries.row < len(total))
    value = torch.where(inside, entries.value, 0.0)[:, None]
    row = entries.row.clamp(0, len(total) - 1)
    total.index_add_(0, row, value * entries.rows[entries.source].to(kind))
    out.copy_(total)
