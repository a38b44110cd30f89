"""Random inputs that look like a trained model's, and plain PyTorch's answer to them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flce_tune.kernels.problem import DTYPES, Problem

SOFTCAP = 30.0
LABEL_SMOOTHING = 0.1
PEAKEDNESS = 9.0  # how far x leans towards its target's row of W: a mean loss of 2 to 3 nats


@dataclass(frozen=True, slots=True)
class ProblemInputs:
    """The tensors and options of one problem, all made here and nobody else's."""

    x: Tensor  # [N, D]
    weight: Tensor  # [V, D]
    target: Tensor  # [N] int64
    bias: Tensor | None  # [V]
    upstream: Tensor  # gradient of the loss: a scalar, or [N] where the loss is per token
    class_weight: Tensor | None = None  # [V] float32
    softcap: float | None = None
    label_smoothing: float = 0.0
    leaves: dict[str, Tensor] = field(default_factory=dict)  # wanted gradients, by output name

    @property
    def reduction(self) -> str:
        """``none`` where the loss is per token, else ``mean``."""
        return "none" if self.upstream.ndim else "mean"

    def slice(self, rows: int) -> ProblemInputs:
        """The same problem with only the first rows."""
        return _make(
            x=self.x.detach()[:rows],
            weight=self.weight.detach(),
            target=self.target[:rows],
            bias=None if self.bias is None else self.bias.detach(),
            upstream=self.upstream[:rows] if self.upstream.ndim else self.upstream,
            class_weight=self.class_weight,
            softcap=self.softcap,
            label_smoothing=self.label_smoothing,
            wanted=tuple(self.leaves),
        )

    def checksum(self) -> Tensor:
        """Numbers that change when somebody writes into the tensors."""
        tensors = (self.x, self.weight, self.target, self.bias, self.class_weight, self.upstream)
        return torch.stack([_bits(t).sum(dtype=torch.int64) for t in tensors if t is not None])

    def outputs(self, loss: Tensor) -> dict[str, Tensor]:
        """Differentiate: the loss and the wanted gradients by output name, all detached."""
        named = {"loss": loss.detach()}
        if self.leaves:
            gradients = torch.autograd.grad(
                loss, list(self.leaves.values()), self.upstream.to(loss.dtype)
            )
            named |= dict(zip(self.leaves, gradients, strict=True))
        return named


def make_inputs(problem: Problem, device: torch.device, seed: int) -> ProblemInputs:
    """Draw inputs: Zipf targets, and each x leaning towards its target's row of W.

    Float16 problems get an upstream gradient of N, as a gradient scaler would give them: without
    it most of the gradient is below float16's range.
    """
    dtype = DTYPES[problem.dtype]
    n, d, v = problem.tokens, problem.hidden, problem.vocab
    generator = None if device.type == "meta" else torch.Generator(device).manual_seed(seed)
    draw: dict[str, Any] = {"generator": generator, "device": device}

    weight = torch.randn(v, d, dtype=dtype, **draw).mul_(d**-0.5)
    frequency = 1 / torch.arange(1, v + 1, dtype=torch.float32, device=device)
    rank = torch.multinomial(frequency, n, replacement=True, generator=generator)
    target = torch.randperm(v, **draw)[rank]
    temperature = torch.empty(n, 1, dtype=dtype, device=device).uniform_(
        0.4, 2.0, generator=generator
    )
    x = torch.randn(n, d, dtype=dtype, **draw).add_(weight[target], alpha=PEAKEDNESS)
    x.mul_(temperature)

    features = problem.features
    upstream = torch.tensor(float(n) if dtype == torch.float16 else 1.0, device=device)
    if "per_token" in features:
        upstream = torch.rand(n, **draw).mul_(upstream / n)
    return _make(
        x=x,
        weight=weight,
        target=target,
        bias=torch.randn(v, dtype=dtype, **draw).mul_(0.1) if "bias" in features else None,
        upstream=upstream,
        class_weight=torch.rand(v, **draw).add_(0.5) if "class_weight" in features else None,
        softcap=SOFTCAP if "softcap" in features else None,
        label_smoothing=LABEL_SMOOTHING if "label_smoothing" in features else 0.0,
        wanted={
            "train": ("dx", "dw", "db"),
            "train_frozen_weight": ("dx",),
            "eval": (),
        }[problem.mode],
    )


def plain_loss(inputs: ProblemInputs, *, reduction: str | None = None) -> Tensor:
    """Compute the loss as one writes it in plain PyTorch, in the inputs' dtype.

    Float16 logits are widened first, as autocast does: their loss overflows otherwise.
    """
    logits = F.linear(inputs.x, inputs.weight, inputs.bias)
    if logits.dtype == torch.float16:
        logits = logits.float()
    if inputs.softcap is not None:
        logits = inputs.softcap * torch.tanh(logits / inputs.softcap)
    class_weight = inputs.class_weight
    return F.cross_entropy(
        logits,
        inputs.target,
        weight=None if class_weight is None else class_weight.to(logits.dtype),
        label_smoothing=inputs.label_smoothing,
        reduction=reduction or inputs.reduction,
    )


def _make(*, wanted: tuple[str, ...], **tensors: Any) -> ProblemInputs:
    named = {"dx": tensors["x"], "dw": tensors["weight"], "db": tensors["bias"]}
    leaves = {
        name: named[name].detach().requires_grad_() for name in wanted if named[name] is not None
    }
    return ProblemInputs(
        **tensors
        | {
            "x": leaves.get("dx", tensors["x"]),
            "weight": leaves.get("dw", tensors["weight"]),
            "bias": leaves.get("db", tensors["bias"]),
        },
        leaves=leaves,
    )


def _bits(tensor: Tensor) -> Tensor:
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.dtype.itemsize]
    return tensor.detach().view(integer)
