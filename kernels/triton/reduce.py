"""Reductions over tokens: each token's weight before the products, the loss after them.

As operators of torch this algebra on [N] is a dozen launches, which take the host longer than a
small step takes the GPU; here each side is one. Algorithm: one program walks over the tokens, a
block at a time, and keeps one sum per lane. Numerics: float32; the order of the sum is fixed.
Bytes: a few per token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flce_tune.kernels.loss import RowWeights, weight_total
from flce_tune.kernels.triton.arguments import next_power_of_2
from flce_tune.kernels.triton.relaunch import relaunched
from flce_tune.kernels.values import Labels, LossSpec, Statistics

MOST_ROWS = 4096
WARPS = 8


@triton.jit
def weight_of(target, class_weight_ptr, vocab, ok):
    """Class weight of each label, 1 where the label is no column."""
    known = ok & (target >= 0) & (target < vocab)
    return tl.load(class_weight_ptr + target, mask=known, other=1.0)


@relaunched
@triton.jit
def row_weights_kernel(
    target_ptr,  # [n] int64
    token_weight_ptr,  # [n], or None for ones
    class_weight_ptr,  # [V], or None
    divisor_ptr,  # scalar, or None: the mean's own
    weight_ptr,  # [n] out: t, 0 for ignored rows
    applied_ptr,  # [n] out: t / divisor, or None
    total_ptr,  # scalar out: the divisor
    left_ptr,  # scalar out: 1 / divisor, 0 without a row; or None
    n,
    vocab,
    ignore_index,
    BLOCK: tl.constexpr,
):
    total = tl.zeros([BLOCK], tl.float32)
    present = tl.zeros([BLOCK], tl.int32)
    for start in range(0, n, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        ok = rows < n
        target = tl.load(target_ptr + rows, mask=ok, other=0)
        counted = ok & (target != ignore_index)
        weight = tl.where(counted, 1.0, 0.0)
        if token_weight_ptr is not None:
            given = tl.load(token_weight_ptr + rows, mask=ok, other=0.0).to(tl.float32)
            weight = tl.where(counted, given, 0.0)
        tl.store(weight_ptr + rows, weight, mask=ok)
        present |= (weight != 0.0).to(tl.int32)
        if class_weight_ptr is not None:
            weight *= weight_of(target, class_weight_ptr, vocab, counted)
        total += weight
    if divisor_ptr is None:
        divisor = tl.sum(total, axis=0)
    else:
        divisor = tl.load(divisor_ptr)
    tl.store(total_ptr, divisor)
    factor = 1.0 / divisor
    if left_ptr is not None:
        tl.store(left_ptr, tl.where(tl.max(present, axis=0) > 0, factor, 0.0))
    if applied_ptr is not None:
        tl.debug_barrier()  # the weights are read back, not always by the thread that wrote them
        factor = tl.minimum(factor, 3.4028234663852886e38, propagate_nan=tl.PropagateNan.ALL)
        for start in range(0, n, BLOCK):
            rows = start + tl.arange(0, BLOCK)
            weight = tl.load(weight_ptr + rows, mask=rows < n, other=0.0)
            tl.store(applied_ptr + rows, weight * factor, mask=rows < n)


@relaunched
@triton.jit
def total_loss_kernel(
    target_ptr,  # [n] int64
    lse_ptr,  # [n] float32, like the next three
    lse_low_ptr,
    target_logit_ptr,
    logit_sum_ptr,  # or None: no label smoothing
    class_weight_ptr,  # [V], or None
    class_total_ptr,  # scalar, their sum; or None for V
    weight_ptr,  # [n] t
    divisor_ptr,  # scalar, or None for 1
    row_ptr,  # [n] out: each token's loss
    value_ptr,  # scalar out: Σ t·loss / divisor
    n,
    vocab,
    smoothing,
    z_loss,
    ignore_index,
    BLOCK: tl.constexpr,
):
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        ok = rows < n
        target = tl.load(target_ptr + rows, mask=ok, other=0)
        lse = tl.load(lse_ptr + rows, mask=ok, other=0.0)
        row = lse - tl.load(target_logit_ptr + rows, mask=ok, other=0.0)
        row += tl.load(lse_low_ptr + rows, mask=ok, other=0.0)
        if class_weight_ptr is not None:
            row *= weight_of(target, class_weight_ptr, vocab, ok)
        if logit_sum_ptr is not None:
            classes = vocab * 1.0  # an integer of 1 is a constant here
            share = smoothing / classes
            if class_total_ptr is not None:
                classes = tl.load(class_total_ptr)
            smooth = lse * classes - tl.load(logit_sum_ptr + rows, mask=ok, other=0.0)
            row = (1.0 - smoothing) * row + share * smooth
        row += z_loss * lse * lse
        row = tl.where(ok & (target != ignore_index), row, 0.0)
        tl.store(row_ptr + rows, row, mask=ok)
        total += row * tl.load(weight_ptr + rows, mask=ok, other=0.0)
    value = tl.sum(total, axis=0)
    if divisor_ptr is not None:
        value = value / tl.load(divisor_ptr)
    tl.store(value_ptr, value)


def row_weights(
    labels: Labels,
    loss: LossSpec,
    token_weight: Tensor | None,  # [N]
    divisor: Tensor | None,  # scalar; None: the mean's own
    reduction: str,
    compute: torch.dtype,
    *,
    later: bool,
) -> RowWeights:
    """``loss.all_row_weights`` in one launch."""
    n = labels.target.shape[0]
    device = labels.target.device
    mean = divisor is not None or reduction == "mean"
    weight = torch.empty(n, dtype=torch.float32, device=device)
    applied = torch.empty_like(weight) if mean and not later else None
    total = torch.empty((), dtype=torch.float32, device=device)
    left = torch.empty_like(total) if mean and later else None
    row_weights_kernel[(1,)](
        labels.target,
        token_weight,
        labels.class_weight,
        divisor,
        weight,
        applied,
        total,
        left,
        n,
        labels.vocab,
        loss.ignore_index,
        BLOCK=_block(n),
        num_warps=WARPS,
    )
    return RowWeights(weight, total if mean else None, weight if applied is None else applied, left)


def total_loss(
    labels: Labels,
    statistics: Statistics,
    loss: LossSpec,
    weights: RowWeights,
) -> tuple[Tensor, Tensor]:
    """``loss.total_loss`` in one launch."""
    n = labels.target.shape[0]
    rows = torch.empty(n, dtype=torch.float32, device=labels.target.device)
    value = torch.empty((), dtype=torch.float32, device=labels.target.device)
    class_total = None
    if loss.label_smoothing and labels.class_weight is not None:
        class_total = weight_total(labels)
    total_loss_kernel[(1,)](
        labels.target,
        statistics.lse,
        statistics.lse_low,
        statistics.target_logit,
        statistics.logit_sum,
        labels.class_weight,
        class_total,
        weights.weight,
        weights.divisor,
        rows,
        value,
        n,
        labels.vocab,
        float(loss.label_smoothing),
        float(loss.z_loss),
        loss.ignore_index,
        BLOCK=_block(n),
        num_warps=WARPS,
    )
    return value, rows


def _block(n: int) -> int:
    return min(MOST_ROWS, max(32, next_power_of_2(n)))
