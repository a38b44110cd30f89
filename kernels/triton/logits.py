"""Logits GEMMs: x·Wᵀ whose epilogue computes what the softmax needs.

Algorithm: persistent programs walk the N_BLOCK × V_BLOCK tiles of the logits, ``group`` token
tiles at a time so that a tile of W is reused from L2; operands come through tensor descriptors
(TMA on Hopper and later, plain loads before). A tile is stored by one copy that the next tile's
main loop hides: two half-tile copies would share a buffer, and the second wait for the first.
Two kernels share the main loop:

- ``logits_kernel`` stores the raw logits and, per tile and row, max and Σ exp(z - max). The
  statistics are of the *rounded* logits, because the gradient will be computed from those: where
  one class has all the probability, p - 1 must cancel as exactly as it does in plain torch.
  Without STORE it stores no logits, and its statistics are of the float32 accumulators.
- ``slab_gradient_kernel`` knows the lse and stores G, of the float32 accumulators, all but the
  labels' own entries: looking for one column per row in every tile costs as much as the
  exponential. ``labels.target_gradient_kernel`` writes those afterwards.

The epilogue is not hidden by the tensor cores, so it is kept short: per logit one fused
multiply-add into the exponent, one exp2, and what the options need.

FLOPs 2NDV each. Bytes beyond the operands: 2NV written where logits or G are stored, and
8·N·V / V_BLOCK of statistics.
"""

import triton
import triton.language as tl

from flce_tune.kernels.triton.relaunch import relaunched
from flce_tune.kernels.triton.rows import LOG2E, finite_or_zero, scaled

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def tile_position(tile, tiles_n, tiles_v, GROUP: tl.constexpr):
    """Visit the tiles in groups of GROUP token tiles, vocabulary-major within a group."""
    per_group = GROUP * tiles_v
    group = tile // per_group
    first = group * GROUP
    size = tl.minimum(tiles_n - first, GROUP)
    return first + (tile % per_group) % size, (tile % per_group) // size


@triton.jit
def tile_logits(x_desc, w_desc, row, column, hidden,
                N_BLOCK: tl.constexpr, V_BLOCK: tl.constexpr, D_BLOCK: tl.constexpr):  # fmt: skip
    """One tile of x·Wᵀ in float32."""
    acc = tl.zeros([N_BLOCK, V_BLOCK], tl.float32)
    for k in range(0, hidden, D_BLOCK):
        acc = tl.dot(x_desc.load([row, k]), w_desc.load([column, k]).T, acc)
    return acc


@triton.jit
def exponent(raw, scale, softcap, HAS_SOFTCAP: tl.constexpr, LOG2E: tl.constexpr = LOG2E):
    """Values v and a positive factor c with z = v·c/log2(e), so that exp(z) is exp2(v·c)."""
    if HAS_SOFTCAP:
        return scaled(raw, scale, softcap, True), LOG2E
    return raw, scale * LOG2E


@triton.jit
def store_statistics(
    raw,  # [N_BLOCK, V_BLOCK] float32
    row,
    tile_v,
    class_weight_ptr,
    max_ptr,
    total_ptr,
    sum_ptr,
    moment_ptr,
    best_ptr,
    n,
    vocab,
    scale,
    softcap,
    N_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr,
    EVEN: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_CLASS_WEIGHT: tl.constexpr,
    WANT_SUM: tl.constexpr,
    WANT_MEAN: tl.constexpr,
    WANT_PREDICTION: tl.constexpr,
    LN2: tl.constexpr = LN2,
):
    """Store the tile's statistics at [tile_v, row]."""
    rows = row + tl.arange(0, N_BLOCK)
    columns = tile_v * V_BLOCK + tl.arange(0, V_BLOCK)
    places = tile_v.to(tl.int64) * n + rows
    value, factor = exponent(raw, scale, softcap, HAS_SOFTCAP)
    to_natural = factor * LN2
    if WANT_SUM:
        w = 1.0
        if HAS_CLASS_WEIGHT:
            w = tl.load(class_weight_ptr + columns, mask=columns < vocab, other=0.0)[None, :]
        part = tl.where((columns < vocab)[None, :], value * w, 0.0)
        tl.store(sum_ptr + places, tl.sum(part, axis=1) * to_natural, mask=rows < n)
    if not EVEN:  # noqa: SIM102 Triton drops the outer one, and branches on the inner
        if tile_v * V_BLOCK + V_BLOCK > vocab:
            value = tl.where((columns < vocab)[None, :], value, float("-inf"))
    m = tl.max(value, axis=1)
    e = tl.exp2(value * factor - (finite_or_zero(m) * factor)[:, None])
    tl.store(max_ptr + places, m * to_natural, mask=rows < n)
    tl.store(total_ptr + places, tl.sum(e, axis=1), mask=rows < n)
    if WANT_MEAN:
        moment = tl.sum(tl.where(e == 0, 0.0, e * value), axis=1)
        tl.store(moment_ptr + places, moment * to_natural, mask=rows < n)
    if WANT_PREDICTION:
        best = tl.min(tl.where(value == m[:, None], columns[None, :], 2147483647), axis=1)
        tl.store(best_ptr + places, best, mask=rows < n)


@triton.jit
def with_bias(acc, bias_ptr, columns, vocab, HAS_BIAS: tl.constexpr):
    """Add the bias of the tile's columns."""
    if HAS_BIAS:
        bias = tl.load(bias_ptr + columns, mask=columns < vocab, other=0.0)
        acc += bias.to(tl.float32)[None, :]
    return acc


