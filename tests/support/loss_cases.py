"""Inputs of the op, and the op and its reference run on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from exactness import assert_as_exact
from torch import Tensor

from flce_tune.kernels import reference
from flce_tune.kernels.config import Config
from flce_tune.kernels.op import linear_cross_entropy

FEATURES = (
    "ignored", "bias", "softcap", "logit_scale", "label_smoothing", "z_loss", "class_weight",
    "token_weight", "divisor",
)  # fmt: skip
NEEDS = ("x", "weight", "bias")


@dataclass(frozen=True)
class Case:
    """One call: tensors, and options as keywords."""

    x: Tensor
    weight: Tensor
    target: Tensor
    bias: Tensor | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def to(self, dtype: torch.dtype) -> Case:
        """The same values in another dtype, tensors among the options included."""
        return replace(
            self,
            x=self.x.to(dtype),
            weight=self.weight.to(dtype),
            bias=None if self.bias is None else self.bias.to(dtype),
            options={
                k: v.to(dtype) if isinstance(v, Tensor) else v for k, v in self.options.items()
            },
        )

    def with_options(self, **options: Any) -> Case:
        """Add options."""
        return replace(self, options=self.options | options)


def make(
    n: int | tuple[int, ...],
    hidden: int,
    vocab: int,
    dtype: torch.dtype = torch.float32,
    features: Sequence[str] = (),
    seed: int = 0,
    device: str | torch.device = "cpu",
) -> Case:
    """Random inputs; every value is a bfloat16 number, so that no dtype changes it."""
    generator = torch.Generator("cpu").manual_seed(seed)
    shape = (n,) if isinstance(n, int) else n

    def values(*size: int, scale: float = 1.0) -> Tensor:
        tensor = torch.randn(size, generator=generator) * scale
        return tensor.to(torch.bfloat16).to(device, dtype)

    x = values(*shape, hidden)
    weight = values(vocab, hidden, scale=2.0 / hidden**0.5)
    target = torch.randint(0, vocab, shape, generator=generator).to(device)
    options: dict[str, Any] = {}
    if "ignored" in features:
        flat = target.view(-1)
        flat[::3] = -100
    if "softcap" in features:
        options["softcap"] = 4.0
    if "logit_scale" in features:
        options["logit_scale"] = 0.75
    if "label_smoothing" in features:
        options["label_smoothing"] = 0.125
    if "z_loss" in features:
        options["z_loss"] = 0.03125
    if "class_weight" in features:
        options["class_weight"] = values(vocab).abs() + 0.5
    if "token_weight" in features:
        options["token_weight"] = values(*shape)
    if "divisor" in features:
        options["divisor"] = 64.0
    for name in ("class_weight", "token_weight"):
        if name in options:
            options[name] = options[name].to(torch.bfloat16).to(dtype)
    bias = values(vocab) if "bias" in features else None
    return Case(x, weight, target, bias, options)


def trained(
    tokens: int = 384,
    hidden: int = 32,
    vocab: int = 4096,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    device: str | torch.device = "cpu",
) -> Case:
    """Logits as a trained model's: a few likely columns a token, a long tail of rare ones.

    Labels follow a power law, a bias says how frequent a column is, x points at the label and,
    as hidden states do, in a common direction.
    """
    generator = torch.Generator().manual_seed(seed)
    frequency = torch.arange(1, vocab + 1).double().pow(-1.1)
    shuffled = torch.randperm(vocab, generator=generator)
    weight = torch.randn(vocab, hidden, generator=generator, dtype=torch.float64) / hidden**0.5
    target = shuffled[torch.multinomial(frequency, tokens, True, generator=generator)]
    bias = torch.empty(vocab, dtype=torch.float64)
    bias[shuffled] = 2.0 * frequency.log()
    noise, common = torch.randn(2, tokens, hidden, generator=generator, dtype=torch.float64)
    x = 8 * weight[target] + 0.5 * noise + 2 * common[0]
    case = Case(x.to(device), weight.to(device), target.to(device), bias.to(device))
    return case.to(torch.bfloat16).to(dtype)


def run(
    function: Callable[..., Any],
    case: Case,
    needs: Sequence[str] = NEEDS,
    upstream: Tensor | float | None = None,
    **keywords: Any,
) -> dict[str, Tensor]:
    """Loss and gradients of the needed inputs; upstream defaults to ones."""
    tensors = {"x": case.x, "weight": case.weight, "bias": case.bias}
    leaves = {
        name: None if t is None else t.detach().clone().requires_grad_(name in needs)
        for name, t in tensors.items()
    }
    loss = function(
        leaves["x"], leaves["weight"], case.target, bias=leaves["bias"], **case.options, **keywords
    )
    wanted = {k: t for k, t in leaves.items() if t is not None and t.requires_grad}
    result = {"loss": loss.detach()}
    if wanted:
        if upstream is None:
            upstream = torch.ones_like(loss)
        elif not isinstance(upstream, Tensor):
            upstream = torch.full_like(loss, upstream)
        grads = torch.autograd.grad(loss, list(wanted.values()), upstream.to(loss.dtype))
        result |= dict(zip(wanted, grads, strict=True))
    return result


def compare(
    case: Case,
    dtype: torch.dtype,
    needs: Sequence[str] = NEEDS,
    upstream: Tensor | float | None = None,
    config: Config | None = None,
    more: dict[str, Any] | None = None,
    **keywords: Any,
) -> dict[str, Tensor]:
    """Hold the op's loss and gradients to the tolerance rule; return them."""
    ours = run(linear_cross_entropy, case, needs, upstream, config=config, **keywords, **more or {})
    hold(ours, *expect(case, dtype, needs, upstream, **keywords), dtype)
    return ours


def expect(
    case: Case,
    dtype: torch.dtype,
    needs: Sequence[str] = NEEDS,
    upstream: Tensor | float | None = None,
    **keywords: Any,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What plain torch gives in the dtype, and in float64.

    With the truth comes ``summands``: the total of the losses' absolute shares. Rounding is
    relative to those, and token weights of both signs may leave little of them.
    """
    plain = run(reference.linear_cross_entropy, case.to(dtype), needs, upstream, **keywords)
    wide = case.to(torch.float64)
    truth = run(reference.linear_cross_entropy, wide, needs, upstream, **keywords)
    if "token_weight" in case.options and truth["loss"].ndim == 0:
        positive = wide.with_options(token_weight=wide.options["token_weight"].abs())
        gross = run(reference.linear_cross_entropy, positive, (), None, **keywords)
        truth["summands"] = gross["loss"].abs()
    return plain, truth


def hold(
    ours: dict[str, Tensor],
    plain: dict[str, Tensor],
    truth: dict[str, Tensor],
    dtype: torch.dtype,
) -> None:
    """Hold results to the tolerance rule."""
    truth = dict(truth)
    summands = truth.pop("summands", None)
    assert set(ours) == set(truth)
    for name, value in ours.items():
        of = summands if name == "loss" else None
        assert_as_exact(name, value, plain[name], truth[name], dtype, summands=of)
