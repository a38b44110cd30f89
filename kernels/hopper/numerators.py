"""Numerators GEMM scheduled by hand; computes what ``triton.numerators.numerators_kernel`` does.

Algorithm: ``schedule``. FLOPs, bytes and numerics: the Triton kernel's, but for the order of sums.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flce_tune.kernels.hopper.schedule import schedule
from flce_tune.kernels.hopper.strips import (
    STORE_WIDTH,
    STRIP,
    copy_out,
    inside,
    jit,
    largest_of,
    store_rows,
    strips,
)
from flce_tune.kernels.triton.numerators import BITS, BOTTOM
from flce_tune.kernels.triton.relaunch import relaunched


@jit
def references(rows, tables, n):
    """The reference that each row is given."""
    return gl.load(tables[0] + rows, mask=rows < n, other=0.0)


@jit
def epilogue(WHICH: gl.constexpr, raw, given, row, tile_v, out_desc, staging, tables, sizes,
             SLAB: gl.constexpr, STORE: gl.constexpr, EVEN: gl.constexpr):  # fmt: skip
    """Of raw logits [ROWS, V_BLOCK]: store the numerators, their references and sums."""
    _, tile_reference_ptr, tile_total_ptr, factor = tables
    n, _, width, block_rows = sizes
    parts = strips(inside(raw, tile_v, width, EVEN), STORE_WIDTH)
    largest = largest_of(parts) * factor
    own = gl.maximum(gl.ceil(largest), BOTTOM, propagate_nan=tl.PropagateNan.ALL)
    reference = gl.where(largest <= given + BITS, given, own)
    store_rows(tile_reference_ptr, reference, row, tile_v, n)
    column = tile_v * raw.shape[1]
    place = column // SLAB * block_rows + row
    total = gl.zeros([raw.shape[0]], gl.float32, gl.SliceLayout(1, STRIP))
    e = gl.exp2(gl.convert_layout(parts[0], STRIP) * factor - reference[:, None])
    for i in gl.static_range(len(parts)):
        # Always true, but unknown to the compiler, which keeps the order of basic blocks: left to
        # itself, it computes all exponentials first, and no copy runs meanwhile.
        if n > i - len(parts):
            now = e
            if i + 1 < len(parts):
                e = gl.exp2(gl.convert_layout(parts[i + 1], STRIP) * factor - reference[:, None])
            if STORE:
                buffer = staging.index(2 * WHICH + i % 2)
                copy_out(now, buffer, out_desc, place, column % SLAB + i * STORE_WIDTH)
            total += gl.sum(now, axis=1)
    store_rows(tile_total_ptr, total, row, tile_v, n)


@relaunched
@gluon.jit
def numerators_kernel(
    x_desc,  # [n, D]
    w_desc,  # [v, D]
    out_desc,  # [blocks · block_rows, SLAB], in strips of ROWS × STORE_WIDTH
    bias_ptr,  # [v] or None
    reference_ptr,  # [n]
    tile_reference_ptr,  # [tiles, n]
    tile_total_ptr,  # [tiles, n]
    n,
    hidden,
    width,  # v
    block_rows,
    factor,  # bits per unit of a raw logit
    ROWS: gl.constexpr,  # of a tile that one consumer computes
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
    LEAD: gl.constexpr,
    SLAB: gl.constexpr,
    SHARED: gl.constexpr,
    STORE: gl.constexpr,
    EVEN: gl.constexpr,  # v is a multiple of V_BLOCK
):
    tables = (reference_ptr, tile_reference_ptr, tile_total_ptr, factor)
    sizes = (n, hidden, width, block_rows)
    schedule(
        references, epilogue, x_desc, w_desc, out_desc, bias_ptr, tables, sizes,
        ROWS, GROUP, STAGES, LEAD, SLAB, SHARED, STORE, EVEN,
    )  # fmt: skip
