"""Gradients of a slab's logits, which backward recomputes, scheduled by hand.

Computes what ``kernels.triton.logits.slab_gradient_kernel`` does for a loss without softcap,
entropy, label smoothing and class weights: exp(x·Wᵀ·scale - lse)·a·scale. That is one fused
multiply-add, one exp2 and one multiplication a logit, and no reduction.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flce_tune.kernels.hopper.schedule import schedule
from flce_tune.kernels.hopper.strips import STORE_WIDTH, STRIP, copy_out, jit, strips
from flce_tune.kernels.triton.relaunch import relaunched
from flce_tune.kernels.triton.rows import LOG2E


@jit
def coefficients(rows, tables, n):
    """Bits of each row's lse, NaN where the label is unknown, and what multiplies p."""
    target_ptr, lse_ptr, a_ptr, b_ptr, vocab, scale = tables
    known = rows < n
    lse = gl.load(lse_ptr + rows, mask=known, other=0.0)
    a = gl.load(a_ptr + rows, mask=known, other=0.0)
    b = gl.load(b_ptr + rows, mask=known, other=0.0)
    target = gl.load(target_ptr + rows, mask=known, other=0)
    unknown = ((target < 0) | (target >= vocab)) & (b != 0)
    return gl.where(unknown, float("nan"), lse * LOG2E), a * scale


@jit
def gradient_strip(part, given, factor):
    """G of some columns."""
    lse, a = given
    return gl.exp2(gl.convert_layout(part, STRIP) * factor - lse[:, None]) * a[:, None]


@jit
def gradient_epilogue(
    WHICH: gl.constexpr, raw, given, row, tile_v, out_desc, staging, tables, sizes,
    SLAB: gl.constexpr, STORE: gl.constexpr, EVEN: gl.constexpr,
):  # fmt: skip
    """Of raw logits [ROWS, V_BLOCK]: store G."""
    n, _, _, block_rows = sizes
    factor = tables[5] * LOG2E
    column = tile_v * raw.shape[1]
    place = row
    if SLAB:
        place += column // SLAB * block_rows
        column %= SLAB
    parts = strips(raw, STORE_WIDTH)
    g = gradient_strip(parts[0], given, factor)
    for i in gl.static_range(len(parts)):
        if n > i - len(parts):  # always true: see ``numerators.epilogue``
            now = g
            if i + 1 < len(parts):
                g = gradient_strip(parts[i + 1], given, factor)
            buffer = staging.index(2 * WHICH + i % 2)
            copy_out(now, buffer, out_desc, place, column + i * STORE_WIDTH)


@relaunched
@gluon.jit
def gradient_kernel(
    x_desc,  # [n, D]
    w_desc,  # [v, D], the slab's rows
    out_desc,  # [n, v], or blocks of SLAB columns one by one; in strips of ROWS × STORE_WIDTH
    bias_ptr,  # [v] or None
    target_ptr,  # [n]
    lse_ptr,  # [n]
    a_ptr,  # [n]
    b_ptr,  # [n]
    n,
    hidden,
    width,  # v
    block_rows,  # rows from one block to the next
    vocab,
    scale,
    ROWS: gl.constexpr,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
    LEAD: gl.constexpr,
    SLAB: gl.constexpr,  # 0: one block
    SHARED: gl.constexpr,
    STORE: gl.constexpr,
    EVEN: gl.constexpr,
):
    tables = (target_ptr, lse_ptr, a_ptr, b_ptr, vocab, scale)
    sizes = (n, hidden, width, block_rows)
    schedule(
        coefficients, gradient_epilogue, x_desc, w_desc, out_desc, bias_ptr, tables, sizes,
        ROWS, GROUP, STAGES, LEAD, SLAB, SHARED, STORE, EVEN,
    )  # fmt: skip
