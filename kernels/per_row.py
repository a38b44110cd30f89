"""The op for one upstream gradient per token, as a pair of ``torch.library`` custom ops.

For ``reduction="none"`` and for a differentiable lse or entropy the upstream gradient is a
vector nobody knows in the forward pass: it keeps the row statistics, and backward recomputes the
logits and turns them into gradients for the coefficients that arrive.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flce_tune.kernels import loss as losses
from flce_tune.kernels import selection, strategies
from flce_tune.kernels.arguments import (
    check_target_range,
    direct,
    launching_on,
    prepare,
    problem_of,
)
from flce_tune.kernels.backends import backend_of
from flce_tune.kernels.config import Config
from flce_tune.kernels.eager import eager_twin
from flce_tune.kernels.problem import describe_device
from flce_tune.kernels.values import Gradients, LossSpec, Statistics, Wanted


def compute(
    x: Tensor,  # [N, D]
    weight: Tensor,  # [V, D]
    target: Tensor,  # [N]
    bias: Tensor | None,
    class_weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    softcap: float | None,
    logit_scale: float | None,
    z_loss: float,
    entropy: bool,
    prediction: bool,
    check_targets: bool,
    accumulate: str,
    workspace_limit: int | None,
    config: str,
    grad_weight_out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return token_loss, lse, entropy, prediction, lse_low, target_logit.

    Each is [N]; entropy and prediction are empty if not wanted. Nothing is added to
    ``grad_weight_out`` before backward.
    """
    loss = LossSpec(ignore_index, label_smoothing, softcap, logit_scale, z_loss)
    wanted = Wanted(entropy=entropy, prediction=prediction)
    empty = x.new_empty(0)
    if len(x) == 0:
        none = x.new_empty(0, dtype=losses.statistics_dtype(x.dtype))
        entropies = none.clone() if entropy else empty
        return none, none.clone(), entropies, empty.long(), none.clone(), none.clone()
    with launching_on(x.device):
        if check_targets or x.device.type == "cpu":
            check_target_range(target, weight.shape[0], ignore_index)
        inputs = prepare(x, weight, target, bias, class_weight)
        problem = problem_of(inputs, loss, wanted, accumulate, per_token=True)

        def work(chosen: Config) -> Statistics:
            return strategies.get(chosen.strategy).evaluate(inputs, loss, wanted, chosen)

        statistics = selection.run(
            problem, describe_device(x.device), workspace_limit, config, work
        )
        return (
            losses.row_losses(inputs, statistics, loss),
            statistics.lse,
            empty if statistics.mean_logit is None else statistics.lse - statistics.mean_logit,
            empty.long() if statistics.prediction is None else statistics.prediction,
            statistics.lse_low,
            statistics.target_logit.masked_fill((target < 0) | (target >= len(weight)), 0.0),
        )


row_loss = torch.library.custom_op("flce_tune::row_loss", compute, mutates_args=())


@row_loss.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    softcap: float | None,
    logit_scale: float | None,
    z_loss: float,
    entropy: bool,
    prediction: bool,
    check_targets: bool,
    accumulate: str,
    workspace_limit: int | None,
    config: str,
    grad_weight_out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    row = x.new_empty(x.shape[0], dtype=losses.statistics_dtype(x.dtype))
    return (
        row,
        torch.empty_like(row),
        torch.empty_like(row) if entropy else x.new_empty(0),
        row.new_empty(x.shape[0] if prediction else 0, dtype=torch.int64),
        torch.empty_like(row),
        torch.empty_like(row),
    )


