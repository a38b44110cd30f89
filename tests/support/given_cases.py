"""Inputs of ``cross_entropy``, and it and its reference run on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from loss_cases import hold, make
from torch import Tensor

from flce_tune.kernels import reference
from flce_tune.kernels.given_logits import cross_entropy


@dataclass(frozen=True)
class LogitsCase:
    """One call: logits, labels, and options as keywords."""

    logits: Tensor
    target: Tensor
    options: dict[str, Any] = field(default_factory=dict)

    def to(self, dtype: torch.dtype) -> LogitsCase:
        """The same values in another dtype, tensors among the options included."""
        options = {k: v.to(dtype) if isinstance(v, Tensor) else v for k, v in self.options.items()}
        return replace(self, logits=self.logits.to(dtype), options=options)


def make_logits(
    n: int | tuple[int, ...],
    vocab: int,
    dtype: torch.dtype = torch.float32,
    features: Sequence[str] = (),
    seed: int = 0,
    device: str | torch.device = "cpu",
) -> LogitsCase:
    """Random logits; every value is a bfloat16 number, so that no dtype changes it."""
    case = make(n, 1, vocab, dtype, features, seed, device)
    generator = torch.Generator("cpu").manual_seed(seed + 1)
    values = torch.randn(*case.target.shape, vocab, generator=generator) * 2
    return LogitsCase(values.to(torch.bfloat16).to(device, dtype), case.target, case.options)


def run_given(
    function: Callable[..., Any],
    case: LogitsCase,
    upstream: Tensor | float = 1.0,
    **keywords: Any,
) -> dict[str, Tensor]:
    """Loss and gradient of logits that are no leaf."""
    leaf = case.logits.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    loss = function(leaf.clone(), case.target, **case.options, **keywords)
    if not isinstance(upstream, Tensor):
        upstream = torch.full_like(loss, upstream)
    (gradient,) = torch.autograd.grad(loss, leaf, upstream.to(loss.dtype))
    return {"loss": loss.detach(), "logits": gradient}


def compare_given(
    case: LogitsCase,
    dtype: torch.dtype,
    upstream: Tensor | float = 1.0,
    more: dict[str, Any] | None = None,
    **keywords: Any,
) -> dict[str, Tensor]:
    """Hold the op's loss and gradient to the tolerance rule; return them."""
    ours = run_given(cross_entropy, case, upstream, **keywords, **more or {})
    plain, truth = (
        run_given(reference.cross_entropy, case.to(kind), upstream, **keywords)
        for kind in (dtype, torch.float64)
    )
    hold(ours, plain, truth, dtype)
    return ours
