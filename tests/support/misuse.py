"""Calls of the split op with something changed on a rank, and what comes of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed import ProcessGroup

from flce_tune.kernels.op import linear_cross_entropy

ROWS, HIDDEN = 10, 8


def refusals(group: ProcessGroup, changes: Sequence[dict[str, Any]]) -> str:
    """The error this rank gets, or its results."""
    try:
        return _call(group, **changes[group.rank()])
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"


def _call(
    group: ProcessGroup,
    tokens: int = 12,
    dtype: torch.dtype = torch.float32,
    hidden: int = HIDDEN,
    rows: int = ROWS,
    seed: int = 0,
    label: int | None = None,
    device: str = "cpu",
    class_weight: int | None = None,
    *,
    frozen: bool = False,
    flat: bool = False,
    no_group: bool = False,
    **options: Any,
) -> str:
    generator = torch.Generator().manual_seed(seed)
    x = torch.ones(tokens, HIDDEN, dtype=dtype, device=device, requires_grad=True)
    weight = torch.ones(rows, hidden, dtype=dtype, device=device)
    if flat:
        weight = weight.view(-1)
    weight.requires_grad_(not frozen)
    target = torch.randint(0, 2 * ROWS, (tokens,), generator=generator).to(device)
    if label is not None:
        target[3] = label
    if class_weight is not None:
        options["class_weight"] = torch.ones(class_weight)
    if no_group:
        options["vocab_range"] = (0, ROWS)
    else:
        options["process_group"] = group
    loss = linear_cross_entropy(x, weight, target, **options)
    assert isinstance(loss, torch.Tensor)
    dx, dw = torch.autograd.grad(loss, (x, weight))
    zeros = "of zeros" if not dx.any() and not dw.any() else ""
    return f"loss {float(loss.detach())}, gradients {tuple(dx.shape)} {tuple(dw.shape)} {zeros}"
