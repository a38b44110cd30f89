"""Row kernels: statistics of stored logits, merging of tile statistics, gradient.

Algorithm: one online pass (Milakov and Gimelshein, 2018, arXiv:1805.02867) keeps the running
maximum m and l = Σ exp(z - m); a second kernel writes G, over the logits or elsewhere. Numerics: m
starts at -inf and a row that is still all -inf rescales by 1, not by exp(-inf + inf); columns past
V are -inf and never enter a sum; statistics are float32. Bytes: 2 read for statistics and 2 read,
2 written for the gradient, per 16-bit logit; with tile statistics from the GEMM's epilogue the
first read falls away. Row offsets are 64-bit.

Rows of any length that begin anywhere are moved 16 bytes at a time: what is read begins at a
multiple of 16 bytes, up to 15 of them before the row, and ends at one; what is not of the row is
masked afterwards, and written only element by element at the ends. Nothing outside the row's own
16-byte units is touched, so no read leaves the allocation. A lane takes DEPTH logits for one new
maximum, so there are 1 + 1/DEPTH exponentials a logit, not two: they, not the bytes, would be the
limit.
"""

import triton
import triton.language as tl

from flce_tune.kernels.triton.relaunch import relaunched

LOG2E = tl.constexpr(1.4426950408889634)
"""Functions called by kernels take such constants as defaults. One they read from their module is
part of the key of the caller's binary only if the function was hashed for another kernel before
(Triton 3.6, 3.7), and processes would not find each other's binaries."""


@triton.jit
def exp(x, LOG2E: tl.constexpr = LOG2E):
    """e^x, of which subnormal results are 0: tl.exp takes three instructions more to keep them."""
    return tl.exp2(x * LOG2E)


@triton.jit
def scaled(raw, scale, softcap, HAS_SOFTCAP: tl.constexpr, EXACT: tl.constexpr = False):
    """z = cap·tanh(scale·a / cap), with tanh by exp so that it runs everywhere.

    1 - exp(-2u) has an absolute error near u = 0, far below the last place of 16-bit logits. EXACT,
    for float32, takes a minimax polynomial there, of relative error 4e-9.
    """
    z = raw * scale
    if HAS_SOFTCAP:
        ratio = z / softcap
        u = tl.exp(-2.0 * tl.abs(ratio))
        t = (1.0 - u) / (1.0 + u)
        t = tl.where(ratio < 0, -t, t)
        if EXACT:
            s = ratio * ratio
            p = -0.0057049863
            p = p * s + 0.020639087
            p = p * s - 0.053739715
            p = p * s + 0.133314422
            p = p * s - 0.333332819
            t = tl.where(s < 0.390625, ratio + ratio * (s * p), t)
        z = softcap * t
    return z


@triton.jit
def finite_or_zero(m):
    """Keep m, but 0 where it is -inf: the reference point of a sum that is still empty."""
    return tl.where(m == float("-inf"), 0.0, m)


@triton.jit
def log_sum_exp(m, total):
    """lse = m + log(total) rounded, and what the rounding left out."""
    return two_sum(finite_or_zero(m), tl.log(total))


@triton.jit
def two_sum(a, b):
    """a + b rounded, and what the rounding left out: 0 where the sum is not finite.

    Knuth's two-sum, exact whichever of the two is larger.
    """
    total = a + b
    of_b = total - a
    rest = (a - (total - of_b)) + (b - of_b)
    return total, tl.where(tl.abs(total) < float("inf"), rest, 0.0)


