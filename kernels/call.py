"""One checked call of the op, flattened to [N, D]: which custom op runs, and what comes back."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from flce_tune.kernels.arguments import compute_dtype, direct
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


@dataclass(frozen=True, slots=True)
class Call:
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
        run: Callable[..., Any] = EagerFusedLoss.apply if direct(x, weight) else fused_loss
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
        plain = direct(*tensors[:2])
        run: Callable[..., Any] = EagerRowLoss.apply if plain else row_loss
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
