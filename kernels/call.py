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
from flce_tune.kernels.fused import eager_fused_loss, fused_loss
from flce_tune.kernels.loss import statistics_dtype
from flce_tune.kernels.per_row import eager_row_loss, row_loss
from flce_tune.kernels.problem import Accumulate
from flce_tune.kernels.reduction import LossOutputs, Reduction


@dataclass(frozen=True, slots=True)
class Call:
    """One checked call, flattened to [N, D]."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    reduction: Reduction
    check_targets: bool
    accumulate: Accumulate
    workspace_limit: int | None
    config: Config | None
    grad_weight_out: Tensor | None = None

    def _tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
        dtype = compute_dtype(self.x, self.weight)
        return (
            self.x.to(dtype),
            self.weight.to(dtype),
            self.reduction.target.to(torch.int64),
            None if self.bias is None else self.bias.to(dtype),
            self.reduction.class_weight,
        )

    def _choice(self) -> tuple[str, int | None, str]:
        explicit = "" if self.config is None else json.dumps(self.config.to_dict())
        return self.accumulate, self.workspace_limit, explicit

    def reduced(self) -> Tensor | LossOutputs:
        """Scalar loss with gradients computed at once."""
        x, weight, target, bias, class_weight = self._tensors()
        asked = self.reduction
        grad = torch.is_grad_enabled()
        needs = (
            grad and x.requires_grad,
            grad and weight.requires_grad,
            grad and bias is not None and bias.requires_grad,
        )
        run: Callable[..., Any] = eager_fused_loss if direct(x, weight) else fused_loss
        value, rows, lse, entropy, prediction, *_ = run(
            x, weight, target, bias, class_weight, asked.token_weight,
            asked.given_divisor(statistics_dtype(x.dtype)), *asked.scalars(), asked.kind, *needs,
            *asked.statistics(), self.check_targets, *self._choice(), self.grad_weight_out,
        )  # fmt: skip
        if not asked.outputs:
            return cast(Tensor, value)
        return asked.collect(value, rows, lse, entropy, prediction)

    def rows(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Differentiable token_loss and lse; entropy (differentiable) and prediction, or empty."""
        tensors = self._tensors()
        plain = direct(*tensors[:2])
        run: Callable[..., Any] = eager_row_loss if plain else row_loss
        result = run(
            *tensors, *self.reduction.scalars(), *self.reduction.statistics(),
            self.check_targets, *self._choice(), self.grad_weight_out,
        )  # fmt: skip
        return cast("tuple[Tensor, Tensor, Tensor, Tensor]", result[:4])

    def per_row(self, *, return_lse: bool) -> Tensor | tuple[Tensor, Tensor] | LossOutputs:
        """Loss whose upstream gradient may differ by token."""
        return self.reduction.of_rows(*self.rows(), return_lse=return_lse)
