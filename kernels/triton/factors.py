"""The row factors of softmax numerators and the labels' gradients; see ``kernels.numerators``.

As operators of torch this algebra on [n] is some thirty launches, which take the host longer than a
short chunk takes the GPU; here it is one. Algorithm: a program for each ROWS tokens, which reads
and writes them in the order that is asked for, so that nothing is gathered afterwards.

Numerics: float32. exp(x) - 1 near 0 comes from its series: neither the p - 1 of a confident row nor
what the lse's rounding left out loses digits. Bytes: some 50 a token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flce_tune.kernels.numerators import Factors
from flce_tune.kernels.triton.arguments import cdiv, loss_scalars
from flce_tune.kernels.triton.reduce import weight_of
from flce_tune.kernels.triton.relaunch import relaunched
from flce_tune.kernels.values import Coefficients, Inputs, LossSpec, Statistics

ROWS = 128


@triton.jit
def less_one(x):
    """exp(x) - 1 for |x| < 0.5: its Taylor series to the 9th power, cut off below 2⁻²⁹ of it."""
    y = 1.0 + x * (1.0 / 9.0)
    for i in tl.static_range(7):
        y = 1.0 + x * (1.0 / (8.0 - i)) * y
    return x * y


@relaunched
@triton.jit(do_not_specialize=["first"])
def factors_kernel(
    target_ptr,  # [n]
    total_ptr,  # [n] Σ_c 2^(t - R) of this rank's columns
    lse_ptr,  # [n], of the whole vocabulary, like the next two
    lse_low_ptr,
    target_logit_ptr,
    local_lse_ptr,  # [n], of this rank's columns, like the next; None: these are all
    local_low_ptr,
    a_ptr,  # [n], like the next; None: the loss's own
    b_ptr,
    row_weight_ptr,  # [n]
    class_weight_ptr,  # [V], or None
    order_ptr,  # [n] tokens, counted from ``first``; None: one after the other
    row_ptr,  # [n] out: f
    label_ptr,  # [n] out: G_iy
    ordered_ptr,  # [n] out: G_iy of the tokens in order; or None
    first,
    n,
    vocab,
    ignore_index,
    scale,
    z_loss,
    HAS_Z_LOSS: tl.constexpr,
    ROWS: tl.constexpr,
):
    places = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    ok = places < n
    rows = places
    if order_ptr is not None:
        rows = (tl.load(order_ptr + places, mask=ok, other=0) - first).to(tl.int32)
    target = tl.load(target_ptr + rows, mask=ok, other=0)
    lse = tl.load(lse_ptr + rows, mask=ok, other=0.0)
    low = tl.load(lse_low_ptr + rows, mask=ok, other=0.0)
    total = tl.load(total_ptr + rows, mask=ok, other=1.0)
    if local_lse_ptr is not None:
        further = tl.load(local_lse_ptr + rows, mask=ok, other=0.0) - lse
        share = tl.exp(further + (tl.load(local_low_ptr + rows, mask=ok, other=0.0) - low))
        total = tl.where(share == 0.0, float("inf"), tl.div_rn(total, share))
    if a_ptr is not None:
        a = tl.load(a_ptr + rows, mask=ok, other=0.0)
        b = tl.load(b_ptr + rows, mask=ok, other=0.0)
        a += a * less_one(low)
    else:
        weight = tl.load(row_weight_ptr + rows, mask=ok, other=0.0)
        b = weight
        if class_weight_ptr is not None:
            b *= weight_of(target, class_weight_ptr, vocab, ok)
        a = b
        if HAS_Z_LOSS:
            a += weight * (2.0 * z_loss) * lse
    known = (target >= 0) & (target < vocab)
    counts = b != 0.0
    f = tl.where(a == 0.0, 0.0, tl.div_rn(scale * a, total))
    f = tl.where(~known & (target != ignore_index) & counts, float("nan"), f)
    x = (tl.load(target_logit_ptr + rows, mask=ok, other=0.0) - lse) - low
    near = a * less_one(x) + (a - b)
    g = scale * tl.where(tl.abs(x) < 0.5, near, a * tl.exp(x) - b)
    g = tl.where(known & counts, g, 0.0)
    tl.store(row_ptr + rows, f, mask=ok)
    tl.store(label_ptr + rows, g, mask=ok)
    if ordered_ptr is not None:
        tl.store(ordered_ptr + places, g, mask=ok)


def factors(
    inputs: Inputs,
    total: Tensor,
    local: Statistics,
    statistics: Statistics,
    given: Coefficients | None,
    row_weight: Tensor,
    loss: LossSpec,
    order: Tensor | None = None,
    first: int = 0,
) -> Factors:
    """``torch_numerators.factors`` in one launch."""
    n, alone = len(total), statistics is local
    outputs = torch.empty(2 if order is None else 3, n, dtype=torch.float32, device=total.device)
    row, label, *ordered = outputs.unbind()
    factors_kernel[(cdiv(n, ROWS),)](
        inputs.target,
        total,
        statistics.lse,
        statistics.lse_low,
        statistics.target_logit,
        None if alone else local.lse,
        None if alone else local.lse_low,
        None if given is None else given.a,
        None if given is None else given.b,
        row_weight,
        inputs.class_weight,
        order,
        row,
        label,
        ordered[0] if ordered else None,
        first,
        n,
        inputs.vocab,
        loss.ignore_index,
        loss_scalars(loss)[0],
        float(loss.z_loss),
        HAS_Z_LOSS=loss.z_loss != 0.0,
        ROWS=ROWS,
        num_warps=4,
    )
    return Factors(row, label, ordered[0] if ordered else label)
