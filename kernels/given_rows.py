"""The op on given logits, as a pair of ``torch.library`` custom ops: one loss per token.

Forward reads the logits once and keeps them with their row statistics; backward reads them once
more and writes their gradient, with row coefficients that hold whatever upstream gradient arrives.
So every reduction is a sum over [N] afterwards. Bytes: one read, then one read and one write.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from flce_tune.kernels import loss as losses
from flce_tune.kernels.arguments import (
    check_target_range,
    direct,
    launching_on,
    prepare_logits,
)
from flce_tune.kernels.backends import backend_of, even_parts, has_kernels
from flce_tune.kernels.scaling import graph_is_kept
from flce_tune.kernels.strategies.common import coefficient_rows, concatenate
from flce_tune.kernels.values import Coefficients, GivenLogits, LossSpec, Statistics, Wanted

PLAIN_BYTES = 48 << 20
"""Budget of plain torch's image of the logits in the statistics' dtype."""


def compute(
    logits: Tensor,  # [N, V]
    target: Tensor,  # [N]
    class_weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    softcap: float | None,
    logit_scale: float | None,
    z_loss: float,
    entropy: bool,
    prediction: bool,
    check_targets: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return token_loss, lse, entropy, prediction, lse_low, target_logit.

    Each is [N]; entropy and prediction are empty if not wanted.
    """
    loss = LossSpec(ignore_index, label_smoothing, softcap, logit_scale, z_loss)
    wanted = Wanted(entropy=entropy, prediction=prediction)
    empty = logits.new_empty(0, dtype=losses.statistics_dtype(logits.dtype))
    if len(logits) == 0:
        lse, entropies, lse_low, target_logit = (empty.clone() for _ in range(4))
        return empty, lse, entropies, empty.long(), lse_low, target_logit
    with launching_on(logits.device):
        if check_targets or logits.device.type == "cpu":
            check_target_range(target, logits.shape[1], ignore_index)
        given = prepare_logits(logits, target, class_weight)
        statistics = row_statistics(given, loss, wanted)
        return (
            *losses.per_token(losses.row_losses(given, statistics, loss), statistics),
            statistics.lse_low,
            statistics.target_logit.masked_fill((target < 0) | (target >= given.vocab), 0.0),
        )


def row_statistics(given: GivenLogits, loss: LossSpec, wanted: Wanted) -> Statistics:
    """Statistics of all rows, in one read."""
    backend = backend_of(given.raw)
    parts = [given.rows(rows) for rows in row_steps(given.raw)]
    return concatenate([backend.statistics(p.raw, p, loss, wanted) for p in parts])


