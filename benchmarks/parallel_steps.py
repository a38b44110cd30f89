"""Ways to compute a vocabulary split over ranks, each as one forward and backward step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from cases import Shape
from torch import Tensor
from torch.distributed import ProcessGroup

from flce_tune import Config, Tile, cross_entropy, linear_cross_entropy
from flce_tune.kernels.parallel import collectives

Step = Callable[[], Tensor]

WHOLE = "one GPU: linear_cross_entropy"
SPLIT = "split: linear_cross_entropy"


@dataclass(frozen=True)
class Part:
    """What a rank holds: all tokens, and its rows of the head."""

    x: Tensor  # [N, D]
    weight: Tensor  # [V / ranks, D]
    target: Tensor  # [N]
    group: ProcessGroup

    @classmethod
    def make(cls, shape: Shape, group: ProcessGroup, device: torch.device) -> Part:
        """Rows, drawn from the rank's own seed; tokens, the same everywhere."""
        if shape.vocab % group.size():
            raise ValueError(f"V must be a multiple of {group.size()} here, got {shape.vocab}")

        def normal(rows: int, seed: int) -> Tensor:
            generator = torch.Generator(device).manual_seed(seed)
            size = (rows, shape.hidden)
            return torch.randn(size, generator=generator, device=device, dtype=torch.bfloat16)

        rows = shape.vocab // group.size()
        weight = normal(rows, 1 + group.rank()) / shape.hidden**0.5
        generator = torch.Generator(device).manual_seed(0)
        target = torch.randint(0, shape.vocab, (shape.tokens,), generator=generator, device=device)
        return cls(normal(shape.tokens, 0).requires_grad_(), weight.requires_grad_(), target, group)

    def clear(self) -> None:
        """Drop the gradients."""
        self.x.grad = self.weight.grad = None


class _Head(torch.autograd.Function):
    """x·Wᵀ of this rank; dX is all-reduced while dW is computed, as Megatron's layer does it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, group: ProcessGroup) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group = group
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (grad,), (x, weight) = grads, ctx.saved_tensors
        dx = grad @ weight
        work = dist.all_reduce(dx, group=ctx.group, async_op=True)
        dw = grad.t() @ x
        if work is not None:
            work.wait()
        return dx, dw, None


def head(part: Part) -> Tensor:
    """This rank's logits."""
    logits: Tensor = _Head.apply(part.x, part.weight, part.group)
    return logits


def steps(part: Part) -> Iterator[tuple[str, Step]]:
    """Name each split way; those whose package is missing say so themselves."""
    keep = {"process_group": part.group}

    def fused(**options: Any) -> Step:
        return lambda: linear_cross_entropy(part.x, part.weight, part.target, **keep, **options)

    yield SPLIT, fused()
    for name, config in configs(part).items():
        yield f"split: {name}", fused(config=config)
    yield "split: linear_cross_entropy, weight_dtype", fused(accumulate="weight_dtype")
    yield "split: linear_cross_entropy, 512 MiB", fused(workspace_limit=512 << 20)
    yield (
        "split: full, dX beside dW on NCCL's own stream",
        other_stream(fused(config=configs(part)["full"])),
    )
    yield (
        "split logits: cross_entropy, in place",
        lambda: cross_entropy(head(part), part.target, in_place=True, **keep),
    )
    yield megatron(part)
    # What the split could reach: each GPU computes its rows as if they were the whole vocabulary.
    own = part.target % len(part.weight)
    for name in ("full", "full, dW tile", "factored 8448"):
        config = configs(part)[name]
        yield f"no exchange: {name}", alone(part, own, config)


LOGITS = Tile(128, 256, 64, num_warps=8, num_stages=3, group=8)
DX = Tile(128, 64, 256, num_warps=8, num_stages=3, group=8)
DW = Tile(64, 128, 256, num_warps=8, num_stages=3, group=8)
FULL = Config("full", logits=LOGITS)


def configs(part: Part) -> dict[str, Config]:
    """What a rank may run; on a CPU without tiles."""
    n = part.x.shape[0]
    tiles: dict[str, Tile] = {"logits": LOGITS, "dx": DX, "dw": DW}
    named = {
        "full": FULL,
        "full, dW tile": Config("full", logits=LOGITS, dw=DW),
        "factored 8448": Config("factored", chunk=n, slab=8448, **tiles),
        "factored 4096": Config("factored", chunk=n, slab=4096, **tiles),
        "factored, two chunks": Config("factored", chunk=n // 4, slab=4096, **tiles),
        "overlay 8448": Config("overlay", slab=8448, **tiles),
        "chunked 2048, dW tile": Config("chunked", chunk=2048, logits=LOGITS, dw=DW),
    }
    if part.x.device.type == "cuda":
        return named
    return {name: replace(config, logits=None, dx=None, dw=None) for name, config in named.items()}


def alone(part: Part, target: Tensor, config: Config) -> Step:
    """A rank's rows by themselves, without a group."""
    return lambda: linear_cross_entropy(part.x, part.weight, target, config=config)


def other_stream(step: Step) -> Step:
    """With collectives where ``async_op=True`` puts them, behind the product launched next."""

    def start(device: torch.device, collective: Callable[[bool], Any]) -> Any:
        return collective(True).wait

    def patched() -> Tensor:
        with mock.patch.object(collectives, "_aside", start):
            return step()

    return patched


def megatron(part: Part) -> tuple[str, Step]:
    """Megatron-core's fused loss of the same logits, or the same stages in plain torch."""
    target = part.target[:, None]  # [sequence, batch]
    try:
        from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
    except ImportError:
        return (
            "split logits: Megatron-core's stages in plain torch (package not installed)",
            lambda: _PlainStages.apply(head(part), part.target, part.group).mean(),
        )
    return (
        "split logits: Megatron-core fused",
        lambda: fused_vocab_parallel_cross_entropy(head(part)[:, None], target, part.group).mean(),
    )


class _PlainStages(torch.autograd.Function):
    """max, all-reduce; exp, sum and label, all-reduce; loss. float32 softmax kept for backward."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, group: ProcessGroup) -> Tensor:
        z = logits.float()
        largest = z.amax(-1)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        z -= largest[:, None]
        local = target - group.rank() * z.shape[1]
        elsewhere = (local < 0) | (local >= z.shape[1])
        local = local.masked_fill(elsewhere, 0)
        label = z.gather(1, local[:, None])[:, 0].masked_fill(elsewhere, 0.0)
        z.exp_()
        both = torch.cat((label, z.sum(-1)))
        dist.all_reduce(both, group=group)
        label, total = both.chunk(2)
        ctx.save_for_backward(z.div_(total[:, None]), local, elsewhere)
        return total.log() - label

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grad,), (softmax, local, elsewhere) = grads, ctx.saved_tensors
        softmax.scatter_add_(1, local[:, None], (elsewhere.float() - 1.0)[:, None])
        return softmax.mul_(grad[:, None]).to(torch.bfloat16), None, None
