"""From losses per token to what a call asked for: reductions, and the statistics beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

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
class Reduction:
    """What is wanted of the tokens' losses."""

    kind: str  # "mean", "sum", "none"
    divisor: Tensor | float | None  # of the mean; None: its own
    target: Tensor  # [N]
    class_weight: Tensor | None  # [V]
    token_weight: Tensor | None  # [N]
    loss: LossSpec
    outputs: tuple[str, ...]
    shape: torch.Size  # of target as given
    drop_last: bool  # leave out the last position of results per token

    @classmethod
    def of_call(
        cls,
        states: Tensor,  # [..., D] or [..., V]
        target: Tensor,  # [...]
        class_weight: Tensor | None,
        token_weight: Tensor | None,
        loss: LossSpec,
        kind: str,
        divisor: Tensor | float | None,
        outputs: Sequence[str],
        *,
        return_lse: bool,
        shift: bool,
    ) -> Reduction:
        """Check how the options combine, shift the labels, flatten to [N].

        Raises:
            ValueError: options that exclude each other.
        """
        if return_lse and outputs:
            raise ValueError(
                "return_lse and outputs exclude each other: the first is differentiable"
            )
        if divisor is not None and kind != "mean":
            raise ValueError(f'divisor goes with reduction="mean", got {kind!r}')
        if shift:
            target, token_weight = _shifted(states, target, token_weight, loss.ignore_index)
        return cls(
            kind, divisor, target.reshape(-1), class_weight,
            None if token_weight is None else token_weight.reshape(-1),
            loss, tuple(outputs), target.shape, shift,
        )  # fmt: skip

    def scalars(self) -> tuple[int, float, float | None, float | None, float]:
        """The loss's scalars as a custom op takes them."""
        loss = self.loss
        scale = None if loss.logit_scale is None else float(loss.logit_scale)
        cap = None if loss.softcap is None else float(loss.softcap)
        return loss.ignore_index, loss.label_smoothing, cap, scale, loss.z_loss

    def statistics(self) -> tuple[bool, bool]:
        """Whether entropy and prediction are wanted."""
        return "entropy" in self.outputs, bool({"prediction", "accuracy"} & set(self.outputs))

    def given_divisor(self, dtype: torch.dtype) -> Tensor | None:
        """The caller's divisor as a scalar on the target's device, without waiting for it."""
        if self.divisor is None:
            return None
        device = self.target.device
        if isinstance(self.divisor, Tensor):
            if self.divisor.numel() != 1:
                shape = tuple(self.divisor.shape)
                raise ValueError(f"divisor must be one number, got shape {shape}")
            return self.divisor.detach().reshape(()).to(device, dtype, non_blocking=True)
        return torch.full((), float(self.divisor), dtype=dtype, device=device)

    def of_rows(
        self,
        rows: Tensor,  # [N], like the others
        lse: Tensor,
        entropy: Tensor,
        prediction: Tensor,
        *,
        return_lse: bool,
    ) -> Tensor | tuple[Tensor, Tensor] | LossOutputs:
        """Reduce losses per token, differentiably."""
        weighted = rows
        if (weight := self._counted_weight(rows.dtype)) is not None:
            weighted = rows * weight
        if self.kind == "none":
            value = self._per_token(weighted)
        else:
            value = weighted.sum()
            if self.kind == "mean":
                value = value / self._mean_divisor(rows.dtype)
        if return_lse:
            return value, self._per_token(lse)
        if not self.outputs:
            return value
        return self.collect(value, rows, lse, entropy, prediction)

    def collect(
        self, value: Tensor, rows: Tensor, lse: Tensor, entropy: Tensor, prediction: Tensor
    ) -> LossOutputs:
        """Put the outputs asked for beside a loss."""
        counted = self.target != self.loss.ignore_index

        def named(name: str, tensor: Tensor) -> Tensor | None:
            return self._per_token(tensor.detach()) if name in self.outputs else None

        accuracy = None
        if "accuracy" in self.outputs:
            hits = ((prediction == self.target) & counted).sum()
            accuracy = hits / counted.sum()
        return LossOutputs(
            loss=value,
            lse=named("lse", lse),
            token_loss=named("token_loss", rows),
            entropy=named("entropy", entropy),
            prediction=named("prediction", prediction),
            accuracy=accuracy,
            z_loss=named("z_loss", (self.loss.z_loss * lse.square()).masked_fill(~counted, 0)),
        )

    def _per_token(self, tensor: Tensor) -> Tensor:
        tensor = tensor.view(self.shape)
        return tensor[..., :-1] if self.drop_last else tensor

    def _counted_weight(self, dtype: torch.dtype) -> Tensor | None:
        """Token weights, 0 for ignored tokens whatever is given for them."""
        if self.token_weight is None:
            return None
        counted = self.target != self.loss.ignore_index
        return torch.where(counted, self.token_weight.to(dtype), 0.0)

    def _mean_divisor(self, dtype: torch.dtype) -> Tensor:
        if (given := self.given_divisor(dtype)) is not None:
            return given
        weight = self._counted_weight(dtype)
        if weight is None:
            weight = (self.target != self.loss.ignore_index).to(dtype)
        if self.class_weight is not None:
            known = self.target.clamp(0, len(self.class_weight) - 1)
            weight = weight * self.class_weight[known].to(dtype)
        return weight.sum()


def _shifted(
    states: Tensor, target: Tensor, token_weight: Tensor | None, ignore_index: int
) -> tuple[Tensor, Tensor | None]:
    """Move labels one position left; the last position counts no more."""
    if states.dim() < 2:
        raise ValueError(
            f"shift needs x [..., T, D] or logits [..., T, V], got {tuple(states.shape)}"
        )
    moved = torch.full_like(target, ignore_index)
    moved[..., :-1] = target[..., 1:]
    if token_weight is not None:
        last = torch.zeros_like(token_weight[..., :1])
        token_weight = torch.cat((token_weight[..., 1:], last), dim=-1)
    return moved, token_weight
