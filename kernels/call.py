"""One checked call of the op, flattened to [N, D]: which custom op runs, and what comes back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from flce_tune.kernels.arguments import compute_dtype, direct
from flce_tune.kernels.config import Config
from flce_tune.kernels.counted import CountedRows
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
    kept: CountedRows | None = None  # the rows to compute; None: all of them

    def _taken(self, per_row: Tensor) -> Tensor:
        return per_row if self.kept is None else self.kept.take(per_row)

    def _tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
        dtype = compute_dtype(self.x, self.weight)
        return (
            self._taken(self.x).to(dtype),
            self.weight.to(dtype),
            self._taken(self.reduction.target).to(torch.int64),
            None if self.bias is None else self.bias.to(dtype),
            self.reduction.class_weight,
        )

    def _choice(self) -> tuple[str, int | None, str]:
        explicit = "" if self.config is None else self.config.to_json()
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
        token_weight = None if asked.token_weight is None else self._taken(asked.token_weight)
        run: Callable[..., Any] = eager_fused_loss if direct(x, weight) else fused_loss
        value, *statistics = run(
            x, weight, target, bias, class_weight, token_weight,
            asked.given_divisor(statistics_dtype(x.dtype)), *asked.scalars(), asked.kind, *needs,
            *asked.statistics(), self.check_targets, *self._choice(), self.grad_weight_out,
        )  # fmt: skip
        if self.kept is not None:
            value = self.kept.poisoned(value)
        if not asked.outputs:
            return cast(Tensor, value)
        return asked.collect(value, *self._spread(statistics[:4]))

    def _spread(self, statistics: Sequence[Tensor]) -> Sequence[Tensor]:
        return statistics if self.kept is None else [self.kept.spread(s) for s in statistics]

    def rows(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Differentiable token_loss and lse; entropy (differentiable) and prediction, or empty."""
        tensors = self._tensors()
        plain = direct(*tensors[:2])
        run: Callable[..., Any] = eager_row_loss if plain else row_loss
        result = run(
            *tensors, *self.reduction.scalars(), *self.reduction.statistics(),
            self.check_targets, *self._choice(), self.grad_weight_out,
        )  # fmt: skip
        token_loss, lse, entropy, prediction = self._spread(result[:4])
        return token_loss, lse, entropy, prediction

    def per_row(self, *, return_lse: bool) -> Tensor | tuple[Tensor, Tensor] | LossOutputs:
        """Loss whose upstream gradient may differ by token."""
        return self.reduction.of_rows(*self.rows(), return_lse=return_lse)