def row_steps(logits: Tensor) -> Iterator[slice]:
    """Rows to work on at a time: all, or few where plain torch holds an image of them."""
    n, vocab = logits.shape
    if has_kernels(logits):
        return iter((slice(0, n),))
    itemsize = losses.statistics_dtype(logits.dtype).itemsize
    return even_parts(n, min(n, max(1, PLAIN_BYTES // (itemsize * vocab))))


given_row_loss = torch.library.custom_op("flce_tune::given_row_loss", compute, mutates_args=())


@given_row_loss.register_fake
def _(
    logits: Tensor,
    target: Tensor,
    class_weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    softcap: float | None,
    logit_scale: float | None,
    z_loss: float,
    entropy: bool,
    prediction: bool,
    check_targets: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    row = logits.new_empty(logits.shape[0], dtype=losses.statistics_dtype(logits.dtype))
    return (
        row,
        torch.empty_like(row),
        torch.empty_like(row) if entropy else row.new_empty(0),
        row.new_empty(logits.shape[0] if prediction else 0, dtype=torch.int64),
        torch.empty_like(row),
        torch.empty_like(row),
    )


def compute_backward(
    grad_loss: Tensor | None,  # [N]
    grad_lse: Tensor | None,  # [N]
    logits: Tensor,
    target: Tensor,
    class_weight: Tensor | None,
    lse: Tensor,
    lse_low: Tensor,
    target_logit: Tensor,
    ignore_index: int,
    label_smoothing: float,
    softcap: float | None,
    logit_scale: float | None,
    z_loss: float,
) -> Tensor:
    """Return the gradient of the logits, [N, V] in their dtype."""
    out = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    loss = LossSpec(ignore_index, label_smoothing, softcap, logit_scale, z_loss)
    statistics = Statistics(lse, lse_low, target_logit)
    given = prepare_logits(logits, target, class_weight)
    row_weight = losses.upstream_weights(target, lse, grad_loss, ignore_index)
    write_gradient(given, statistics, row_weight, loss, out, grad_lse=grad_lse)
    return out


def write_gradient(
    given: GivenLogits,
    statistics: Statistics,
    row_weight: Tensor,  # [N]
    loss: LossSpec,
    out: Tensor,  # [N, V]; may be the logits themselves
    *,
    grad_lse: Tensor | None = None,  # [N]
    upstream: Tensor | None = None,  # scalar that multiplies the weights
) -> None:
    """Write the gradient of the logits, in one read and one write."""
    if len(out) == 0:
        return
    with launching_on(out.device):
        coefficients = backend_of(out).coefficients(
            given, statistics, row_weight, loss, grad_lse, upstream=upstream
        )
        write_rows(given, statistics, coefficients, loss, out)


def write_rows(
    given: GivenLogits,
    statistics: Statistics,
    coefficients: Coefficients,
    loss: LossSpec,
    out: Tensor,  # [N, V]; may be the logits themselves
) -> None:
    """Write the gradient that follows from given coefficients."""
    for rows in row_steps(given.raw):
        part = given.rows(rows)
        stats = Statistics(
            statistics.lse[rows], statistics.lse_low[rows], statistics.target_logit[rows]
        )
        backend_of(out).gradient(
            part.raw, part, stats, coefficient_rows(coefficients, rows), loss, out[rows]
        )


given_row_loss_backward = torch.library.custom_op(
    "flce_tune::given_row_loss_backward", compute_backward, mutates_args=()
)


@given_row_loss_backward.register_fake
def _(
    grad_loss: Tensor | None,
    grad_lse: Tensor | None,
    logits: Tensor,
    target: Tensor,
    class_weight: Tensor | None,
    lse: Tensor,
    lse_low: Tensor,
    target_logit: Tensor,
    ignore_index: int,
    label_smoothing: float,
    softcap: float | None,
    logit_scale: float | None,
    z_loss: float,
) -> Tensor:
    return torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.mark_non_differentiable(*output[2:])
    ctx.save_for_backward(*inputs[:3], output[1], *output[4:])
    ctx.scalars = inputs[3:8]


def _backward(
    ctx: Any, grad_loss: Tensor | None, grad_lse: Tensor | None, *_: Any
) -> tuple[Tensor | None, ...]:
    logits, *saved = ctx.saved_tensors
    plain = direct(logits) and not torch.is_grad_enabled()
    run: Any = compute_backward if plain else given_row_loss_backward
    gradient = run(grad_loss, grad_lse, logits, *saved, *ctx.scalars)
    return (gradient, *(None,) * 10)


given_row_loss.register_autograd(_backward, setup_context=_setup_context)


class EagerGivenRowLoss(torch.autograd.Function):
    """``given_row_loss`` without the custom op's bookkeeping, and with a gradient in place."""

    @staticmethod
    def forward(ctx: Any, in_place: bool, *arguments: Any) -> tuple[Tensor, ...]:
        """Compute, and keep what backward needs; arguments and results are the custom op's."""
        output = compute(*arguments)
        ctx.set_materialize_grads(False)
        _setup_context(ctx, arguments, output)
        ctx.in_place = in_place and not saved_tensors_are_packed()
        return output

    @staticmethod
    def backward(
        ctx: Any, grad_loss: Tensor | None, grad_lse: Tensor | None, *rest: Any
    ) -> tuple[Tensor | None, ...]:
        """Turn the logits into their gradient, over themselves where nobody reads them again."""
        if not may_overwrite(ctx):
            return (None, *_backward(ctx, grad_loss, grad_lse, *rest))
        logits, target, class_weight, *saved = ctx.saved_tensors
        out, statistics, loss = logits.detach(), Statistics(*saved), LossSpec(*ctx.scalars)
        given = prepare_logits(out, target, class_weight)
        row_weight = losses.upstream_weights(target, statistics.lse, grad_loss, loss.ignore_index)
        write_gradient(given, statistics, row_weight, loss, out, grad_lse=grad_lse)
        torch.autograd.graph.increment_version(out)  # others that saved the logits must notice
        return (None, out, *(None,) * 10)


def may_overwrite(ctx: Any) -> bool:
    """Whether a backward may write the gradient over the logits that were saved for it."""
    return ctx.in_place and not torch.is_grad_enabled() and not graph_is_kept()


def saved_tensors_are_packed() -> bool:
    """Whether hooks replace what autograd saves; it does not watch the versions of those then."""
    probe = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return True if probe is None else probe(False) is not None
