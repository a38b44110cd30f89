"""Custom ops as plain autograd functions, for calls that nobody traces.

``torch.library``'s Python ops cost a few hundred µs a call in bookkeeping, and keep their outputs
alive through backward. The computation and the formulas are the custom op's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def eager_twin(
    compute: Callable[..., tuple[Tensor, ...]],
    setup_context: Callable[[Any, tuple[Any, ...], tuple[Tensor, ...]], None],
    backward: Callable[..., tuple[Tensor | None, ...]],
    results: int,
) -> Callable[..., tuple[Tensor, ...]]:
    """Make a function with a custom op's arguments, first results and gradients.

    Its arguments are what the custom op was made from and registered with, and how many results
    anybody but backward uses: each costs bookkeeping.
    """

    class Eager(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
            output = compute(*arguments)
            ctx.set_materialize_grads(False)
            setup_context(ctx, arguments, output)
            return output[:results]

        @staticmethod
        def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
            return backward(ctx, *grads)

    twin: Callable[..., tuple[Tensor, ...]] = Eager.apply
    return twin
