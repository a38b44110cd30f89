"""Logits scheduled by hand, with max and Σ exp(z - max) per tile and row.

Computes what ``kernels.triton.logits.logits_kernel`` does without softcap and with nothing else
wanted. The statistics are of the rounded logits where those are stored, for the reason given there;
rounding keeps order, so the maximum is that of the accumulators, rounded.
"""

from __future__ import annotations

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
from flce_tune.kernels.triton.relaunch import relaunched
from flce_tune.kernels.triton.rows import LOG2E


@jit
def nothing(rows, tables, n):
    """Of the rows, the epilogue needs to know nothing."""
    return ()


@jit
def logits_epilogue(
    WHICH: gl.constexpr, raw, given, row, tile_v, out_desc, staging, tables, sizes,
    SLAB: gl.constexpr, STORE: gl.constexpr, EVEN: gl.constexpr,
):  # fmt: skip
    """Of raw logits [ROWS, V_BLOCK]: store them and their statistics."""
    max_ptr, total_ptr, scale = tables
    n, _, width, _ = sizes
    factor = scale * LOG2E
    parts = strips(inside(raw, tile_v, width, EVEN), STORE_WIDTH)
    m = largest_of(parts)
    if STORE:
        m = m.to(out_desc.dtype).to(gl.float32)
    store_rows(max_ptr, m * scale, row, tile_v, n)
    reference = gl.where(m == float("-inf"), 0.0, m) * factor
    total = gl.zeros([raw.shape[0]], gl.float32, gl.SliceLayout(1, STRIP))
    column = tile_v * raw.shape[1]
    for i in gl.static_range(len(parts)):
        if n > i - len(parts):  # always true: see ``numerators.epilogue``
            z = gl.convert_layout(parts[i], STRIP)
            if STORE:
                rounded = z.to(out_desc.dtype)
                buffer = staging.index(2 * WHICH + i % 2)
                copy_out(rounded, buffer, out_desc, row, column + i * STORE_WIDTH)
                z = rounded.to(gl.float32)
            total += gl.sum(gl.exp2(z * factor - reference[:, None]), axis=1)
    store_rows(total_ptr, total, row, tile_v, n)


@relaunched
@gluon.jit
def logits_kernel(
    x_desc,  # [n, D]
    w_desc,  # [V, D]
    out_desc,  # [n, V] in strips of ROWS × STORE_WIDTH, or None
    bias_ptr,  # [V] or None
    max_ptr,  # [tiles, n]
    total_ptr,  # [tiles, n]
    n,
    hidden,
    width,  # V
    block_rows,
    scale,
    ROWS: gl.constexpr,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
    LEAD: gl.constexpr,
    SLAB: gl.constexpr,
    SHARED: gl.constexpr,
    STORE: gl.constexpr,
    EVEN: gl.constexpr,  # V is a multiple of V_BLOCK
):
    tables = (max_ptr, total_ptr, scale)
    sizes = (n, hidden, width, block_rows)
    schedule(
        nothing, logits_epilogue, x_desc, w_desc, out_desc, bias_ptr, tables, sizes,
        ROWS, GROUP, STAGES, LEAD, SLAB, SHARED, STORE, EVEN,
    )  # fmt: skip
