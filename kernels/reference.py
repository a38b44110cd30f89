"""The plain torch reference: full logits, autograd, any float dtype. Slow, large and right."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def logits(
    x: Tensor,  # [..., D]
    weight: Tensor,  # [V, D]
    bias: Tensor | None = None,  # [V]
    softcap: float | None = None,
    logit_scale: float | None = None,
) -> Tensor:  # [..., V], x's dtype
    """The logits the loss sees."""
    return scaled(F.linear(x, weight, bias), softcap, logit_scale)


def scaled(raw: Tensor, softcap: float | None = None, logit_scale: float | None = None) -> Tensor:
    """Scale and cap raw logits."""
    z = raw if logit_scale is None else raw * logit_scale
    return z if softcap is None else softcap * torch.tanh(z / softcap)


def linear_cross_entropy(
    x: Tensor,  # [..., D]
    weight: Tensor,  # [V, D]
    target: Tensor,  # [...]
    *,
    bias: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """The loss of ``op.linear_cross_entropy`` in terms of ``F.cross_entropy``."""
    return cross_entropy(F.linear(x, weight, bias), target, **options)


def cross_entropy(
    logits: Tensor,  # [..., V] raw
    target: Tensor,  # [...]
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    logit_scale: float | None = None,
    z_loss: float = 0.0,
    class_weight: Tensor | None = None,
    token_weight: Tensor | None = None,
    divisor: Tensor | float | None = None,
) -> Tensor:
    """The loss of ``given_logits.cross_entropy`` in terms of ``F.cross_entropy``."""
    z = scaled(logits, softcap, logit_scale).reshape(-1, logits.shape[-1])
    flat = target.reshape(-1)
    rows = F.cross_entropy(
        z,
        flat,
        weight=class_weight,
        ignore_index=ignore_index,
        reduction="none",
        label_smoothing=label_smoothing,
    )
    counted = flat != ignore_index
    if z_loss:
        rows = rows + torch.where(counted, z_loss * torch.logsumexp(z, -1).square(), 0.0)
    weight_of_row = counted.to(rows.dtype)
    if token_weight is not None:
        rows = rows * token_weight.reshape(-1)
        weight_of_row = weight_of_row * token_weight.reshape(-1)
    if reduction == "none":
        return rows.view(target.shape)
    if reduction == "sum":
        return rows.sum()
    if divisor is None:
        if class_weight is not None:
            weight_of_row = weight_of_row * class_weight[flat.clamp(0, len(class_weight) - 1)]
        divisor = weight_of_row.sum()
    return rows.sum() / divisor


def row_statistics(
    z: Tensor,  # [N, V] logits the loss sees
    target: Tensor,  # [N]
) -> dict[str, Tensor]:
    """lse, entropy, prediction and log-probability of each row."""
    logp = torch.log_softmax(z, -1)
    p = logp.exp()
    return {
        "lse": torch.logsumexp(z, -1),
        "entropy": -torch.where(p == 0, 0.0, p * logp).sum(-1),
        "prediction": z.argmax(-1),
        "logprob": logp.gather(1, target.clamp(min=0)[:, None])[:, 0],
    }
