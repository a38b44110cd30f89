"""Tile skipping: which tiles are kept, what stands in for the others, and products over lists.

Algorithm: see ``kernels.skipping``. The product is the persistent GEMM of ``product``, whose main
loop walks a list of tiles along the contraction, a few K_BLOCKs each; the next tile's number is
loaded one step ahead, so that no copy waits for it. A list costs what it is long, so programs take
tiles in an order in which costs fall (for dW: the most probable columns first).

FLOPs 2·D a kept element of E. Bytes beyond the operands: 8·N·V / V_BLOCK of tile sums read, E of
the tiles left out read once (2 bytes an element).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flce_tune.kernels.config import Tile
from flce_tune.kernels.limits import programs_per_sm
from flce_tune.kernels.numerators import Entries, Merged
from flce_tune.kernels.problem import describe_device
from flce_tune.kernels.skipping import Layout, Lists
from flce_tune.kernels.triton.arguments import cdiv, descriptor
from flce_tune.kernels.triton.launch import ENTRY_BLOCK, entry_arguments
from flce_tune.kernels.triton.logits import tile_position
from flce_tune.kernels.triton.product import add_entries
from flce_tune.kernels.triton.relaunch import relaunched

TILES = 16
"""Tile sums looked at by one program, for each row of a tile."""


@relaunched
@triton.jit
def tile_sums_kernel(
    e_ptr,  # [height, width]
    keep_ptr,  # [row tiles, T] uint8
    tile_reference_ptr,  # [T, n]
    tile_total_ptr,  # [T, n]
    reference_ptr,  # [n]
    total_ptr,
    label_ptr,
    target_ptr,
    row_weight_ptr,
    n,
    tiles,  # T
    column_end,
    width,
    tolerance,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILES: tl.constexpr,
):
    block = tl.program_id(0)
    rows = block * ROWS + tl.arange(0, ROWS)
    tile = tl.program_id(1) * TILES + tl.arange(0, TILES)
    reference = tl.load(reference_ptr + rows, mask=rows < n, other=0.0)
    total = tl.load(total_ptr + rows, mask=rows < n, other=1.0)
    label = tl.load(label_ptr + rows, mask=rows < n, other=0.0)
    target = tl.load(target_ptr + rows, mask=rows < n, other=-1)
    counts = tl.load(row_weight_ptr + rows, mask=rows < n, other=0.0) != 0
    places = tile[None, :].to(tl.int64) * n + rows[:, None]
    ok = (rows < n)[:, None] & (tile < tiles)[None, :]
    share = tl.exp2(tl.load(tile_reference_ptr + places, mask=ok, other=0.0) - reference[:, None])
    sums = tl.load(tile_total_ptr + places, mask=ok, other=0.0) * share
    has_label = (target >= 0)[:, None] & ((target // COLUMNS)[:, None] == tile[None, :])
    rest = tl.maximum(sums - label[:, None], 0.0, propagate_nan=tl.PropagateNan.ALL)
    sums = tl.where(has_label, rest, sums)
    probability = tl.where(counts[:, None], sums / total[:, None], 0.0)
    # NaN is kept: the comparison is false.
    left_out = tl.sum((probability < tolerance).to(tl.int32), axis=0) == ROWS
    kept = (left_out == 0).to(tl.uint8)
    tl.store(keep_ptr + block * tiles + tile, kept, mask=tile < tiles)
    column = column_end + tile
    sums = tl.where(left_out[None, :] & (tile < tiles)[None, :], sums, 0.0)
    into = e_ptr + rows[:, None].to(tl.int64) * width + column[None, :]
    ok = (rows < n)[:, None] & (column < width)[None, :]
    tl.store(into, sums.to(e_ptr.dtype.element_ty), mask=ok)


@relaunched
@triton.jit
def column_sums_kernel(
    e_ptr,  # [height, width]
    keep_ptr,  # [row tiles, T] uint8
    factor_ptr,  # [n]
    n,
    tiles,
    row_end,
    width,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    tile, block = tl.program_id(0), tl.program_id(1)
    columns = tile * COLUMNS + tl.arange(0, COLUMNS)
    sums = tl.zeros([COLUMNS], tl.float32)
    if tl.load(keep_ptr + block * tiles + tile) == 0:
        rows = block * ROWS + tl.arange(0, ROWS)
        factor = tl.load(factor_ptr + rows, mask=rows < n, other=0.0)
        places = rows[:, None].to(tl.int64) * width + columns[None, :]
        e = tl.load(e_ptr + places, mask=(rows < n)[:, None], other=0.0).to(tl.float32)
        sums = tl.sum(e * factor[:, None], axis=0)
    into = e_ptr + (row_end + block).to(tl.int64) * width + columns
    tl.store(into, sums.to(e_ptr.dtype.element_ty))


@relaunched
@triton.jit
def kept_product_kernel(
    a_desc,  # [m, k], or [k, m] if TRANSPOSED
    b_desc,  # [k, n]
    out_desc,  # [m, n], blocks of M_BLOCK × N_BLOCK
    list_ptr,  # [tiles of m, list_stride] int32, tiles of K_TILE along k
    count_ptr,  # [tiles of m] int32
    list_stride,
    factor_ptr,  # [m] float32, or unused
    entry_offset_ptr,  # as in ``product``
    entry_row_ptr,
    entry_source_ptr,
    entry_value_ptr,
    b_ptr,
    entry_first,
    b_stride,
    m,
    n,
    M_BLOCK: tl.constexpr,
    N_BLOCK: tl.constexpr,
    K_BLOCK: tl.constexpr,
    K_TILE: tl.constexpr,
    GROUP: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    HAS_FACTOR: tl.constexpr,
    ENTRY_BLOCK: tl.constexpr,
):
    STEPS: tl.constexpr = K_TILE // K_BLOCK
    tiles_m = tl.cdiv(m, M_BLOCK)
    tiles_n = tl.cdiv(n, N_BLOCK)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0)):
        tile_m, tile_n = tile_position(tile, tiles_m, tiles_n, GROUP)
        row = tile_m * M_BLOCK
        column = tile_n * N_BLOCK
        count = tl.load(count_ptr + tile_m)
        place = list_ptr + tile_m * list_stride
        k_tile = tl.load(place, mask=count > 0, other=0)
        acc = tl.zeros([M_BLOCK, N_BLOCK], tl.float32)
        for i in range(count * STEPS):
            k = k_tile * K_TILE + i % STEPS * K_BLOCK
            after = (i + 1) // STEPS
            k_tile = tl.load(place + after, mask=after < count, other=0)
            if TRANSPOSED:
                a = a_desc.load([k, row]).T
            else:
                a = a_desc.load([row, k])
            acc = tl.dot(a, b_desc.load([k, column]), acc)
        if HAS_FACTOR:
            rows = row + tl.arange(0, M_BLOCK)
            acc *= tl.load(factor_ptr + rows, mask=rows < m, other=0.0)[:, None]
        end = tl.load(entry_offset_ptr + tile_m + 1)
        for first in tl.range(tl.load(entry_offset_ptr + tile_m), end, ENTRY_BLOCK, num_stages=1):
            acc = add_entries(
                acc, first, end, entry_row_ptr, entry_source_ptr, entry_value_ptr, b_ptr,
                row + entry_first, column, n, b_stride, M_BLOCK, N_BLOCK, ENTRY_BLOCK,
            )  # fmt: skip
        out_desc.store([row, column], acc.to(out_desc.dtype))


# Launchers, with the signatures of ``torch_skipping``


def tile_sums(
    e: Tensor,
    layout: Layout,
    tile_reference: Tensor,
    tile_total: Tensor,
    merged: Merged,
    label: Tensor,
    target: Tensor,
    row_weight: Tensor,
    tolerance: float,
) -> Tensor:
    """Decide which tiles are kept, and write the sums of the others."""
    tiles = layout.column_tiles
    keep = torch.empty(layout.row_tiles, tiles, dtype=torch.bool, device=e.device)
    tile_sums_kernel[(layout.row_tiles, cdiv(layout.width - layout.column_end, TILES))](
        e, keep.view(torch.uint8), tile_reference, tile_total, merged.reference, merged.total,
        label, target, row_weight, layout.tokens, tiles, layout.column_end, layout.width, tolerance,
        ROWS=layout.rows, COLUMNS=layout.columns, TILES=TILES, num_warps=4,
    )  # fmt: skip
    return keep


def column_sums(e: Tensor, layout: Layout, factor: Tensor, keep: Tensor) -> None:
    """Write the column sums of tiles that are left out."""
    e[layout.tokens :].zero_()
    column_sums_kernel[(layout.column_tiles, layout.row_tiles)](
        e, keep.view(torch.uint8), factor, layout.tokens, layout.column_tiles, layout.row_end,
        layout.width, ROWS=layout.rows, COLUMNS=layout.columns, num_warps=8,
    )  # fmt: skip


def kept_product(
    e: Tensor,
    layout: Layout,
    keep: Tensor,
    b: Tensor,
    out: Tensor,
    factor: Tensor | None,
    entries: Entries,
    tile: Tile | None,
    *,
    transposed: bool,
) -> None:
    """Multiply the tiles that are kept, and what stands in for the others."""
    assert tile is not None, "lists of tiles on a GPU need a tile"
    if transposed:
        lists = Lists.of(keep.t(), layout.more_row_tiles)
        m_block, k_block, k_tile, contraction = tile.v_block, tile.n_block, layout.rows, "n"
    else:
        lists = Lists.of(keep, layout.more_column_tiles)
        m_block, k_block, k_tile, contraction = tile.n_block, tile.v_block, layout.columns, "v"
    m, n = out.shape
    device = describe_device(b.device)
    programs = device.sm_count * programs_per_sm(tile, b.element_size(), device, contraction)
    kept_product_kernel[(min(programs, cdiv(m, m_block) * cdiv(n, tile.d_block)),)](
        descriptor(e, [k_block, m_block] if transposed else [m_block, k_block]),
        descriptor(b, [k_block, tile.d_block]),
        descriptor(out, [m_block, tile.d_block]),
        lists.tiles,
        lists.count,
        lists.tiles.stride(0),
        factor,
        *entry_arguments(entries, 0, m_block),
        m,
        n,
        M_BLOCK=m_block,
        N_BLOCK=tile.d_block,
        K_BLOCK=k_block,
        K_TILE=k_tile,
        GROUP=tile.group,
        TRANSPOSED=transposed,
        HAS_FACTOR=factor is not None,
        ENTRY_BLOCK=ENTRY_BLOCK,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
