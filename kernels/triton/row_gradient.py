"""Gradient of stored logits: a pass over their rows, over the logits or elsewhere.

G = (exp(z - lse)·(a + c·z) - b·[label] - e·w)·scale, times the softcap's derivative; each row has
its own a, b, c and e (see ``loss.coefficients``). Numerics: float32. Bytes: 2 read and 2 written a
16-bit logit; to keep up with the memory of an H200, no more than some 15 instructions a logit.

A program takes a block of a row's 16-byte units, as the statistics do (``rows.aligned_row``), and
stores the whole ones. The first program of a row has its ends, too: what belongs to the row of the
units that it shares with its neighbours, element by element. These are tensors of their own, as a
second store of the block's would cost every logit its mask.
"""

import triton
import triton.language as tl

from flce_tune.kernels.triton.relaunch import relaunched
from flce_tune.kernels.triton.rows import aligned_row, exp, scaled


@triton.jit
def gradient_at(
    raw,  # of a row, float32
    local,  # their columns
    inside,  # whether there is such a column
    label,  # the label's column, -1 if it is not among the row's
    labelled,  # whether it may be one of these
    lse,
    a,
    b,
    c,
    e,
    class_weight_ptr,  # of the row's first column
    scale,
    softcap,
    HAS_SOFTCAP: tl.constexpr,
    HAS_C: tl.constexpr,
    HAS_E: tl.constexpr,
    HAS_CLASS_WEIGHT: tl.constexpr,
    EXACT: tl.constexpr,
):
    """G of some logits of a row."""
    z = scaled(raw, scale, softcap, HAS_SOFTCAP, EXACT)
    weight = a * scale
    if HAS_C:
        weight = (a + c * tl.where(z == float("-inf"), 0.0, z)) * scale
    gradient = exp(z - lse) * weight
    if HAS_E:  # B + E is rounded as A is, so that they cancel where p is 1
        subtracted = tl.where(local == label, b, 0.0)
        if HAS_CLASS_WEIGHT:
            subtracted += e * tl.load(class_weight_ptr + local, mask=inside, other=0.0)
        else:
            subtracted += e
        gradient -= subtracted * scale
    elif labelled:
        gradient = tl.where(local == label, gradient - b * scale, gradient)
    if HAS_SOFTCAP:
        ratio = z / softcap
        gradient *= 1.0 - ratio * ratio
    return gradient


@relaunched
@triton.jit
def gradient_kernel(
    raw_ptr,  # [n, v]
    row_stride,
    out_ptr,  # [n, v]; may be raw_ptr
    out_stride,
    lse_ptr,  # [n]
    target_ptr,  # [n]
    a_ptr,  # [n]
    b_ptr,
    c_ptr,
    e_ptr,
    class_weight_ptr,  # [V] or unused
    first_column,
    width,
    vocab,
    scale,
    softcap,
    HAS_SOFTCAP: tl.constexpr,
    HAS_C: tl.constexpr,
    HAS_E: tl.constexpr,
    HAS_CLASS_WEIGHT: tl.constexpr,
    ALIKE: tl.constexpr,  # raw and out begin in the same place of a 16-byte unit, in every row
    BY_ROW: tl.constexpr,  # programs take a row's blocks one after the other
    BLOCK: tl.constexpr,
):
    EXACT: tl.constexpr = raw_ptr.dtype.element_ty == tl.float32
    UNIT: tl.constexpr = 128 // raw_ptr.dtype.element_ty.primitive_bitwidth
    row = tl.program_id(1 if BY_ROW else 0).to(tl.int64)
    first_ptr, shift, end = aligned_row(raw_ptr, row * row_stride, width, UNIT)
    begin = tl.program_id(0 if BY_ROW else 1) * BLOCK
    places = begin + tl.arange(0, BLOCK)
    raw = tl.load(first_ptr + places, mask=places < end, other=0.0)
    target = tl.load(target_ptr + row)
    lse = tl.load(lse_ptr + row)  # here, not where it is used: there it would be waited for
    a = tl.load(a_ptr + row)
    b = tl.load(b_ptr + row)
    active = (a != 0) | (b != 0)
    c = 0.0
    if HAS_C:
        c = tl.load(c_ptr + row)
        active = active | (c != 0)
    e = 0.0
    if HAS_E:
        e = tl.load(e_ptr + row)
        active = active | (e != 0)
    unknown = ((target < 0) | (target >= vocab)) & (b != 0)
    lse = tl.where(unknown, float("nan"), lse)
    here = (target >= first_column) & (target < first_column + width)
    label = tl.where(here, target - first_column, -1).to(tl.int32)
    weights_ptr = class_weight_ptr
    if HAS_CLASS_WEIGHT:
        weights_ptr += first_column
    local = places - shift
    inside = (local >= 0) & (local < width)
    labelled = (label + shift >= begin) & (label + shift < begin + BLOCK)
    gradient = tl.zeros([BLOCK], tl.float32)
    if active:
        gradient = gradient_at(
            raw.to(tl.float32), local, inside, label, labelled, lse, a, b, c, e, weights_ptr, scale,
            softcap, HAS_SOFTCAP, HAS_C, HAS_E, HAS_CLASS_WEIGHT, EXACT,
        )  # fmt: skip
    gradient = gradient.to(out_ptr.dtype.element_ty)
    out_row = out_ptr + row * out_stride
    if not ALIKE:
        tl.store(out_row + local, gradient, mask=inside)
    else:
        first_whole = tl.multiple_of((shift + UNIT - 1) // UNIT * UNIT, UNIT)
        last_whole = tl.multiple_of((shift + width) // UNIT * UNIT, UNIT)
        whole = (places >= first_whole) & (places < last_whole)
        tl.store(tl.multiple_of(out_row - shift, 16) + places, gradient, mask=whole)
        if (begin == 0) & ((shift > 0) | (last_whole < shift + width)):
            lanes = tl.arange(0, 2 * UNIT)
            rest = tl.maximum(first_whole, last_whole)
            ends = tl.where(lanes < UNIT, lanes, lanes - UNIT + rest) - shift
            at_end = (ends >= 0) & (ends < width) & ((lanes >= UNIT) | (lanes < first_whole))
            few = tl.load(raw_ptr + row * row_stride + ends, mask=at_end, other=0.0)
            of_ends = tl.zeros([2 * UNIT], tl.float32)
            if active:
                of_ends = gradient_at(
                    few.to(tl.float32), ends, at_end, label, True, lse, a, b, c, e, weights_ptr,
                    scale, softcap, HAS_SOFTCAP, HAS_C, HAS_E, HAS_CLASS_WEIGHT, EXACT,
                )  # fmt: skip
            tl.store(out_row + ends, of_ends.to(out_ptr.dtype.element_ty), mask=at_end)