def compute_backward(
    grad_loss: Tensor | None,  # [N]
    grad_lse: Tensor | None,  # [N]
    grad_entropy: Tensor | None,  # [N]
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    lse: Tensor,
    entropy: Tensor,
    lse_low: Tensor,
    target_logit: Tensor,
    ignore_index: int,
    label_smoothing: float,
    softcap: float | None,
    logit_scale: float | None,
    z_loss: float,
    need_dx: bool,
    need_dw: bool,
    need_db: bool,
    accumulate: str,
    workspace_limit: int | None,
    config: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dX, dW, db in the compute dtype; empty where not needed."""
    loss = LossSpec(ignore_index, label_smoothing, softcap, logit_scale, z_loss)
    wanted = Wanted(need_dx, need_dw, need_db)
    if len(x) == 0:
        return (
            x.new_zeros(x.shape) if need_dx else x.new_empty(0),
            weight.new_zeros(weight.shape) if need_dw else x.new_empty(0),
            weight.new_zeros(weight.shape[0]) if need_db else x.new_empty(0),
        )
    with launching_on(x.device):
        inputs = prepare(x, weight, target, bias, class_weight)
        row_weight = losses.upstream_weights(target, lse, grad_loss, ignore_index)
        statistics = Statistics(
            lse=lse,
            lse_low=lse_low,
            target_logit=target_logit,
            mean_logit=None if grad_entropy is None else lse - entropy,
        )
        given = backend_of(x).coefficients(
            inputs, statistics, row_weight, loss, grad_lse, grad_entropy
        )
        problem = problem_of(inputs, loss, wanted, accumulate, per_token=True)

        def work(chosen: Config) -> Gradients:
            strategy = strategies.get(chosen.strategy)
            return strategy.backward(inputs, statistics, given, loss, wanted, chosen)

        gradients = selection.run(problem, describe_device(x.device), workspace_limit, config, work)
        dx, dw, db = (
            x.new_empty(0) if gradient is None else gradient.to(x.dtype)
            for gradient in (gradients.dx, gradients.dw, gradients.db)
        )
        return dx, dw, db


row_loss_backward = torch.library.custom_op(
    "flce_tune::row_loss_backward", compute_backward, mutates_args=()
)


@row_loss_backward.register_fake
def _(
    grad_loss: Tensor | None,
    grad_lse: Tensor | None,
    grad_entropy: Tensor | None,
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    lse: Tensor,
    entropy: Tensor,
    lse_low: Tensor,
    target_logit: Tensor,
    ignore_index: int,
    label_smoothing: float,
    softcap: float | None,
    logit_scale: float | None,
    z_loss: float,
    need_dx: bool,
    need_dw: bool,
    need_db: bool,
    accumulate: str,
    workspace_limit: int | None,
    config: str,
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        x.new_empty(x.shape) if need_dx else x.new_empty(0),
        x.new_empty(weight.shape) if need_dw else x.new_empty(0),
        x.new_empty(weight.shape[0]) if need_db else x.new_empty(0),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.mark_non_differentiable(*output[3:])
    ctx.save_for_backward(*inputs[:5], *output[1:3], *output[4:])
    ctx.options = (*inputs[5:10], *inputs[13:16])
    ctx.grad_weight_out = inputs[16]  # not saved: other backwards may have added to it since


def _backward(
    ctx: Any,
    grad_loss: Tensor | None,
    grad_lse: Tensor | None,
    grad_entropy: Tensor | None,
    *_: Any,
) -> tuple[Tensor | None, ...]:
    x, weight, target, bias, class_weight, lse, entropy, *rest = ctx.saved_tensors
    needs = tuple(ctx.needs_input_grad[i] for i in (0, 1, 3))
    *scalars, accumulate, workspace_limit, config = ctx.options
    if entropy.numel() == 0:
        grad_entropy = None
    plain = direct(x, weight) and not torch.is_grad_enabled()
    run: Any = compute_backward if plain else row_loss_backward
    gradients = run(
        grad_loss, grad_lse, grad_entropy, x, weight, target, bias, class_weight, lse, entropy,
        *rest, *scalars, *needs, accumulate, workspace_limit, config,
    )  # fmt: skip
    dx, dw, db = (g if need else None for g, need in zip(gradients, needs, strict=True))
    if dw is not None and ctx.grad_weight_out is not None:
        with torch.no_grad():
            ctx.grad_weight_out.add_(dw)
        dw = None
    return (dx, dw, None, db, *(None,) * 13)


row_loss.register_autograd(_backward, setup_context=_setup_context)
eager_row_loss = eager_twin(compute, _setup_context, _backward, results=4)
