"""The article's kernel: one program per token, forward and backward in one launch.

Algorithm: the program of row i walks D_BLOCK × V_BLOCK tiles of W twice. The first walk computes
the logits tile by tile and keeps the online softmax (running maximum from -inf, rescaled sum).
The second recomputes them, forms G, adds G·W to dX, which the program owns, and Gᵀ·x to dW by
``tl.atomic_add`` in float32. An ignored row returns at once, after its outputs are written.
Numerics: all sums in float32; dW's order of summation is the hardware's, so dW may differ in the
last bits from run to run. FLOPs 8NDV without tensor cores. Bytes: W is read three times per row
(from L2 if lucky) and V·D atomics a row, which is what makes it slow. Workspace: dW and dX in
float32, nothing that grows with N·V.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flce_tune.kernels.triton.relaunch import relaunched
from flce_tune.kernels.triton.rows import finite_or_zero, log_sum_exp, scaled


@triton.jit
def gradient_of(
    raw,  # float32 raw logits
    columns,  # global column of each
    lse,
    target,
    a,
    b,
    e,
    class_weight_ptr,
    inside,
    scale,
    softcap,
    HAS_SOFTCAP: tl.constexpr,
    HAS_E: tl.constexpr,
    HAS_CLASS_WEIGHT: tl.constexpr,
    EXACT: tl.constexpr,
):
    """G·dz/da = (p·A - B·[c = y] - E·w_c)·dz/da; rows with no coefficient give 0."""
    z = scaled(raw, scale, softcap, HAS_SOFTCAP, EXACT)
    active = (a != 0) | (b != 0)
    subtracted = tl.where(columns == target, b, 0.0)
    if HAS_E:  # B + E is rounded as A is, so that they cancel where p is 1
        active = active | (e != 0)
        if HAS_CLASS_WEIGHT:
            subtracted += e * tl.load(class_weight_ptr + columns, mask=inside, other=0.0)
        else:
            subtracted += e
    gradient = (tl.exp(z - lse) * a - subtracted) * scale
    if HAS_SOFTCAP:
        ratio = z / softcap
        gradient *= 1.0 - ratio * ratio
    return tl.where(active, gradient, 0.0)


@triton.jit
def row_logits(x_ptr, weight_ptr, bias_ptr, columns, vocab, hidden, weight_stride,
               HAS_BIAS: tl.constexpr, D_BLOCK: tl.constexpr, V_BLOCK: tl.constexpr):  # fmt: skip
    """x_i · W[columns]ᵀ + b[columns] in float32."""
    acc = tl.zeros([V_BLOCK], tl.float32)
    rows = weight_ptr + columns.to(tl.int64)[:, None] * weight_stride
    for start in range(0, hidden, D_BLOCK):
        d = start + tl.arange(0, D_BLOCK)
        x = tl.load(x_ptr + d, mask=d < hidden, other=0.0).to(tl.float32)
        ok = (columns < vocab)[:, None] & (d < hidden)[None, :]
        w = tl.load(rows + d[None, :], mask=ok, other=0.0).to(tl.float32)
        acc += tl.sum(w * x[None, :], axis=1)
    if HAS_BIAS:
        acc += tl.load(bias_ptr + columns, mask=columns < vocab, other=0.0).to(tl.float32)
    return acc


@relaunched
@triton.jit
def atomic_kernel(
    x_ptr,  # [N, D]
    weight_ptr,  # [V, D]
    bias_ptr,  # [V] or unused
    target_ptr,  # [N]
    class_weight_ptr,  # [V] or unused
    row_weight_ptr,  # [N], 0 for ignored rows
    lse_ptr,  # [N]
    lse_low_ptr,  # [N]
    target_logit_ptr,  # [N]
    logit_sum_ptr,  # [N] or unused
    mean_logit_ptr,  # [N] or unused
    prediction_ptr,  # [N] or unused
    dx_ptr,  # [N, D] float32, zeros
    dw_ptr,  # [V, D] float32, zeros
    db_ptr,  # [V] float32, zeros
    vocab,
    hidden,
    x_stride,
    weight_stride,
    scale,
    softcap,
    smoothing,
    z_loss,
    ignore_index,
    weight_total_ptr,  # scalar Σ class weights, or unused
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_CLASS_WEIGHT: tl.constexpr,
    WANT_SUM: tl.constexpr,
    WANT_MEAN: tl.constexpr,
    WANT_PREDICTION: tl.constexpr,
    NEED_DX: tl.constexpr,
    NEED_DW: tl.constexpr,
    NEED_DB: tl.constexpr,
    D_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr,
):
    EXACT: tl.constexpr = x_ptr.dtype.element_ty == tl.float32
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    r = tl.load(row_weight_ptr + row)
    target = tl.load(target_ptr + row)
    if target == ignore_index and not (WANT_MEAN or WANT_PREDICTION):
        tl.store(lse_ptr + row, 0.0)
        tl.store(lse_low_ptr + row, 0.0)
        tl.store(target_logit_ptr + row, 0.0)
        if WANT_SUM:
            tl.store(logit_sum_ptr + row, 0.0)
        return

    # One sum a lane: added up block by block, one sum would be rounded V / V_BLOCK times.
    m = float("-inf")
    total = tl.zeros([V_BLOCK], tl.float32)
    moment = tl.zeros([V_BLOCK], tl.float32)
    weighted = tl.zeros([V_BLOCK], tl.float32)
    picked = float("nan")
    best = 0
    for start in range(0, vocab, V_BLOCK):
        columns = start + tl.arange(0, V_BLOCK)
        inside = columns < vocab
        raw = row_logits(x_ptr, weight_ptr, bias_ptr, columns, vocab, hidden, weight_stride,
                         HAS_BIAS, D_BLOCK, V_BLOCK)  # fmt: skip
        z = scaled(raw, scale, softcap, HAS_SOFTCAP, EXACT)
        if (target >= start) & (target < tl.minimum(start + V_BLOCK, vocab)):
            picked = tl.sum(tl.where(columns == target, z, 0.0), axis=0)
        if WANT_SUM:
            w = 1.0
            if HAS_CLASS_WEIGHT:
                w = tl.load(class_weight_ptr + columns, mask=inside, other=0.0)
            weighted += tl.where(inside, z * w, 0.0)
        z = tl.where(inside, z, float("-inf"))
        tile_m = tl.max(z, axis=0)
        if WANT_PREDICTION:
            first = tl.min(tl.where(z == tile_m, columns, 2147483647), axis=0)
            best = tl.where(tile_m > m, first, best)
        new_m = tl.maximum(m, tile_m, propagate_nan=tl.PropagateNan.ALL)
        reference = finite_or_zero(new_m)
        e = tl.exp(z - reference)
        decay = tl.exp(m - reference)
        total = total * decay + e
        if WANT_MEAN:
            moment = moment * decay + tl.where(e == 0, 0.0, e * z)
        m = new_m
    row_total = tl.sum(total, axis=0)
    lse, lse_low = log_sum_exp(m, row_total)
    tl.store(lse_ptr + row, lse)
    tl.store(lse_low_ptr + row, lse_low)
    tl.store(target_logit_ptr + row, picked)
    if WANT_SUM:
        tl.store(logit_sum_ptr + row, tl.sum(weighted, axis=0))
    if WANT_MEAN:
        tl.store(mean_logit_ptr + row, tl.sum(moment, axis=0) / row_total)
    if WANT_PREDICTION:
        tl.store(prediction_ptr + row, best)
    if r == 0.0 or not (NEED_DX or NEED_DW or NEED_DB):
        return

    known = (target >= 0) & (target < vocab)
    lse = tl.where(known, lse, float("nan"))
    weight_of_target = 1.0
    weight_total = vocab * 1.0
    if HAS_CLASS_WEIGHT:
        weight_total = tl.load(weight_total_ptr)
        weight_of_target = tl.load(class_weight_ptr + tl.where(known, target, 0))
    b = r * (1.0 - smoothing) * weight_of_target
    e_share = r * smoothing / vocab
    a = (b + e_share * weight_total + 2.0 * r * z_loss * lse) * tl.exp(-lse_low)
    for start in range(0, vocab, V_BLOCK):
        columns = start + tl.arange(0, V_BLOCK)
        inside = columns < vocab
        raw = row_logits(x_ptr, weight_ptr, bias_ptr, columns, vocab, hidden, weight_stride,
                         HAS_BIAS, D_BLOCK, V_BLOCK)  # fmt: skip
        g = gradient_of(raw, columns, lse, target, a, b, e_share, class_weight_ptr, inside,
                        scale, softcap, HAS_SOFTCAP, WANT_SUM, HAS_CLASS_WEIGHT,
                        EXACT)  # fmt: skip
        g = tl.where(inside, g, 0.0)
        if NEED_DB:
            tl.atomic_add(db_ptr + columns, g, mask=inside)
        rows = columns.to(tl.int64)[:, None]
        for d_start in range(0, hidden, D_BLOCK):
            d = d_start + tl.arange(0, D_BLOCK)
            ok = inside[:, None] & (d < hidden)[None, :]
            if NEED_DX:
                w = tl.load(weight_ptr + rows * weight_stride + d[None, :], mask=ok, other=0.0)
                part = tl.sum(w.to(tl.float32) * g[:, None], axis=0)
                place = dx_ptr + row * hidden + d
                old = tl.load(place, mask=d < hidden, other=0.0)
                tl.store(place, old + part, mask=d < hidden)
            if NEED_DW:
                x = tl.load(x_ptr + d, mask=d < hidden, other=0.0).to(tl.float32)
                tl.atomic_add(
                    dw_ptr + rows * hidden + d[None, :], g[:, None] * x[None, :],
                    mask=ok, sem="relaxed",
                )  # fmt: skip
