"""``cross_entropy`` of split logits: statistics, one all-gather, and a backward that only writes.

bfloat16 in, float32 inside the kernels, no float32 copy of the logits; the gradient may take the
logits' own place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from flce_tune.kernels import loss as losses
from flce_tune.kernels.arguments import launching_on, prepare_logits
from flce_tune.kernels.backends import backend_of
from flce_tune.kernels.given_rows import (
    may_overwrite,
    row_statistics,
    saved_tensors_are_packed,
    write_rows,
)
from flce_tune.kernels.parallel.merge import merge, nothing, stored_logits
from flce_tune.kernels.parallel.shard import GlobalLabels, Shard
from flce_tune.kernels.values import Coefficients, GivenLogits, LossSpec, Statistics, Wanted


class GivenRowLoss(torch.autograd.Function):
    """One loss per token of logits whose columns are split."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,  # [N, columns], this rank's, padding last
        shard: Shard,
        labels: GlobalLabels,
        loss: LossSpec,
        wanted: Wanted,
        in_place: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return token_loss, lse, entropy, prediction."""
        ctx.set_materialize_grads(False)
        with launching_on(logits.device):
            given = _prepare(shard, labels, logits)
            local = _statistics(given, loss, wanted)
            merged = local
            if len(logits):
                merged = merge(shard, labels, local, stored_logits(given.raw, local, loss))
            rows = losses.row_losses(labels, merged, loss)
        ctx.call = shard, labels, loss
        ctx.in_place = in_place and not saved_tensors_are_packed()
        ctx.save_for_backward(logits, merged.lse, merged.lse_low, merged.target_logit)
        outputs = losses.per_token(rows, merged)
        ctx.mark_non_differentiable(*outputs[2:])
        return outputs

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_loss: Tensor | None, grad_lse: Tensor | None, *_: Any
    ) -> tuple[Tensor | None, ...]:
        """Turn the logits into their gradient, over themselves where nobody reads them again."""
        shard, labels, loss = ctx.call
        logits, lse, lse_low, target_logit = ctx.saved_tensors
        over = may_overwrite(ctx)
        out = logits.detach() if over else torch.empty_like(logits)
        with launching_on(out.device):
            row_weight = losses.upstream_weights(labels.target, lse, grad_loss, loss.ignore_index)
            merged = Statistics(lse, lse_low, target_logit)
            coefficients = backend_of(lse).coefficients(labels, merged, row_weight, loss, grad_lse)
            stats, local = shard.gradient_inputs(labels, merged, coefficients, loss)
            _write_gradient(_prepare(shard, labels, logits), stats, local, loss, out)
        if over:  # others that saved the logits must notice
            torch.autograd.graph.increment_version(out)
        return (out, *(None,) * 5)


given_row_loss: Callable[..., tuple[Tensor, ...]] = GivenRowLoss.apply


def _prepare(shard: Shard, labels: GlobalLabels, logits: Tensor) -> GivenLogits:
    """This rank's columns, padding left out, labels counted from them."""
    columns = shard.columns(labels.class_weight)
    return prepare_logits(logits[:, : shard.width], shard.local(labels.target), columns)


def _statistics(given: GivenLogits, loss: LossSpec, wanted: Wanted) -> Statistics:
    if given.raw.numel() == 0:
        return nothing(len(given.raw), given.raw, loss, wanted)
    return row_statistics(given, loss, wanted)


def _write_gradient(
    given: GivenLogits, stats: Statistics, local: Coefficients, loss: LossSpec, out: Tensor
) -> None:
    width = given.raw.shape[1]
    out[:, width:] = 0
    if given.raw.numel() > 0:
        write_rows(given, stats, local, loss, out[:, :width])
