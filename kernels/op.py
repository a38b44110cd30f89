"""The public op: ``linear_cross_entropy``, its module twin, and per-token log-probabilities."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from flce_tune.kernels.arguments import (
    check_loss,
    check_tensors,
    compute_dtype,
    direct,
)
from flce_tune.kernels.config import Config
from flce_tune.kernels.fused import EagerFusedLoss, fused_loss
from flce_tune.kernels.loss import statistics_dtype
from flce_tune.kernels.per_row import EagerRowLoss, row_loss
from flce_tune.kernels.problem import Accumulate
from flce_tune.kernels.values import LossSpec


@dataclass(frozen=True, slots=True)
class LossOutputs:
    """A loss and the statistics asked for beside it; the others are None.

    All but ``loss`` are for looking at: they carry no gradient. Those per token have target's
    shape; ignored tokens hold 0 in ``token_loss`` and ``z_loss``.
    """

    loss: Tensor  # [], or target's shape for reduction="none"
    lse: Tensor | None = None  # log-sum-exp of the logits
    token_loss: Tensor | None = None  # unreduced, unweighted by token_weight
    entropy: Tensor | None = None  # of softmax(logits), in nats
    prediction: Tensor | None = None  # int64, the most likely token, the first of equals
    accuracy: Tensor | None = None  # [], share of counted tokens predicted right
    z_loss: Tensor | None = None  # z_loss·lse², the part already contained in the loss


def linear_cross_entropy(
    x: Tensor,  # [..., D]
    weight: Tensor,  # [V, D]
    target: Tensor,  # [...] int64
    *,
    bias: Tensor | None = None,  # [V]
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    logit_scale: float | None = None,
    z_loss: float = 0.0,
    class_weight: Tensor | None = None,  # [V]
    token_weight: Tensor | None = None,  # [...], like target
    divisor: Tensor | float | None = None,
    shift: bool = False,
    outputs: Sequence[str] = (),
    return_lse: bool = False,
    check_targets: bool = False,
    accumulate: Accumulate = "fp32",
    workspace_limit: int | None = None,
    config: Config | None = None,
) -> Tensor | tuple[Tensor, Tensor] | LossOutputs:
    """``F.cross_entropy(F.linear(x, weight, bias), target)`` without storing the logits.

    Semantics are ``torch.nn.functional.cross_entropy``'s wherever that defines them; formulas of
    the rest are in docs/loss.md. Inputs may have any strides and are never written. Under
    autocast the GEMMs run in its dtype; outside it, mixed dtypes are promoted. Deterministic
    with every strategy but ``atomic``.

    Args:
        x: hidden states, any number of leading dimensions; bfloat16, float16, float32, float64.
        weight: the head's weight, laid out as in ``nn.Linear``.
        target: labels in [0, V), or ``ignore_index``. Others: IndexError on a CPU or with
            ``check_targets``; on a GPU NaN loss and gradients, without a synchronisation.
        bias: added to the logits; computed in the GEMMs' dtype.
        ignore_index: label of tokens that do not count: no loss, zero gradients.
        reduction: "mean" (over counted tokens, weighted as torch does), "sum" or "none".
        label_smoothing: ε in [0, 1], over counted tokens only.
        softcap: logits become cap·tanh(logits / cap).
        logit_scale: factor on the logits (1 / temperature), before the cap.
        z_loss: λ of the term λ·lse² added to each token's loss.
        class_weight: weight of each class, as torch's ``weight``; must not require grad.
        token_weight: weight of each token. mean divides by Σ token_weight·class_weight[target].
        divisor: what "mean" divides by instead, e.g. the number of tokens of all micro-batches.
        shift: x [..., T, D] at position t predicts target [..., T] at t + 1; x is not copied.
        outputs: statistics to return beside the loss, see LossOutputs; no extra pass.
        return_lse: return (loss, lse) with an lse that can be differentiated.
        check_targets: look for labels out of range; costs a synchronisation on a GPU.
        accumulate: "fp32", or "weight_dtype" to keep dW between chunks in the weight's dtype:
            less memory and time, errors that grow with the number of chunks.
        workspace_limit: bytes the op may hold beyond its inputs and gradients; the smallest
            config is used when nothing fits.
        config: run exactly this config instead of asking the dispatcher.

    Returns:
        The loss, float32 (float64 for float64 inputs): a scalar, or target's shape for "none".
        (loss, lse) with ``return_lse``; LossOutputs when ``outputs`` names any.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: a shape, device, option or combination that is not accepted.
        TargetOutOfRangeError: (an IndexError) see ``target``.
        InvalidConfigError: ``config`` cannot run on this problem and device.
    """
    loss = LossSpec(ignore_index, float(label_smoothing), softcap, logit_scale, float(z_loss))
    check_tensors(x, weight, target, bias, class_weight, token_weight)
    check_loss(loss, reduction, accumulate, outputs)
    if return_lse and outputs:
        raise ValueError("return_lse and outputs exclude each other: the first is differentiable")
    if divisor is not None and reduction != "mean":
        raise ValueError(f'divisor goes with reduction="mean", got {reduction!r}')
    if shift:
        target, token_weight = _shifted(x, target, token_weight, ignore_index)
    shape = target.shape
    call = _Call(
        x.reshape(-1, x.shape[-1]), weight, target.reshape(-1), bias, class_weight,
        None if token_weight is None else token_weight.reshape(-1),
        loss, tuple(outputs), check_targets, accumulate, workspace_limit, config,
    )  # fmt: skip
    differentiable_rows = reduction == "none" or return_lse
    if token_weight is not None and token_weight.requires_grad:
        differentiable_rows = True
    if not differentiable_rows:
        return call.reduced(reduction, divisor, shape, drop_last=shift)
    return call.per_row(reduction, divisor, shape, return_lse=return_lse, drop_last=shift)


def linear_logprobs(
    x: Tensor,  # [..., D]
    weight: Tensor,  # [V, D]
    target: Tensor,  # [...] int64
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    entropy: bool = True,
    accumulate: Accumulate = "fp32",
    workspace_limit: int | None = None,
    config: Config | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Log-probability of each label, and entropy of each distribution, both differentiable.

    What policy-gradient and distillation code computes from full logits, without the logits:
    log softmax(x·Wᵀ / temperature)[target].

    Args:
        x, weight, target, bias, softcap, accumulate, workspace_limit, config: as in
            ``linear_cross_entropy``.
        temperature: divides the logits; positive.
        ignore_index: labels whose log-probability is 0 without a gradient.
        entropy: whether to return the entropy, in nats; ignored tokens have one too.

    Returns:
        (logprobs, entropy or None), float32, of target's shape.

    Raises:
        TypeError, ValueError, TargetOutOfRangeError: as ``linear_cross_entropy``.
    """
    if not temperature > 0.0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    loss = LossSpec(ignore_index, softcap=softcap, logit_scale=1.0 / temperature)
    check_tensors(x, weight, target, bias, None, None)
    check_loss(loss, "none", accumulate, ())
    call = _Call(
        x.reshape(-1, x.shape[-1]), weight, target.reshape(-1), bias, None, None,
        loss, ("entropy",) if entropy else (), False, accumulate, workspace_limit, config,
    )  # fmt: skip
    rows, _, entropies, _ = call.rows()
    return -rows.view(target.shape), entropies.view(target.shape) if entropy else None


