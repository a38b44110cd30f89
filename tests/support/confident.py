"""Confident predictions in float32: where p is near 1, p - 1 has few digits left."""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
from exactness import assert_as_exact
from loss_cases import Case, expect, make
from torch import Tensor


@functools.cache
def confident(
    n: int, hidden: int, vocab: int, device: str = "cpu"
) -> tuple[Case, dict[str, Tensor], dict[str, Tensor]]:
    """Inputs, what plain torch makes of them, and the truth: losses from 1e-7 to a few nats.

    x is close to its label's row of W. The losses are those of the tokens: their mean is one draw.
    """
    case = make(n, hidden, vocab, torch.float32, ("bias",), device=device)
    generator = torch.Generator().manual_seed(3)
    sharpness = 0.4 + 1.6 * torch.rand(n, 1, generator=generator).to(device)
    case = replace(case, x=sharpness * (case.x + 4.0 * case.weight[case.target]))
    plain, truth = expect(case, torch.float32)
    rows = expect(case, torch.float32, needs=(), reduction="none")
    return case, plain | rows[0], truth | rows[1]


def hold_strictly(
    ours: dict[str, Tensor], plain: dict[str, Tensor], truth: dict[str, Tensor]
) -> None:
    """Hold results to the tolerance rule with nothing added for statistics."""
    for name, value in ours.items():
        assert_as_exact(name, value, plain[name], truth[name], torch.float32, statistics=0.0)