@relaunched
@triton.jit
def logits_kernel(
    x_desc,  # [n, D]
    w_desc,  # [V, D]
    out_desc,  # [n, V], blocks of N_BLOCK × V_BLOCK
    bias_ptr,
    class_weight_ptr,
    max_ptr,
    total_ptr,
    sum_ptr,
    moment_ptr,
    best_ptr,
    n,
    hidden,
    vocab,
    scale,
    softcap,
    N_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr,
    D_BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    STORE: tl.constexpr,
    EVEN: tl.constexpr,  # V is a multiple of V_BLOCK
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_CLASS_WEIGHT: tl.constexpr,
    WANT_SUM: tl.constexpr,
    WANT_MEAN: tl.constexpr,
    WANT_PREDICTION: tl.constexpr,
):
    tiles_n = tl.cdiv(n, N_BLOCK)
    tiles_v = tl.cdiv(vocab, V_BLOCK)
    for tile in tl.range(tl.program_id(0), tiles_n * tiles_v, tl.num_programs(0), flatten=True):
        tile_n, tile_v = tile_position(tile, tiles_n, tiles_v, GROUP)
        row = tile_n * N_BLOCK
        column = tile_v * V_BLOCK
        acc = tile_logits(x_desc, w_desc, row, column, hidden, N_BLOCK, V_BLOCK, D_BLOCK)
        columns = column + tl.arange(0, V_BLOCK)
        raw = with_bias(acc, bias_ptr, columns, vocab, HAS_BIAS)
        if STORE:
            rounded = raw.to(out_desc.dtype)
            out_desc.store([row, column], rounded)
            raw = rounded.to(tl.float32)
        store_statistics(
            raw, row, tile_v, class_weight_ptr, max_ptr, total_ptr, sum_ptr, moment_ptr, best_ptr,
            n, vocab, scale, softcap, N_BLOCK, V_BLOCK, EVEN, HAS_SOFTCAP, HAS_CLASS_WEIGHT,
            WANT_SUM, WANT_MEAN, WANT_PREDICTION,
        )  # fmt: skip


@relaunched
@triton.jit
def slab_gradient_kernel(
    x_desc,  # [n, D]
    w_desc,  # [v, D], the slab's rows
    out_desc,  # [n, v], or blocks of SLAB columns one by one; in tiles of N_BLOCK × V_BLOCK
    bias_ptr,  # [v]
    target_ptr,  # [n]
    lse_ptr,
    a_ptr,
    b_ptr,
    c_ptr,
    e_ptr,
    class_weight_ptr,  # [v]
    n,
    hidden,
    width,  # v
    vocab,
    block_rows,  # rows from one block to the next
    scale,
    softcap,
    N_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr,
    D_BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    SLAB: tl.constexpr,  # 0: one block
    HAS_BIAS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_C: tl.constexpr,
    HAS_E: tl.constexpr,
    HAS_CLASS_WEIGHT: tl.constexpr,
):
    tiles_n = tl.cdiv(n, N_BLOCK)
    tiles_v = tl.cdiv(width, V_BLOCK)
    for tile in tl.range(tl.program_id(0), tiles_n * tiles_v, tl.num_programs(0), flatten=True):
        tile_n, tile_v = tile_position(tile, tiles_n, tiles_v, GROUP)
        row = tile_n * N_BLOCK
        column = tile_v * V_BLOCK
        rows = row + tl.arange(0, N_BLOCK)
        lse = tl.load(lse_ptr + rows, mask=rows < n, other=0.0)
        a = tl.load(a_ptr + rows, mask=rows < n, other=0.0)
        b = tl.load(b_ptr + rows, mask=rows < n, other=0.0)
        target = tl.load(target_ptr + rows, mask=rows < n, other=0)
        unknown = ((target < 0) | (target >= vocab)) & (b != 0)
        lse = tl.where(unknown, float("nan"), lse)
        acc = tile_logits(x_desc, w_desc, row, column, hidden, N_BLOCK, V_BLOCK, D_BLOCK)
        columns = column + tl.arange(0, V_BLOCK)
        raw = with_bias(acc, bias_ptr, columns, width, HAS_BIAS)
        value, factor = exponent(raw, scale, softcap, HAS_SOFTCAP)
        gradient = tl.exp2(value * factor - (lse * LOG2E)[:, None])
        if HAS_C:
            c = tl.load(c_ptr + rows, mask=rows < n, other=0.0)[:, None]
            finite = tl.where(value == float("-inf"), 0.0, value * (factor * LN2))
            gradient *= a[:, None] + c * finite
        else:
            gradient *= a[:, None]
        if HAS_E:
            uniform = tl.load(e_ptr + rows, mask=rows < n, other=0.0)[:, None]
            if HAS_CLASS_WEIGHT:
                w = tl.load(class_weight_ptr + columns, mask=columns < width, other=0.0)
                uniform = uniform * w[None, :]
            gradient -= uniform
        if HAS_SCALE:
            gradient *= scale
        if HAS_SOFTCAP:
            ratio = value / softcap
            gradient *= 1.0 - ratio * ratio
        if SLAB:
            place = column // SLAB * block_rows + row
            out_desc.store([place, column % SLAB], gradient.to(out_desc.dtype))
        else:
            out_desc.store([row, column], gradient.to(out_desc.dtype))
