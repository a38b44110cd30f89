"""The problems that are compared: shapes, both kinds of data, and the fp32 truth."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

DataKind = Literal["flat", "peaked"]
DATA_KINDS: tuple[DataKind, ...] = ("flat", "peaked")


@dataclass(frozen=True, slots=True)
class Shape:
    """Tokens N × hidden size D × vocabulary V."""

    tokens: int
    hidden: int
    vocab: int

    @classmethod
    def parse(cls, text: str) -> Shape:
        """Read ``N,D,V``."""
        try:
            sizes = [int(part) for part in text.split(",")]
        except ValueError:
            sizes = []
        if len(sizes) != 3 or min(sizes) < 1:
            raise ValueError(f"a shape is three positive integers N,D,V, got {text!r}")
        return cls(*sizes)

    @property
    def dense_flops(self) -> int:
        """6NDV: logits, dX and dW, each computed once."""
        return 6 * self.tokens * self.hidden * self.vocab

    def __str__(self) -> str:
        return f"{self.tokens}×{self.hidden}×{self.vocab}"


DEFAULT_SHAPES = (
    Shape(16384, 4096, 128256),  # Llama 3 8B
    Shape(4096, 4096, 128256),
    Shape(8192, 2304, 256000),  # Gemma 2 2B
    Shape(16384, 1024, 151936),  # Qwen3 0.6B
    Shape(16384, 4096, 32000),  # Llama 2 7B
)


@dataclass(frozen=True, slots=True)
class Inputs:
    """What every implementation is given; x and weight require gradients."""

    x: Tensor  # [N, D]
    weight: Tensor  # [V, D]
    target: Tensor  # [N] int64


@dataclass(frozen=True, slots=True)
class Result:
    """A loss and its gradients."""

    loss: Tensor  # scalar
    dx: Tensor  # [N, D]
    dw: Tensor  # [V, D]


def make_inputs(
    shape: Shape, data: DataKind, dtype: torch.dtype, device: torch.device, seed: int = 0
) -> Inputs:
    """Draw the inputs of a comparison.

    ``weight`` ~ N(0, 1/D) and the labels follow Zipf's law over V. ``flat``: x ~ N(0, 1), logits
    as of an untrained model, a loss near ln V. ``peaked``: x = c·(ε + 9·weight[target]) with
    c ~ U(0.4, 2) per row, as of a trained model, a mean loss of 2 to 3 nats at common sizes.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def normal(rows: int) -> Tensor:
        return torch.randn(rows, shape.hidden, generator=generator, device=device)

    weight = normal(shape.vocab).mul_(shape.hidden**-0.5)
    zipf = 1.0 / torch.arange(1, shape.vocab + 1, device=device, dtype=torch.float32)
    target = torch.multinomial(zipf, shape.tokens, replacement=True, generator=generator)
    x = normal(shape.tokens)
    if data == "peaked":
        sharpness = torch.rand(shape.tokens, 1, generator=generator, device=device) * 1.6 + 0.4
        x = sharpness * (x + 9.0 * weight[target])
    return Inputs(
        x=x.to(dtype).requires_grad_(), weight=weight.to(dtype).requires_grad_(), target=target
    )


@torch.no_grad()
def fp32_truth(inputs: Inputs, row_chunk: int = 1024) -> Result:
    """Compute the mean loss and its gradients in fp32, a chunk of rows at a time."""
    if torch.backends.cuda.matmul.allow_tf32:
        raise RuntimeError("the truth needs full fp32 products: TF32 is switched on")
    weight = inputs.weight.float()
    dw = torch.zeros_like(weight)
    dx = torch.empty(inputs.x.shape, dtype=torch.float32, device=weight.device)
    tokens = inputs.x.shape[0]
    loss = torch.zeros((), dtype=torch.float64, device=weight.device)
    for start in range(0, tokens, row_chunk):
        rows = slice(start, start + row_chunk)
        x, target = inputs.x[rows].float(), inputs.target[rows]
        log_p = F.log_softmax(x @ weight.T, dim=1)
        loss -= log_p.gather(1, target[:, None]).double().sum()
        g = log_p.exp_()
        g[torch.arange(len(target), device=g.device), target] -= 1.0
        g /= tokens
        dx[rows] = g @ weight
        dw.addmm_(g.T, x)
    return Result(loss=(loss / tokens).float(), dx=dx, dw=dw)


@torch.no_grad()
def dense_logit_gradient(inputs: Inputs, row_chunk: int = 1024) -> Tensor:
    """Compute G [N, V] of the mean loss in the inputs' dtype: the operand of the floor's GEMMs."""
    tokens, vocab = inputs.x.shape[0], inputs.weight.shape[0]
    g = torch.empty(tokens, vocab, dtype=inputs.x.dtype, device=inputs.x.device)
    for start in range(0, tokens, row_chunk):
        rows = slice(start, start + row_chunk)
        p = torch.softmax((inputs.x[rows] @ inputs.weight.T).float(), dim=1)
        target = inputs.target[rows]
        p[torch.arange(len(target), device=p.device), target] -= 1.0
        g[rows] = p.div_(tokens)
    return g


@torch.no_grad()
def relative_errors(result: Result, truth: Result) -> dict[str, float]:
    """Errors against the truth: of the loss, and of dX and dW in the Frobenius norm."""

    def error(value: Tensor, true: Tensor) -> float:
        difference = value.float() - true
        return float(torch.linalg.vector_norm(difference) / torch.linalg.vector_norm(true))

    return {
        "loss": error(result.loss, truth.loss),
        "dx": error(result.dx, truth.dx),
        "dw": error(result.dw, truth.dw),
    }
