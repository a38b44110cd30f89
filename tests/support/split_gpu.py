"""``split_cases`` with each rank's tensors on its own GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from loss_cases import Case
from split_cases import run_given, run_split, statistics
from torch import Tensor
from torch.distributed import ProcessGroup

from flce_tune.kernels.op import linear_cross_entropy


def here(group: ProcessGroup, value: Any) -> Any:
    """Tensors, wherever they are, on this rank's GPU."""
    device = torch.device("cuda", group.rank())
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {name: here(group, v) for name, v in value.items()}
    if isinstance(value, Case):
        return replace(
            value,
            x=value.x.to(device),
            weight=value.weight.to(device),
            target=value.target.to(device),
            bias=here(group, value.bias),
            options=here(group, value.options),
        )
    return value


def there(value: dict[str, Tensor]) -> dict[str, Tensor]:
    """Results on the CPU, where they can be sent from."""
    return {name: tensor.cpu() for name, tensor in value.items()}


def split(group: ProcessGroup, case: Case, *arguments: Any, **keywords: Any) -> dict[str, Tensor]:
    return there(run_split(group, here(group, case), *arguments, **here(group, keywords)))


def given(group: ProcessGroup, *arguments: Any) -> dict[str, Tensor]:
    return there(run_given(group, *(here(group, a) for a in arguments)))


def outputs(group: ProcessGroup, case: Case, *arguments: Any, **keywords: Any) -> dict[str, Tensor]:
    found = statistics(group, here(group, case), *arguments, **keywords)
    return {name: getattr(found, name).cpu() for name in keywords["outputs"]}


def unknown_labels(group: ProcessGroup, case: Case, bounds: list[int]) -> tuple[Tensor, Tensor]:
    """The loss, and which rows of dX are NaN, when no rank holds some labels."""
    moved = here(group, case)
    rows = slice(bounds[group.rank()], bounds[group.rank() + 1])
    x = moved.x.clone().requires_grad_()
    loss = linear_cross_entropy(
        x, moved.weight[rows], moved.target, reduction="none", process_group=group
    )
    assert isinstance(loss, Tensor)
    (dx,) = torch.autograd.grad(loss.sum(), x)
    return loss.detach().cpu(), dx.isnan().any(1).cpu()


def captured(group: ProcessGroup, case: Case, bounds: list[int]) -> list[Tensor]:
    """Loss and dX of a replayed CUDA graph, and of a plain call on the same new values."""
    moved = here(group, case)
    rows = slice(bounds[group.rank()], bounds[group.rank() + 1])
    x, weight = moved.x.clone().requires_grad_(), moved.weight[rows].clone().requires_grad_()

    def step() -> tuple[Tensor, Tensor]:
        loss = linear_cross_entropy(x, weight, moved.target, process_group=group)
        assert isinstance(loss, Tensor)
        return loss.detach(), *torch.autograd.grad(loss, x)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    with torch.no_grad():
        x.mul_(0.5)
    graph.replay()
    torch.cuda.synchronize()
    replayed = [t.cpu() for t in results]
    return [*replayed, *(t.cpu() for t in step())]
