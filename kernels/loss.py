"""The loss, in terms of row statistics: losses, coefficients of the gradient, reductions.

These are the only places that know smoothing, z-loss and weights; formulas in
``values.py``. All vectors have one entry per token, so none of this is on the clock.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flce_tune.kernels.values import Coefficients, Labels, LossSpec, Statistics


def statistics_dtype(compute: torch.dtype) -> torch.dtype:
    """float32, except for float64 inputs, whose statistics are float64."""
    return torch.float64 if compute == torch.float64 else torch.float32


def scaled_logits(
    raw: Tensor,  # [..., V] a = x·Wᵀ + b, any float dtype
    loss: LossSpec,
) -> Tensor:  # [..., V] z, statistics dtype
    """Apply scale and softcap: z = cap·tanh(scale·a / cap)."""
    z = raw.to(statistics_dtype(raw.dtype))
    if loss.logit_scale is not None:
        z = z * loss.logit_scale
    if loss.softcap is not None:
        z = loss.softcap * torch.tanh(z / loss.softcap)
    return z


def logits_derivative(
    z: Tensor,  # [..., V] scaled and capped
    loss: LossSpec,
) -> Tensor | float:
    """dz/da at z: scale·(1 - (z/cap)²)."""
    scale = 1.0 if loss.logit_scale is None else loss.logit_scale
    return scale if loss.softcap is None else scale * (1.0 - (z / loss.softcap).square())


def out_of_range(
    target: Tensor,  # [N]
    vocab: int,
    ignore_index: int,
) -> Tensor:  # [N] bool
    """Say which rows hold a label outside [0, V) that is not ignore_index."""
    return ((target < 0) | (target >= vocab)) & (target != ignore_index)


def target_weight(
    labels: Labels,
) -> Tensor | None:  # [N] w_y, 1 where the label is no column
    """Class weight of each row's label."""
    if labels.class_weight is None:
        return None
    vocab = labels.vocab
    known = (labels.target >= 0) & (labels.target < vocab)
    picked = labels.class_weight[labels.target.clamp(0, vocab - 1)]
    return torch.where(known, picked, 1.0)


def row_losses(
    labels: Labels,
    statistics: Statistics,
    loss: LossSpec,
) -> Tensor:  # [N]
    """Unreduced losses: 0 for ignored rows, NaN where the label, and so its logit, is unknown."""
    lse = statistics.lse
    row = lse - statistics.target_logit + statistics.lse_low
    weight = target_weight(labels)
    if weight is not None:
        row = row * weight
    if loss.label_smoothing:
        if statistics.logit_sum is None:
            raise ValueError("label smoothing needs the statistic logit_sum")
        vocab = labels.vocab
        smooth = lse * weight_total(labels) - statistics.logit_sum
        row = (1.0 - loss.label_smoothing) * row + (loss.label_smoothing / vocab) * smooth
    if loss.z_loss:
        row = row + loss.z_loss * lse.square()
    return torch.where(labels.target == loss.ignore_index, 0.0, row)


def per_token(rows: Tensor, statistics: Statistics) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """token_loss, lse, entropy, prediction; the last two empty where not wanted."""
    empty = rows.new_empty(0)
    lse, mean_logit, prediction = statistics.lse, statistics.mean_logit, statistics.prediction
    return (
        rows,
        lse,
        empty if mean_logit is None else lse - mean_logit,
        empty.long() if prediction is None else prediction,
    )


def upstream_weights(
    target: Tensor,  # [N]
    lse: Tensor,  # [N]
    grad_loss: Tensor | None,  # [N]; None: zeros
    ignore_index: int,
) -> Tensor:  # [N]
    """The upstream gradient r of each row's loss, 0 where the row does not count."""
    upstream = torch.zeros_like(lse) if grad_loss is None else grad_loss.to(lse.dtype)
    return torch.where(target == ignore_index, 0.0, upstream)


def weight_total(labels: Labels) -> Tensor | int:
    """W1 = Σ_c w_c, which is V without class weights."""
    return labels.vocab if labels.class_weight is None else labels.class_weight.sum()


