"""The strategies' primitives on plain torch: for CPUs, and wherever Triton is missing.

Each holds at most one chunk (or slab) of logits beside its float32 image.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flce_tune.kernels import loss as losses
from flce_tune.kernels.config import Tile
from flce_tune.kernels.loss import logits_derivative, scaled_logits
from flce_tune.kernels.values import (
    Coefficients,
    Inputs,
    Labels,
    LossSpec,
    Statistics,
    Wanted,
)

row_weights = losses.all_row_weights
total_loss = losses.total_loss
coefficients = losses.coefficients


def logits(
    inputs: Inputs,
    loss: LossSpec,
    wanted: Wanted,
    out: Tensor | None,  # [n, V], compute dtype; holds the raw logits afterwards
    tile: Tile | None,
) -> Statistics:
    """Compute raw logits into ``out`` and return their statistics."""
    if out is None:
        raise ValueError("plain torch computes statistics from stored logits, got out=None")
    raw_logits(inputs, out)
    return statistics(out, inputs, loss, wanted)


def raw_logits(inputs: Inputs, out: Tensor) -> None:
    """out = x·Wᵀ + b, rounded to the compute dtype."""
    if inputs.bias is None:
        torch.mm(inputs.x, inputs.weight.t(), out=out)
    else:
        torch.addmm(inputs.bias, inputs.x, inputs.weight.t(), out=out)


def statistics(
    raw: Tensor,  # [n, V]
    labels: Labels,
    loss: LossSpec,
    wanted: Wanted,
) -> Statistics:
    """Row statistics of stored logits."""
    z = scaled_logits(raw, loss)
    vocab = z.shape[1]
    in_range = (labels.target >= 0) & (labels.target < vocab)
    picked = z.gather(1, labels.target.clamp(0, vocab - 1)[:, None])[:, 0]
    m = z.amax(dim=1)
    reference = m.masked_fill(m.isinf(), 0.0)
    e = (z - reference[:, None]).exp_()
    total = e.sum(dim=1)
    lse, lse_low = rounded_sum(reference, total.log())
    logit_sum = mean_logit = prediction = None
    if loss.label_smoothing:
        weighted = z if labels.class_weight is None else z * labels.class_weight
        logit_sum = weighted.sum(dim=1)
    if wanted.prediction:
        prediction = z.argmax(dim=1)
    if wanted.entropy:
        mean_logit = torch.where(e == 0, 0.0, e * z).sum(dim=1) / total
    return Statistics(
        lse=lse,
        lse_low=lse_low,
        target_logit=picked.masked_fill(~in_range, float("nan")),
        logit_sum=logit_sum,
        mean_logit=mean_logit,
        prediction=prediction,
    )


def rounded_sum(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """a + b rounded, and what the rounding left out: 0 where the sum is not finite.

    Knuth's two-sum, exact whichever of the two is larger.
    """
    total = a + b
    of_b = total - a
    rest = (a - (total - of_b)) + (b - of_b)
    return total, torch.where(total.isfinite(), rest, 0.0)


def joined_lse(
    lse: Tensor,  # [T, n] of disjoint columns
    lse_low: Tensor,  # [T, n]
) -> tuple[Tensor, Tensor, Tensor]:  # [n], [n], [T, n]
    """lse of all columns in two parts, and each part's share of the probability."""
    m = lse.amax(dim=0)
    reference = m.masked_fill(m.isinf(), 0.0)
    e = torch.exp((lse - reference) + lse_low)
    total = e.sum(dim=0)
    return *rounded_sum(reference, total.log()), e / total


def gradient(
    raw: Tensor,  # [n, v] raw logits of columns first, first + 1, ...
    labels: Labels,
    stats: Statistics,
    coefficients: Coefficients,
    loss: LossSpec,
    out: Tensor,  # [n, v] ∂L/∂a; may be raw itself
    first_column: int = 0,
) -> None:
    """Turn raw logits into their gradient."""
    z = scaled_logits(raw, loss)
    weight_of_p = coefficients.a[:, None]
    if coefficients.c is not None:
        weight_of_p = weight_of_p + coefficients.c[:, None] * torch.where(z.isneginf(), 0.0, z)
    unknown = (labels.target < 0) | (labels.target >= labels.vocab)
    lse = stats.lse.masked_fill(unknown & (coefficients.b != 0), float("nan"))
    result = torch.exp(z - lse[:, None]) * weight_of_p
    columns = raw.shape[1]
    local = labels.target - first_column
    inside = (local >= 0) & (local < columns)
    place = local.clamp(0, columns - 1)[:, None]
    of_label = torch.where(inside, coefficients.b, 0.0)[:, None]
    if coefficients.e is None:
        result.scatter_add_(1, place, -of_label)
    else:
        uniform = coefficients.e[:, None].expand_as(result)
        if labels.class_weight is not None:
            uniform = uniform * labels.class_weight[first_column : first_column + columns]
        # B + E·w is rounded as A is, so that they cancel where p is 1.
        at_label = result.gather(1, place) - (of_label + uniform.gather(1, place))
        result -= uniform
        result.scatter_(1, place, at_label)
    result *= logits_derivative(z, loss)
    active = coefficients.a != 0
    for other in (coefficients.b, coefficients.c, coefficients.e):
        if other is not None:
            active = active | (other != 0)
    out.copy_(torch.where(active[:, None], result, 0.0))


def slab_gradient(
    inputs: Inputs,
    columns: slice,  # of the vocabulary
    stats: Statistics,
    coefficients: Coefficients,
    loss: LossSpec,
    out: Tensor,  # [N, v], compute dtype
    tile: Tile | None,
) -> None:
    """Recompute the raw logits of a vocabulary slab and turn them into their gradient."""
    raw_logits(inputs.columns(columns), out)
    gradient(out, inputs, stats, coefficients, loss, out, columns.start)
