"""One rank's share of a case of ``loss_cases``, and the whole put together again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from loss_cases import NEEDS, Case, run
from torch import Tensor
from torch.distributed import ProcessGroup

from flce_tune.kernels import reference
from flce_tune.kernels.given_logits import cross_entropy
from flce_tune.kernels.op import linear_cross_entropy, linear_logprobs

PADDING = 3


def even(vocab: int, ranks: int) -> list[int]:
    """Where each rank's classes begin and end, as even as it goes."""
    return [vocab * rank // ranks for rank in range(ranks + 1)]


def share(
    tensor: Tensor | None,
    bounds: Sequence[int],
    rank: int,
    padding: int = 0,  # rows of garbage after it
) -> Tensor | None:
    """A rank's rows."""
    if tensor is None:
        return None
    mine = tensor[bounds[rank] : bounds[rank + 1]]
    garbage = tensor.new_full((padding, *tensor.shape[1:]), 9.0)
    return torch.cat((mine, garbage))


def run_split(
    group: ProcessGroup,
    case: Case,
    bounds: Sequence[int],
    padding: int = 0,
    needs: Sequence[str] = NEEDS,
    upstream: Tensor | float | None = None,
    **keywords: Any,
) -> dict[str, Tensor]:
    """``loss_cases.run`` on this rank's classes, with a ``vocab_range`` if there is padding."""
    rank = group.rank()
    if padding:
        keywords["vocab_range"] = (bounds[rank], bounds[rank + 1])
    local = replace(
        case,
        weight=share(case.weight, bounds, rank, padding),
        bias=share(case.bias, bounds, rank, padding),
    )
    return run(linear_cross_entropy, local, needs, upstream, process_group=group, **keywords)


def plain_split(case: Case, bounds: Sequence[int], **keywords: Any) -> dict[str, Tensor]:
    """Plain torch on the same split: each part of dX is rounded before they are summed."""
    parts = [slice(a, b) for a, b in pairwise(bounds)]
    x = [case.x.detach().clone().requires_grad_() for _ in parts]
    weight = case.weight.detach().clone().requires_grad_()
    bias = None if case.bias is None else case.bias.detach().clone().requires_grad_()
    columns = [
        reference.logits(x_of_part, weight[part], None if bias is None else bias[part])
        for x_of_part, part in zip(x, parts, strict=True)
    ]
    loss = reference.cross_entropy(torch.cat(columns, -1), case.target, **case.options, **keywords)
    leaves = [*x, weight] if bias is None else [*x, weight, bias]
    gradients = torch.autograd.grad(loss, leaves, torch.ones_like(loss))
    dx = torch.stack([g.double() for g in gradients[: len(x)]]).sum(0)
    names = ("weight", "bias")[: len(leaves) - len(x)]
    rest = dict(zip(names, gradients[len(x) :], strict=True))
    return {"loss": loss.detach(), "x": dx.to(case.x.dtype)} | rest


def joined(parts: Sequence[dict[str, Tensor]], bounds: Sequence[int]) -> dict[str, Tensor]:
    """The ranks' results as one: equal where they must be, and no gradient of padding."""
    whole = dict(parts[0])
    for name in ("loss", "x"):
        for part in parts:
            if name in part:
                assert torch.equal(part[name].nan_to_num(), whole[name].nan_to_num()), name
    for name in {"weight", "bias"} & set(whole):
        widths = [b - a for a, b in pairwise(bounds)]
        for part, width in zip(parts, widths, strict=True):
            assert not part[name][width:].any(), f"{name} of padding"
        pairs = zip(parts, widths, strict=True)
        whole[name] = torch.cat([part[name][:width] for part, width in pairs])
    return whole


def run_given(
    group: ProcessGroup,
    logits: Tensor,  # [..., V]
    target: Tensor,
    options: dict[str, Any],
    bounds: Sequence[int],
    padding: int = 0,
    *,
    requires_grad: bool = True,
) -> dict[str, Tensor]:
    """``cross_entropy`` of this rank's columns: the loss and their gradient."""
    columns = share(logits.movedim(-1, 0), bounds, group.rank(), padding)
    assert columns is not None
    leaf = columns.movedim(0, -1).contiguous().requires_grad_(requires_grad)
    mine = leaf * 1.0  # not a leaf, so that it may be overwritten
    if padding:
        options = options | {"vocab_range": (bounds[group.rank()], bounds[group.rank() + 1])}
    loss = cross_entropy(mine, target, process_group=group, **options)
    if not requires_grad:
        return {"loss": loss}
    gradient, *_ = torch.autograd.grad(loss, leaf, torch.ones_like(loss))
    overwritten = torch.equal(mine.detach(), gradient)
    return {
        "loss": loss.detach(), "logits": gradient.movedim(-1, 0),
        "overwritten": torch.tensor(overwritten),
    }  # fmt: skip


def statistics(
    group: ProcessGroup, case: Case, bounds: Sequence[int], padding: int = 0, **keywords: Any
) -> Any:
    """The op's outputs on this rank's classes."""
    rank = group.rank()
    if padding:
        keywords["vocab_range"] = (bounds[rank], bounds[rank + 1])
    weight, bias = (share(t, bounds, rank, padding) for t in (case.weight, case.bias))
    assert weight is not None
    return linear_cross_entropy(
        case.x, weight, case.target, bias=bias, process_group=group, **case.options, **keywords
    )


def failing(group: ProcessGroup, function: Any, *per_rank: dict[str, Any]) -> str:
    """What the call raises on this rank, whose keywords differ from the others'."""
    try:
        function(group, **per_rank[group.rank()])
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"
    return "nothing"


def differentiated(
    group: ProcessGroup, case: Case, bounds: Sequence[int]
) -> list[tuple[Tensor, Tensor]]:
    """Gradients of a loss and its lse, split and whole."""
    results = []
    for split in (True, False):
        x = case.x.clone().requires_grad_()
        part = (bounds[group.rank()], bounds[group.rank() + 1]) if split else (0, len(case.weight))
        assert case.bias is not None
        weight = case.weight[slice(*part)].clone().requires_grad_()
        loss, lse = linear_cross_entropy(
            x, weight, case.target, bias=case.bias[slice(*part)], reduction="sum",
            return_lse=True, process_group=group if split else None,
        )  # fmt: skip
        total = loss + (lse * torch.linspace(0, 1, len(lse))).sum()
        dx, dw = torch.autograd.grad(total, (x, weight))
        mine = slice(None) if split else slice(bounds[group.rank()], bounds[group.rank() + 1])
        results.append((dx, dw[mine], loss.detach(), lse.detach()))
    return list(zip(*results, strict=True))


def logprobs(group: ProcessGroup, case: Case, bounds: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
    """Log-probabilities, entropies and their gradients, split and whole."""
    mine = slice(bounds[group.rank()], bounds[group.rank() + 1])
    results = []
    for split in (True, False):
        x = case.x.clone().requires_grad_()
        weight = case.weight[mine if split else slice(None)].clone().requires_grad_()
        values, entropies = linear_logprobs(
            x, weight, case.target, temperature=0.7, process_group=group if split else None,
            vocab_range=(mine.start, mine.stop) if split else None,
        )  # fmt: skip
        assert entropies is not None
        steps = torch.linspace(0, 1, len(values))
        dx, dw = torch.autograd.grad(
            (values * steps + entropies * steps.flip(0)).sum(), (x, weight)
        )
        results.append((values.detach(), entropies.detach(), dx, dw if split else dw[mine]))
    return list(zip(*results, strict=True))
