"""The op for mean and sum: loss and gradients in one go, as a ``torch.library`` custom op.

The upstream gradient of a scalar loss is a scalar, so the gradients are computed in the forward
pass and backward only multiplies. It multiplies in place when the graph will not be used again
(nobody else can hold the saved gradients then), and does nothing at all, on a GPU without a
host synchronisation, when the factor is 1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flce_tune.kernels import loss as losses
from flce_tune.kernels import selection, strategies
from flce_tune.kernels.arguments import check_target_range, launching_on, prepare, problem_of
from flce_tune.kernels.backends import backend_of
from flce_tune.kernels.config import Config
from flce_tune.kernels.eager import eager_twin
from flce_tune.kernels.problem import describe_device
from flce_tune.kernels.scaling import add_scaled_, scaled
from flce_tune.kernels.strategies.common import gradient_dtype
from flce_tune.kernels.values import Gradients, LossSpec, Statistics, Wanted


def compute(
    x: Tensor,  # [N, D]
    weight: Tensor,  # [V, D]
    target: Tensor,  # [N]
    bias: Tensor | None,
    class_weight: Tensor | None,
    token_weight: Tensor | None,
    divisor: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    softcap: float | None,
    logit_scale: float | None,
    z_loss: float,
    reduction: str,
    need_dx: bool,
    need_dw: bool,
    need_db: bool,
    entropy: bool,
    prediction: bool,
    check_targets: bool,
    accumulate: str,
    workspace_limit: int | None,
    config: str,
    grad_weight_out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return loss [], token_loss [N], lse [N], entropy, prediction ([N] or empty), the factor
    the saved gradients still need (empty for 1), and dX, dW, db (empty where not needed).
    Nothing is added to ``grad_weight_out`` before backward.
    """
    loss = LossSpec(ignore_index, label_smoothing, softcap, logit_scale, z_loss)
    wanted = Wanted(need_dx, need_dw, need_db, entropy, prediction)
    with launching_on(x.device):
        if check_targets or x.device.type == "cpu":
            check_target_range(target, weight.shape[0], ignore_index)
        inputs = prepare(x, weight, target, bias, class_weight)
        backend = backend_of(x)
        weights = backend.row_weights(
            inputs, loss, token_weight, divisor, reduction, x.dtype,
            later=gradient_dtype(x.dtype) != x.dtype,
        )  # fmt: skip

        def work(chosen: Config) -> tuple[Statistics, Gradients]:
            strategy = strategies.get(chosen.strategy)
            if need_dx or need_dw or need_db:
                return strategy.train(inputs, weights.applied, loss, wanted, chosen)
            return strategy.evaluate(inputs, loss, wanted, chosen), Gradients()

        if len(x) == 0:
            statistics, gradients = _nothing(x, weight, wanted)
        else:
            problem = problem_of(inputs, loss, wanted, accumulate, per_token=False)
            statistics, gradients = selection.run(
                problem, describe_device(x.device), workspace_limit, config, work
            )
        value, rows = backend.total_loss(inputs, statistics, loss, weights)
        empty = x.new_empty(0)
        dx, dw, db = (
            x.new_empty(0) if gradient is None else gradient
            for gradient in (gradients.dx, gradients.dw, gradients.db)
        )
        return (
            value,
            rows,
            statistics.lse,
            empty if statistics.mean_logit is None else statistics.lse - statistics.mean_logit,
            empty.long() if statistics.prediction is None else statistics.prediction,
            rows.new_empty(0) if weights.left is None else weights.left,
            dx,
            dw,
            db,
        )


fused_loss = torch.library.custom_op("flce_tune::fused_loss", compute, mutates_args=())


def _nothing(x: Tensor, weight: Tensor, wanted: Wanted) -> tuple[Statistics, Gradients]:
    """Statistics and gradients of no tokens at all."""
    none = x.new_empty(0, dtype=losses.statistics_dtype(x.dtype))
    dtype = gradient_dtype(x.dtype)
    return (
        Statistics(
            lse=none,
            lse_low=none.clone(),
            target_logit=none.clone(),
            logit_sum=none.clone(),
            mean_logit=none.clone() if wanted.entropy else None,
            prediction=none.long() if wanted.prediction else None,
        ),
        Gradients(
            dx=x.new_zeros(x.shape, dtype=dtype) if wanted.dx else None,
            dw=weight.new_zeros(weight.shape, dtype=dtype) if wanted.dw else None,
            db=weight.new_zeros(weight.shape[0], dtype=dtype) if wanted.db else None,
        ),
    )


@fused_loss.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    token_weight: Tensor | None,
    divisor: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    softcap: float | None,
    logit_scale: float | None,
    z_loss: float,
    reduction: str,
    need_dx: bool,
    need_dw: bool,
    need_db: bool,
    entropy: bool,
    prediction: bool,
    check_targets: bool,
    accumulate: str,
    workspace_limit: int | None,
    config: str,
    grad_weight_out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    tokens, vocab = x.shape[0], weight.shape[0]
    dtype, row_dtype = gradient_dtype(x.dtype), losses.statistics_dtype(x.dtype)

    def optional(needed: bool, shape: Any, dtype: torch.dtype, otherwise: torch.dtype) -> Tensor:
        return x.new_empty(shape, dtype=dtype) if needed else x.new_empty(0, dtype=otherwise)

    return (
        x.new_empty((), dtype=row_dtype),
        x.new_empty(tokens, dtype=row_dtype),
        x.new_empty(tokens, dtype=row_dtype),
        optional(entropy, tokens, row_dtype, x.dtype),
        optional(prediction, tokens, torch.int64, torch.int64),
        x.new_empty(() if reduction == "mean" and dtype != x.dtype else 0, dtype=row_dtype),
        optional(need_dx, x.shape, dtype, x.dtype),
        optional(need_dw, weight.shape, dtype, x.dtype),
        optional(need_db, vocab, dtype, x.dtype),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.mark_non_differentiable(*output[1:])
    ctx.dtype = inputs[0].dtype
    ctx.needs = inputs[13:16]
    ctx.grad_weight_out = inputs[22]  # not saved: other backwards may have added to it since
    ctx.save_for_backward(*output[5:])


def _backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    left, *saved = ctx.saved_tensors
    nothing = (None,) * 19
    if grad is None:
        return (None, None, None, None, *nothing)
    factor = grad if left.numel() == 0 else grad * left
    need_dx, need_dw, need_db = ctx.needs
    if need_dw and ctx.grad_weight_out is not None:
        add_scaled_(ctx.grad_weight_out, saved[1], factor)
        need_dw = False
    needs = (need_dx, need_dw, need_db)
    wanted = [tensor if need else None for tensor, need in zip(saved, needs, strict=True)]
    dx, dw, db = scaled(wanted, factor, ctx.dtype)
    return (dx, dw, None, db, *nothing)


fused_loss.register_autograd(_backward, setup_context=_setup_context)
eager_fused_loss = eager_twin(compute, _setup_context, _backward, results=5)
