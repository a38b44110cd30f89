"""The split op as autograd functions: one for a scalar loss, one for a loss per token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from flce_tune.kernels import loss as losses
from flce_tune.kernels.arguments import launching_on
from flce_tune.kernels.backends import backend_of
from flce_tune.kernels.parallel.gradients import backward, no_gradients, train
from flce_tune.kernels.parallel.job import Job
from flce_tune.kernels.parallel.merge import nothing
from flce_tune.kernels.scaling import add_scaled_, scaled
from flce_tune.kernels.strategies.common import gradient_dtype
from flce_tune.kernels.values import Statistics, Wanted


@dataclass(frozen=True, slots=True)
class Scalar:
    """A reduction to one number."""

    kind: str  # "mean" or "sum"
    token_weight: Tensor | None  # [N]
    divisor: Tensor | None  # []


class ReducedLoss(torch.autograd.Function):
    """Loss and gradients in one go, as ``fused`` does; backward only multiplies."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,  # [N, D], or this rank's tokens of them
        weight: Tensor,  # [rows, D]
        bias: Tensor | None,  # [rows]
        job: Job,
        scalar: Scalar,
        wanted: Wanted,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return loss [], token_loss, lse, entropy, prediction (as ``per_row.compute``)."""
        ctx.set_materialize_grads(False)
        with launching_on(x.device):
            inputs = job.inputs(x, weight, bias)
            backend = backend_of(x)
            weights = backend.row_weights(
                job.labels, job.loss, scalar.token_weight, scalar.divisor, scalar.kind, x.dtype,
                later=gradient_dtype(x.dtype) != x.dtype,  # 1/N underflows in float16
            )  # fmt: skip
            if len(inputs.x) == 0:
                statistics = nothing(0, x, job.loss, wanted)
                gradients = no_gradients(x, inputs.weight, wanted)
            else:
                config = job.choose(inputs, wanted, per_token=False)
                statistics, gradients = train(job, inputs, weights.applied, wanted, config)
            gradients = job.padded(gradients, len(weight))
            value, rows = backend.total_loss(job.labels, statistics, job.loss, weights)
        ctx.wanted, ctx.dtype, ctx.grad_weight_out = wanted, x.dtype, job.grad_weight_out
        ctx.save_for_backward(weights.left, gradients.dx, gradients.dw, gradients.db)
        outputs = losses.per_token(rows, statistics)
        ctx.mark_non_differentiable(*outputs)
        return (value, *outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Multiply the gradients by the upstream one."""
        (grad, *_), (left, *saved) = grads, ctx.saved_tensors
        if grad is None:
            return (None,) * 6
        factor = grad if left is None else grad * left
        if ctx.wanted.dw and ctx.grad_weight_out is not None:
            add_scaled_(ctx.grad_weight_out, saved[1], factor)
            saved[1] = None
        dx, dw, db = scaled(saved, factor, ctx.dtype)
        return dx, dw, db, None, None, None


class RowLoss(torch.autograd.Function):
    """One loss per token; backward recomputes the logits, as ``per_row`` does."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,  # [N, D], or this rank's tokens of them
        weight: Tensor,  # [rows, D]
        bias: Tensor | None,  # [rows]
        job: Job,
        wanted: Wanted,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return token_loss, lse, entropy, prediction."""
        ctx.set_materialize_grads(False)
        with launching_on(x.device):
            inputs = job.inputs(x, weight, bias)
            if len(inputs.x) == 0:
                statistics = nothing(0, x, job.loss, wanted)
            else:
                config = job.choose(inputs, wanted, per_token=True)
                statistics = job.evaluate(inputs, wanted, config)
            rows = losses.row_losses(job.labels, statistics, job.loss)
        outputs = losses.per_token(rows, statistics)
        ctx.mark_non_differentiable(outputs[-1])
        ctx.job = job
        ctx.save_for_backward(
            x, weight, bias, statistics.lse, statistics.lse_low, statistics.target_logit,
            statistics.mean_logit,
        )  # fmt: skip
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Compute the gradients for what arrives per token."""
        x, weight, bias, lse, lse_low, target_logit, mean_logit = ctx.saved_tensors
        grad_loss, grad_lse, grad_entropy, _ = grads
        wanted = Wanted(*ctx.needs_input_grad[:3])
        job: Job = ctx.job
        with launching_on(x.device):
            inputs = job.inputs(x, weight, bias)
            if len(inputs.x) == 0:
                gradients = no_gradients(x, inputs.weight, wanted)
            else:
                statistics = Statistics(lse, lse_low, target_logit, mean_logit=mean_logit)
                row_weight = losses.upstream_weights(
                    job.labels.target, lse, grad_loss, job.loss.ignore_index
                )
                given = backend_of(lse).coefficients(
                    job.labels, statistics, row_weight, job.loss, grad_lse,
                    None if mean_logit is None else grad_entropy,
                )  # fmt: skip
                local = job.shard.gradient_inputs(job.labels, statistics, given, job.loss)
                config = job.choose(inputs, wanted, per_token=True)
                gradients = backward(job, inputs, *local, wanted, config)
            gradients = job.padded(gradients, len(weight))
        dx, dw, db = (
            None if g is None else g.to(x.dtype) for g in (gradients.dx, gradients.dw, gradients.db)
        )
        if dw is not None and job.grad_weight_out is not None:
            job.grad_weight_out.add_(dw)
            dw = None
        return dx, dw, db, None, None


reduced_loss: Callable[..., tuple[Tensor, ...]] = ReducedLoss.apply
row_loss: Callable[..., tuple[Tensor, ...]] = RowLoss.apply