@triton.jit
def aligned_row(ptr, offset, width, UNIT: tl.constexpr):
    """Where a row's 16-byte units of UNIT elements begin and end.

    A pointer to the first unit, the row's place behind it, and the end of the last unit.
    """
    begin = ptr + offset
    shift = ((begin.to(tl.int64) % 16) // (16 // UNIT)).to(tl.int32)
    end = (shift + width + UNIT - 1) // UNIT * UNIT
    return tl.multiple_of(begin - shift, 16), shift, tl.multiple_of(end, UNIT)


@relaunched
@triton.jit
def statistics_kernel(
    raw_ptr,  # [n, V]
    row_stride,
    target_ptr,  # [n] int64
    class_weight_ptr,  # [V] or unused
    lse_ptr,  # [n] float32, like all outputs but the prediction
    lse_low_ptr,
    target_logit_ptr,
    logit_sum_ptr,
    mean_logit_ptr,
    prediction_ptr,  # int64
    vocab,
    scale,
    softcap,
    HAS_SOFTCAP: tl.constexpr,
    HAS_CLASS_WEIGHT: tl.constexpr,
    WANT_SUM: tl.constexpr,
    WANT_MEAN: tl.constexpr,
    WANT_PREDICTION: tl.constexpr,
    DEPTH: tl.constexpr,
    LANES: tl.constexpr,
):
    EXACT: tl.constexpr = raw_ptr.dtype.element_ty == tl.float32
    UNIT: tl.constexpr = 128 // raw_ptr.dtype.element_ty.primitive_bitwidth
    row = tl.program_id(0).to(tl.int64)
    first_ptr, shift, end = aligned_row(raw_ptr, row * row_stride, vocab, UNIT)
    lanes = tl.arange(0, DEPTH)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    m = tl.full([LANES], float("-inf"), tl.float32)
    total = tl.zeros([LANES], tl.float32)
    weighted = tl.zeros([LANES], tl.float32)
    moment = tl.zeros([LANES], tl.float32)
    best = tl.zeros([LANES], tl.int32)
    for start in range(0, end, DEPTH * LANES):
        places = start + lanes
        raw = tl.load(first_ptr + places, mask=places < end, other=0.0).to(tl.float32)
        z = scaled(raw, scale, softcap, HAS_SOFTCAP, EXACT)
        if WANT_SUM:
            columns = places - shift
            inside = (columns >= 0) & (columns < vocab)
            w = 1.0
            if HAS_CLASS_WEIGHT:
                w = tl.load(class_weight_ptr + columns, mask=inside, other=0.0)
            weighted += tl.sum(tl.where(inside, z * w, 0.0), axis=0)
        if (start < shift) | (start + DEPTH * LANES > shift + vocab):
            z = tl.where((places >= shift) & (places < shift + vocab), z, float("-inf"))
        largest = tl.max(z, axis=0)
        if WANT_PREDICTION:
            columns = tl.where(z == largest[None, :], places - shift, 2147483647)
            best = tl.where(largest > m, tl.min(columns, axis=0), best)
        new_m = tl.maximum(m, largest, propagate_nan=tl.PropagateNan.ALL)
        reference = finite_or_zero(new_m)
        decay = exp(m - reference)
        e = exp(z - reference[None, :])
        total = total * decay + tl.sum(e, axis=0)
        if WANT_MEAN:
            moment = moment * decay + tl.sum(tl.where(e == 0, 0.0, e * z), axis=0)
        m = new_m
    row_m = tl.max(m, axis=0)
    share = tl.exp(m - finite_or_zero(row_m))
    row_total = tl.sum(total * share, axis=0)
    lse, lse_low = log_sum_exp(row_m, row_total)
    tl.store(lse_ptr + row, lse)
    tl.store(lse_low_ptr + row, lse_low)
    if WANT_SUM:
        tl.store(logit_sum_ptr + row, tl.sum(weighted, axis=0))
    if WANT_MEAN:
        tl.store(mean_logit_ptr + row, tl.sum(moment * share, axis=0) / row_total)
    if WANT_PREDICTION:
        first = tl.min(tl.where(m == row_m, best, 2147483647), axis=0)
        tl.store(prediction_ptr + row, first.to(tl.int64))
    target = tl.load(target_ptr + row)
    known = (target >= 0) & (target < vocab)
    picked = tl.load(raw_ptr + row * row_stride + tl.where(known, target, 0)).to(tl.float32)
    picked = scaled(picked, scale, softcap, HAS_SOFTCAP, EXACT)
    tl.store(target_logit_ptr + row, tl.where(known, picked, float("nan")))


@relaunched
@triton.jit
def merge_kernel(
    tile_max_ptr,  # [T, n] float32: per tile of the vocabulary
    tile_total_ptr,  # [T, n] Σ exp(z - tile max)
    tile_sum_ptr,  # [T, n] Σ w·z
    tile_moment_ptr,  # [T, n] Σ exp(z - tile max)·z
    tile_best_ptr,  # [T, n] int32, first column of the tile's maximum
    lse_ptr,
    lse_low_ptr,
    logit_sum_ptr,
    mean_logit_ptr,
    prediction_ptr,
    n,
    tiles,
    WANT_SUM: tl.constexpr,
    WANT_MEAN: tl.constexpr,
    WANT_PREDICTION: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    lanes = tl.arange(0, TILES)
    row_ok = rows < n
    m = tl.full([TILES, ROWS], float("-inf"), tl.float32)
    total = tl.zeros([TILES, ROWS], tl.float32)
    weighted = tl.zeros([TILES, ROWS], tl.float32)
    moment = tl.zeros([TILES, ROWS], tl.float32)
    best = tl.zeros([TILES, ROWS], tl.int32)
    for start in range(0, tiles, TILES):
        tile = start + lanes
        offsets = tile[:, None].to(tl.int64) * n + rows[None, :]
        ok = (tile < tiles)[:, None] & row_ok[None, :]
        tile_m = tl.load(tile_max_ptr + offsets, mask=ok, other=float("-inf"))
        tile_total = tl.load(tile_total_ptr + offsets, mask=ok, other=0.0)
        if WANT_PREDICTION:
            column = tl.load(tile_best_ptr + offsets, mask=ok, other=0)
            best = tl.where(tile_m > m, column, best)
        new_m = tl.maximum(m, tile_m, propagate_nan=tl.PropagateNan.ALL)
        reference = finite_or_zero(new_m)
        decay = tl.exp(m - reference)
        rise = tl.exp(tile_m - reference)
        total = total * decay + tile_total * rise
        if WANT_MEAN:
            tile_moment = tl.load(tile_moment_ptr + offsets, mask=ok, other=0.0)
            moment = moment * decay + tile_moment * rise
        if WANT_SUM:
            weighted += tl.load(tile_sum_ptr + offsets, mask=ok, other=0.0)
        m = new_m
    row_m = tl.max(m, axis=0)
    share = tl.exp(m - finite_or_zero(row_m)[None, :])
    row_total = tl.sum(total * share, axis=0)
    lse, lse_low = log_sum_exp(row_m, row_total)
    tl.store(lse_ptr + rows, lse, mask=row_ok)
    tl.store(lse_low_ptr + rows, lse_low, mask=row_ok)
    if WANT_SUM:
        tl.store(logit_sum_ptr + rows, tl.sum(weighted, axis=0), mask=row_ok)
    if WANT_MEAN:
        tl.store(mean_logit_ptr + rows, tl.sum(moment * share, axis=0) / row_total, mask=row_ok)
    if WANT_PREDICTION:
        first = tl.min(tl.where(m == row_m[None, :], best, 2147483647), axis=0)
        tl.store(prediction_ptr + rows, first.to(tl.int64), mask=row_ok)