def _shifted(
    x: Tensor, target: Tensor, token_weight: Tensor | None, ignore_index: int
) -> tuple[Tensor, Tensor | None]:
    """Move labels one position left; the last position counts no more."""
    if x.dim() < 2:
        raise ValueError(f"shift needs x [..., T, D], got {tuple(x.shape)}")
    moved = torch.full_like(target, ignore_index)
    moved[..., :-1] = target[..., 1:]
    if token_weight is not None:
        last = torch.zeros_like(token_weight[..., :1])
        token_weight = torch.cat((token_weight[..., 1:], last), dim=-1)
    return moved, token_weight


@dataclass(frozen=True, slots=True)
class _Call:
    """One checked call, flattened to [N, D]."""

    x: Tensor
    weight: Tensor
    target: Tensor
    bias: Tensor | None
    class_weight: Tensor | None
    token_weight: Tensor | None
    loss: LossSpec
    outputs: tuple[str, ...]
    check_targets: bool
    accumulate: Accumulate
    workspace_limit: int | None
    config: Config | None

    def _tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
        dtype = compute_dtype(self.x, self.weight)
        return (
            self.x.to(dtype),
            self.weight.to(dtype),
            self.target.to(torch.int64),
            None if self.bias is None else self.bias.to(dtype),
            self.class_weight,
        )

    def _scalars(self) -> tuple[int, float, float | None, float | None, float]:
        loss = self.loss
        scale = None if loss.logit_scale is None else float(loss.logit_scale)
        cap = None if loss.softcap is None else float(loss.softcap)
        return loss.ignore_index, loss.label_smoothing, cap, scale, loss.z_loss

    def _choice(self) -> tuple[str, int | None, str]:
        explicit = "" if self.config is None else json.dumps(self.config.to_dict())
        return self.accumulate, self.workspace_limit, explicit

    def _statistics(self) -> tuple[bool, bool]:
        return "entropy" in self.outputs, bool({"prediction", "accuracy"} & set(self.outputs))

    def reduced(
        self, reduction: str, divisor: Tensor | float | None, shape: torch.Size, *, drop_last: bool
    ) -> Tensor | LossOutputs:
        """Scalar loss with gradients computed at once."""
        x, weight, target, bias, class_weight = self._tensors()
        grad = torch.is_grad_enabled()
        needs = (
            grad and x.requires_grad,
            grad and weight.requires_grad,
            grad and bias is not None and bias.requires_grad,
        )
        run = EagerFusedLoss.apply if direct(x, weight) else fused_loss
        value, rows, lse, entropy, prediction, *_ = run(
            x, weight, target, bias, class_weight, self.token_weight, self._divisor(divisor),
            *self._scalars(), reduction, *needs, *self._statistics(), self.check_targets,
            *self._choice(),
        )  # fmt: skip
        if not self.outputs:
            return cast(Tensor, value)
        return self._collect(value, rows, lse, entropy, prediction, shape, drop_last=drop_last)

    def rows(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Differentiable token_loss and lse; entropy (differentiable) and prediction, or empty."""
        tensors = self._tensors()
        run = EagerRowLoss.apply if direct(*tensors[:2]) else row_loss
        result = run(
            *tensors, *self._scalars(), *self._statistics(), self.check_targets,
            *self._choice(),
        )  # fmt: skip
        return cast("tuple[Tensor, Tensor, Tensor, Tensor]", result[:4])

    def per_row(
        self,
        reduction: str,
        divisor: Tensor | float | None,
        shape: torch.Size,
        *,
        return_lse: bool,
        drop_last: bool,
    ) -> Tensor | tuple[Tensor, Tensor] | LossOutputs:
        """Loss whose upstream gradient may differ by token."""
        rows, lse, entropy, prediction = self.rows()
        weighted = rows
        if (weight := self._counted_weight(rows.dtype)) is not None:
            weighted = rows * weight
        value = weighted.view(shape)
        if reduction == "none":
            value = value[..., :-1] if drop_last else value
        else:
            value = weighted.sum()
            if reduction == "mean":
                value = value / self._mean_divisor(divisor, rows)
        if return_lse:
            lse = lse.view(shape)
            return value, lse[..., :-1] if drop_last else lse
        if not self.outputs:
            return value
        return self._collect(value, rows, lse, entropy, prediction, shape, drop_last=drop_last)

    def _divisor(self, divisor: Tensor | float | None) -> Tensor | None:
        if divisor is None:
            return None
        dtype = statistics_dtype(self.x.dtype)
        if isinstance(divisor, Tensor):
            if divisor.numel() != 1:
                raise ValueError(f"divisor must be one number, got shape {tuple(divisor.shape)}")
            return divisor.detach().reshape(()).to(self.x.device, dtype, non_blocking=True)
        return torch.full((), float(divisor), dtype=dtype, device=self.x.device)

    def _counted_weight(self, dtype: torch.dtype) -> Tensor | None:
        """Token weights, 0 for ignored tokens whatever is given for them."""
        if self.token_weight is None:
            return None
        counted = self.target != self.loss.ignore_index
        return torch.where(counted, self.token_weight.to(dtype), 0.0)

    def _mean_divisor(self, divisor: Tensor | float | None, rows: Tensor) -> Tensor:
        if (given := self._divisor(divisor)) is not None:
            return given
        weight = self._counted_weight(rows.dtype)
        if weight is None:
            weight = (self.target != self.loss.ignore_index).to(rows.dtype)
        if self.class_weight is not None:
            known = self.target.clamp(0, len(self.class_weight) - 1)
            weight = weight * self.class_weight[known].to(rows.dtype)
        return weight.sum()

    def _collect(
        self,
        value: Tensor,
        rows: Tensor,
        lse: Tensor,
        entropy: Tensor,
        prediction: Tensor,
        shape: torch.Size,
        *,
        drop_last: bool,
    ) -> LossOutputs:
        counted = self.target != self.loss.ignore_index

        def per_token(name: str, tensor: Tensor) -> Tensor | None:
            if name not in self.outputs:
                return None
            tensor = tensor.detach().view(shape)
            return tensor[..., :-1] if drop_last else tensor

        accuracy = None
        if "accuracy" in self.outputs:
            hits = ((prediction == self.target) & counted).sum()
            accuracy = hits / counted.sum()
        return LossOutputs(
            loss=value,
            lse=per_token("lse", lse),
            token_loss=per_token("token_loss", rows),
            entropy=per_token("entropy", entropy),
            prediction=per_token("prediction", prediction),
            accuracy=accuracy,
            z_loss=per_token("z_loss", (self.loss.z_loss * lse.square()).masked_fill(~counted, 0)),
        )


class LinearCrossEntropy(nn.Module):
    """``linear_cross_entropy`` as a module without parameters: the options, held.

    Takes the keyword options of ``linear_cross_entropy`` that are not tensors of one batch;
    ``class_weight`` becomes a buffer. Call it with x, weight, target and, per batch, ``bias``,
    ``token_weight`` and ``divisor``.
    """

    class_weight: Tensor | None

    def __init__(
        self,
        *,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        softcap: float | None = None,
        logit_scale: float | None = None,
        z_loss: float = 0.0,
        class_weight: Tensor | None = None,
        shift: bool = False,
        outputs: Sequence[str] = (),
        return_lse: bool = False,
        check_targets: bool = False,
        accumulate: Accumulate = "fp32",
        workspace_limit: int | None = None,
        config: Config | None = None,
    ) -> None:
        super().__init__()
        loss = LossSpec(ignore_index, label_smoothing, softcap, logit_scale, z_loss)
        check_loss(loss, reduction, accumulate, outputs)
        self.register_buffer("class_weight", class_weight, persistent=False)
        self.options: dict[str, Any] = {
            "ignore_index": ignore_index,
            "reduction": reduction,
            "label_smoothing": label_smoothing,
            "softcap": softcap,
            "logit_scale": logit_scale,
            "z_loss": z_loss,
            "shift": shift,
            "outputs": tuple(outputs),
            "return_lse": return_lse,
            "check_targets": check_targets,
            "accumulate": accumulate,
            "workspace_limit": workspace_limit,
            "config": config,
        }

    def forward(
        self,
        x: Tensor,  # [..., D]
        weight: Tensor,  # [V, D]
        target: Tensor,  # [...]
        *,
        bias: Tensor | None = None,
        token_weight: Tensor | None = None,
        divisor: Tensor | float | None = None,
    ) -> Tensor | tuple[Tensor, Tensor] | LossOutputs:
        """Compute the loss; see ``linear_cross_entropy``."""
        return linear_cross_entropy(
            x, weight, target, bias=bias, token_weight=token_weight, divisor=divisor,
            class_weight=self.class_weight, **self.options,
        )  # fmt: skip

    def extra_repr(self) -> str:
        """Show the options that differ from a plain mean."""
        return ", ".join(
            f"{name}={value!r}"
            for name, value in self.options.items()
            if value not in (None, False, ())
        )