def coefficients(
    labels: Labels,
    statistics: Statistics,
    row_weight: Tensor,  # [N] r, the upstream gradient of each row's loss; 0 for ignored rows
    loss: LossSpec,
    grad_lse: Tensor | None = None,  # [N] upstream gradient of each row's lse
    grad_entropy: Tensor | None = None,  # [N] likewise of its entropy
    upstream: Tensor | None = None,  # scalar that multiplies every r but 0
) -> Coefficients:
    """Coefficients of G for the loss Σ_i r_i·loss_i, plus gradients on lse and entropy.

    With H = lse - Σ_c p_c·z_c the entropy's derivative is -p_c·(z_c - Σ_k p_k·z_k).
    """
    if upstream is not None:
        row_weight = torch.where(row_weight == 0, 0.0, row_weight * upstream)
    a = b = row_weight
    e = None
    if (weight := target_weight(labels)) is not None:
        a = b = row_weight * weight
    if loss.label_smoothing:
        share = loss.label_smoothing / labels.vocab
        b = b * (1.0 - loss.label_smoothing)
        e = row_weight * share
        a = b + e * weight_total(labels)
    if loss.z_loss:
        a = a + row_weight * (2.0 * loss.z_loss) * statistics.lse
    if grad_lse is not None:
        a = a + grad_lse
    c = None
    if grad_entropy is not None:
        if statistics.mean_logit is None:
            raise ValueError("a gradient on the entropy needs the statistic mean_logit")
        a = a + grad_entropy * statistics.mean_logit
        c = -grad_entropy
    rest = torch.exp(-statistics.lse_low)
    a, c = a * rest, None if c is None else c * rest
    return Coefficients(a=a, b=b, c=c, e=e)


def row_weights(
    labels: Labels,
    loss: LossSpec,
    token_weight: Tensor | None,  # [N]
    divisor: Tensor | None,  # scalar; None: the mean's own, Σ_i t_i·w_y over counted rows
    reduction: str,
    compute: torch.dtype,
) -> tuple[Tensor, Tensor | None]:  # [N] t_i, 0 for ignored rows; scalar, None for 1
    """Per-row weights and the divisor of the reduction, without a host synchronisation."""
    dtype = statistics_dtype(compute)
    counted = labels.target != loss.ignore_index
    if token_weight is None:
        weight = counted.to(dtype)
    else:
        weight = torch.where(counted, token_weight.to(dtype), 0.0)
    if divisor is None and reduction == "mean":
        of_target = target_weight(labels)
        divisor = (weight if of_target is None else weight * of_target).sum()
    return weight, divisor


@dataclass(frozen=True, slots=True)
class RowWeights:
    """What each row counts for, in the statistics' dtype."""

    weight: Tensor  # [N] t_i, 0 for ignored rows
    divisor: Tensor | None  # scalar, of the reduction; None for 1
    applied: Tensor  # [N] the upstream gradient r of each row's loss, as the strategies take it
    left: Tensor | None  # scalar, what r still lacks; None for 1


def all_row_weights(
    labels: Labels,
    loss: LossSpec,
    token_weight: Tensor | None,  # [N]
    divisor: Tensor | None,  # scalar
    reduction: str,
    compute: torch.dtype,
    *,
    later: bool,
) -> RowWeights:
    """``row_weights``, divided by the reduction's divisor, or with the division left for ``later``.

    Without a row that counts every weight is 0, whatever the divisor.
    """
    weight, total = row_weights(labels, loss, token_weight, divisor, reduction, compute)
    if total is None:
        return RowWeights(weight, None, weight, None)
    factor = total.reciprocal()
    if later:
        return RowWeights(weight, total, weight, torch.where((weight != 0).any(), factor, 0.0))
    applied = weight * factor.clamp(max=torch.finfo(factor.dtype).max)
    return RowWeights(weight, total, applied, None)


def total_loss(
    labels: Labels, statistics: Statistics, loss: LossSpec, weights: RowWeights
) -> tuple[Tensor, Tensor]:  # scalar, [N]
    """The reduced loss, and the unreduced, unweighted losses it is made of."""
    rows = row_losses(labels, statistics, loss)
    value = (rows * weights.weight).sum()
    return value if weights.divisor is None else value / weights.divisor, rows
