"""The op on given logits, reduced to a mean or a sum, for calls that nobody traces.

Computes what sums over ``given_rows`` do. There autograd works on [N] before and after the two
passes, in two dozen small launches; here each token's weight, the loss and the coefficients of the
gradient are one launch each.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from flce_tune.kernels import loss as losses
from flce_tune.kernels.arguments import check_target_range, launching_on, prepare_logits
from flce_tune.kernels.backends import backend_of
from flce_tune.kernels.given_rows import (
    given_row_loss_backward,
    may_overwrite,
    row_statistics,
    saved_tensors_are_packed,
    write_gradient,
)
from flce_tune.kernels.reduction import LossOutputs, Reduction
from flce_tune.kernels.values import LossSpec, Statistics, Wanted


def reduced(
    asked: Reduction,  # a mean or a sum
    logits: Tensor,  # [N, V], N > 0
    arguments: tuple[Any, ...],  # ``given_rows.compute``'s
    *,
    in_place: bool,
) -> Tensor | LossOutputs:
    """Return the loss, with the outputs asked for beside it."""
    divisor = asked.given_divisor(losses.statistics_dtype(logits.dtype))
    value, *statistics = _GivenLoss.apply(  # type: ignore[no-untyped-call]
        in_place, asked.kind, asked.token_weight, divisor, *arguments
    )
    if not asked.outputs:
        return cast(Tensor, value)
    return asked.collect(value, *statistics)


class _GivenLoss(torch.autograd.Function):
    """Loss, token_loss, lse, entropy, prediction; the last two empty where not wanted."""

    @staticmethod
    def forward(
        ctx: Any,
        in_place: bool,
        kind: str,
        token_weight: Tensor | None,  # [N]
        divisor: Tensor | None,  # scalar
        logits: Tensor,  # [N, V]
        target: Tensor,  # [N]
        class_weight: Tensor | None,
        *rest: Any,
    ) -> tuple[Tensor, ...]:
        """Read the logits once; keep them, their statistics and each row's weight."""
        *scalars, entropy, prediction, check_targets = rest
        loss, wanted = LossSpec(*scalars), Wanted(entropy=entropy, prediction=prediction)
        with launching_on(logits.device):
            if check_targets or logits.device.type == "cpu":
                check_target_range(target, logits.shape[1], loss.ignore_index)
            given, backend = prepare_logits(logits, target, class_weight), backend_of(logits)
            weights = backend.row_weights(
                given, loss, token_weight, divisor, kind, logits.dtype, later=False
            )
            found = row_statistics(given, loss, wanted)
            value, rows = backend.total_loss(given, found, loss, weights)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(
            logits, target, class_weight, weights.applied, found.lse, found.lse_low,
            found.target_logit,
        )  # fmt: skip
        ctx.scalars = tuple(scalars)
        ctx.in_place = in_place and not saved_tensors_are_packed()
        outputs = losses.per_token(rows, found)
        ctx.mark_non_differentiable(*outputs)
        return value, *outputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        """Write the gradient of the logits, over themselves where nobody reads them again."""
        nothing = (None,) * 10
        if grad is None:
            return (None, None, None, None, None, *nothing)
        logits, target, class_weight, weight, *saved = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True: the custom op says that it cannot follow
            gradient = given_row_loss_backward(
                grad * weight, None, logits, target, class_weight, *saved, *ctx.scalars
            )
            return (None, None, None, None, gradient, *nothing)
        over, out = may_overwrite(ctx), logits.detach()
        given = prepare_logits(out, target, class_weight)
        if not over:
            out = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
        write_gradient(
            given, Statistics(*saved), weight, LossSpec(*ctx.scalars), out,
            upstream=grad.to(weight.dtype),
        )  # fmt: skip
        if over:  # others that saved the logits must notice
            torch.autograd.graph.increment_version(out)
        return (None, None, None, None, out, *nothing)
