"""Label kernels: the logit and the gradient of each row's label, looked up outside the GEMMs.

One column per row is nothing to compute, but looking for it in every tile of a GEMM costs as much
as the tile's exponentials. Numerics: the label's gradient is formed from the label logit the lse
was computed with, because p - 1 has no digits to spare where p is near 1. Bytes: a few per row, or
one row of x and one of W where the logits were not stored.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from flce_tune.kernels.triton.arguments import (
    cdiv,
    gradient_flags,
    loss_scalars,
    next_power_of_2,
)
from flce_tune.kernels.triton.relaunch import relaunched
from flce_tune.kernels.triton.rows import finite_or_zero, scaled
from flce_tune.kernels.values import Coefficients, Inputs, LossSpec, Statistics

PICK_ROWS = 128


@relaunched
@triton.jit
def stored_target_logit_kernel(
    raw_ptr,  # [n, V] stored raw logits
    row_stride,
    target_ptr,  # [n]
    target_logit_ptr,  # [n] float32
    n,
    vocab,
    scale,
    softcap,
    HAS_SOFTCAP: tl.constexpr,
    ROWS: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    target = tl.load(target_ptr + rows, mask=rows < n, other=-1)
    known = (target >= 0) & (target < vocab)
    raw = tl.load(raw_ptr + rows.to(tl.int64) * row_stride + target, mask=known, other=0.0)
    EXACT: tl.constexpr = raw_ptr.dtype.element_ty == tl.float32
    z = scaled(raw.to(tl.float32), scale, softcap, HAS_SOFTCAP, EXACT)
    tl.store(target_logit_ptr + rows, tl.where(known, z, float("nan")), mask=rows < n)


@relaunched
@triton.jit
def target_logit_kernel(
    x_ptr,  # [n, D]
    weight_ptr,  # [V, D]
    bias_ptr,  # [V] or unused
    target_ptr,  # [n]
    target_logit_ptr,  # [n] float32
    vocab,
    hidden,
    x_stride,
    weight_stride,
    scale,
    softcap,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(target_ptr + row)
    known = (target >= 0) & (target < vocab)
    target = tl.where(known, target, 0)
    x_ptr += row * x_stride
    weight_ptr += target * weight_stride
    acc = tl.zeros([BLOCK], tl.float32)
    for start in range(0, hidden, BLOCK):
        d = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + d, mask=d < hidden, other=0.0).to(tl.float32)
        acc += x * tl.load(weight_ptr + d, mask=d < hidden, other=0.0).to(tl.float32)
    raw = tl.sum(acc, axis=0)
    if HAS_BIAS:
        raw += tl.load(bias_ptr + target).to(tl.float32)
    EXACT: tl.constexpr = x_ptr.dtype.element_ty == tl.float32
    z = scaled(raw, scale, softcap, HAS_SOFTCAP, EXACT)
    tl.store(target_logit_ptr + row, tl.where(known, z, float("nan")))


@relaunched
@triton.jit
def target_gradient_kernel(
    out_ptr,  # [n, v], G of the columns first_column, first_column + 1, ...
    row_stride,
    target_ptr,  # [n], global columns
    target_logit_ptr,  # [n]
    lse_ptr,
    a_ptr,
    b_ptr,
    c_ptr,
    e_ptr,
    class_weight_ptr,  # [V] or unused
    n,
    first_column,
    width,
    scale,
    softcap,
    HAS_SOFTCAP: tl.constexpr,
    HAS_C: tl.constexpr,
    HAS_E: tl.constexpr,
    HAS_CLASS_WEIGHT: tl.constexpr,
    ROWS: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    ok = rows < n
    target = tl.load(target_ptr + rows, mask=ok, other=-1)
    local = target - first_column
    here = (local >= 0) & (local < width) & ok
    z = tl.load(target_logit_ptr + rows, mask=here, other=0.0)
    weight = tl.load(a_ptr + rows, mask=here, other=0.0)
    if HAS_C:
        weight += tl.load(c_ptr + rows, mask=here, other=0.0) * finite_or_zero(z)
    subtracted = tl.load(b_ptr + rows, mask=here, other=0.0)
    if HAS_E:
        uniform = tl.load(e_ptr + rows, mask=here, other=0.0)
        if HAS_CLASS_WEIGHT:
            uniform *= tl.load(class_weight_ptr + target, mask=here, other=0.0)
        subtracted += uniform
    p = tl.exp(z - tl.load(lse_ptr + rows, mask=here, other=0.0))
    gradient = (p * weight - subtracted) * scale
    if HAS_SOFTCAP:
        ratio = z / softcap
        gradient *= 1.0 - ratio * ratio
    places = out_ptr + rows.to(tl.int64) * row_stride + local
    tl.store(places, gradient.to(out_ptr.dtype.element_ty), mask=here)


# Launchers


def target_logits(inputs: Inputs, loss: LossSpec, stored: Tensor | None, into: Tensor) -> None:
    """Write z of each row's label: from the stored logits, or else from the label's row of W."""
    n, hidden = inputs.x.shape
    vocab = inputs.weight.shape[0]
    has_softcap = loss.softcap is not None
    if stored is not None:
        stored_target_logit_kernel[(cdiv(n, PICK_ROWS),)](
            stored,
            stored.stride(0),
            inputs.target,
            into,
            n,
            vocab,
            *loss_scalars(loss),
            HAS_SOFTCAP=has_softcap,
            ROWS=PICK_ROWS,
        )
        return
    target_logit_kernel[(n,)](
        inputs.x,
        inputs.weight,
        inputs.bias,
        inputs.target,
        into,
        vocab,
        hidden,
        inputs.x.stride(0),
        inputs.weight.stride(0),
        *loss_scalars(loss),
        HAS_BIAS=inputs.bias is not None,
        HAS_SOFTCAP=has_softcap,
        BLOCK=min(1024, next_power_of_2(hidden)),
        num_warps=4,
    )


def target_gradients(
    inputs: Inputs,
    first_column: int,
    stats: Statistics,
    coefficients: Coefficients,
    loss: LossSpec,
    out: Tensor,  # [N, v]
) -> None:
    """Write G at the labels, from the label logits the lse was computed with.

    Recomputed logits may round differently, and p - 1 has no digits to spare where p is near 1.
    """
    n, width = out.shape
    target_gradient_kernel[(cdiv(n, PICK_ROWS),)](
        out,
        out.stride(0),
        inputs.target,
        stats.target_logit,
        stats.lse,
        coefficients.a,
        coefficients.b,
        coefficients.c,
        coefficients.e,
        inputs.class_weight,
        n,
        first_column,
        width,
        *loss_scalars(loss),
        **gradient_flags(inputs, coefficients, loss),
        ROWS=PICK_ROWS,
    )
