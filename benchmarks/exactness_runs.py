"""What ``exactness.py`` compares: the float64 truth, plain PyTorch, and the op with one config."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.nn.functional as F
from cases import DataKind, Inputs, Shape, make_inputs
from torch import Tensor

from flce_tune.kernels import reference
from flce_tune.kernels.call import LossOutputs
from flce_tune.kernels.config import Config
from flce_tune.kernels.op import linear_cross_entropy
from flce_tune.kernels.problem import DTYPES, Accumulate

Outputs = dict[str, Tensor]  # loss [], token_loss [N], dx [N, D], dw [V, D], db [V]


@dataclass(frozen=True)
class Case:
    """Inputs everybody gets, and which of the three kinds of question is asked of them."""

    kind: str
    shape: Shape
    dtype: str
    data: DataKind


@dataclass(frozen=True)
class Candidate:
    """One way to compute factor·(mean loss) and its gradients."""

    name: str
    run: Callable[[Inputs, Tensor], Outputs]
    factor: float = 1.0
    details: Mapping[str, Any] = field(default_factory=dict)  # for the JSON


def make_case(case: Case, device: torch.device) -> tuple[Inputs, Tensor]:
    """Draw inputs and a bias [V] ~ N(0, 0.1²), all of the case's dtype."""
    dtype = DTYPES[case.dtype]
    generator = torch.Generator(device).manual_seed(1)
    bias = 0.1 * torch.randn(case.shape.vocab, generator=generator, device=device)
    return make_inputs(case.shape, case.data, dtype, device), bias.to(dtype).requires_grad_()


@torch.no_grad()
def float64_truth(inputs: Inputs, bias: Tensor, row_chunk: int = 128) -> Outputs:
    """Compute the mean loss and its gradients in float64, a chunk of rows at a time."""
    tokens = inputs.x.shape[0]
    weight, b = inputs.weight.double(), bias.double()
    dx = torch.empty_like(inputs.x, dtype=torch.float64)
    dw, db = torch.zeros_like(weight), torch.zeros_like(b)
    token_loss = dx.new_empty(tokens)
    for start in range(0, tokens, row_chunk):
        rows = slice(start, start + row_chunk)
        x, target = inputs.x[rows].double(), inputs.target[rows]
        log_p = F.log_softmax(torch.addmm(b, x, weight.T), dim=1)
        token_loss[rows] = -log_p.gather(1, target[:, None])[:, 0]
        g = log_p.exp_()
        g[torch.arange(len(target), device=g.device), target] -= 1.0
        g /= tokens
        dx[rows] = g @ weight
        dw.addmm_(g.T, x)
        db += g.sum(0)
    return {"loss": token_loss.mean(), "token_loss": token_loss, "dx": dx, "dw": dw, "db": db}


def plain(
    name: str,
    logits_dtype: torch.dtype | None = None,
    *,
    upstream: float = 1.0,
    divided: float = 1.0,
) -> Candidate:
    """``F.cross_entropy`` of full logits, in the inputs' dtype or widened to ``logits_dtype``.

    ``divided`` divides the mean, ``upstream`` multiplies what comes of it.
    """

    def run(inputs: Inputs, bias: Tensor) -> Outputs:
        z = reference.logits(inputs.x, inputs.weight, bias).to(logits_dtype or inputs.x.dtype)
        value = F.cross_entropy(z, inputs.target) / divided * upstream
        rows = F.cross_entropy(z.detach(), inputs.target, reduction="none")
        return {"loss": value, "token_loss": rows, **_gradients(value, inputs, bias)}

    return Candidate(name, run, upstream / divided)


def ours(
    name: str,
    config: Config,
    accumulate: Accumulate = "fp32",
    *,
    upstream: float = 1.0,
    divided: float = 1.0,
) -> Candidate:
    """The op with one config; ``divided`` goes into its divisor, ``upstream`` comes afterwards."""

    def run(inputs: Inputs, bias: Tensor) -> Outputs:
        result = linear_cross_entropy(
            inputs.x,
            inputs.weight,
            inputs.target,
            bias=bias,
            divisor=len(inputs.x) * divided,
            outputs=("token_loss",),
            accumulate=accumulate,
            config=config,
        )
        held = cast(LossOutputs, result)
        value, rows = held.loss * upstream, cast(Tensor, held.token_loss)
        return {"loss": value, "token_loss": rows, **_gradients(value, inputs, bias)}

    details = {"config": config.to_dict(), "accumulate": accumulate}
    return Candidate(name, run, upstream / divided, details)


def _gradients(value: Tensor, inputs: Inputs, bias: Tensor) -> Outputs:
    found = torch.autograd.grad(value, (inputs.x, inputs.weight, bias))
    return dict(zip(("dx", "dw", "db"), found, strict=True))


def relative_errors(outputs: Outputs, truth: Outputs, factor: float) -> dict[str, float]:
    """‖value / factor - truth‖ / ‖truth‖ of each output; token losses have no factor."""
    errors = {}
    for name, true in truth.items():
        value = outputs[name].detach().double()
        if name != "token_loss":
            value = value / factor
        difference = torch.linalg.vector_norm(value - true)
        errors[name] = float(difference / torch.linalg.vector_norm(true))
    return errors
