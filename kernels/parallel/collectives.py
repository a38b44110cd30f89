"""The collectives of ``torch.distributed`` in use here, under their names of every torch.

Those that run beside products go to a stream of their own. Its priority is high, so that the
collective gets multiprocessors as soon as a product gives some back, and not when the product that
was launched behind it is done.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Wait = Callable[[], object]
"""Waits for a collective: a GPU's stream does, its host does not."""


def gathered(group: ProcessGroup, mine: Tensor) -> Tensor:
    """Every rank's tensor of this shape, [ranks, ...]."""
    parts, _ = _parts(group, mine)
    if group.size() > 1:
        _gather(parts.view(-1), mine.contiguous().view(-1), group=group)
    return parts


def start_gathered(group: ProcessGroup, mine: Tensor) -> tuple[Tensor, Wait]:
    """The same, beside other work; the tensor holds the parts once ``Wait`` has been called."""
    parts, own = _parts(group, mine)
    if group.size() == 1:
        return parts, lambda: None
    flat = parts.view(-1)
    return parts, _aside(
        mine.device, lambda later: _gather(flat, own.view(-1), group=group, async_op=later)
    )


def start_sum(group: ProcessGroup, tensor: Tensor) -> Wait:
    """Begin to replace the tensor by the sum over the ranks."""
    return _aside(tensor.device, lambda later: dist.all_reduce(tensor, group=group, async_op=later))


def start_scattered_sum(group: ProcessGroup, tensor: Tensor, mine: Tensor) -> Wait:
    """Begin to write this rank's part of the sum over the ranks, cut along the first dimension."""
    return _aside(tensor.device, lambda later: _scatter(mine, tensor, group=group, async_op=later))


def _parts(group: ProcessGroup, mine: Tensor) -> tuple[Tensor, Tensor]:
    own = mine.contiguous()
    if group.size() == 1:
        return own[None], own
    return mine.new_empty(group.size(), *mine.shape), own


def _aside(device: torch.device, collective: Callable[[bool], Any]) -> Wait:
    """Start a collective beside what the caller does next.

    The wait keeps the collective, and so its tensors: they belong to the caller's stream, whose
    next tensors would take their memory while the other stream still reads it.
    """
    if device.type != "cuda":
        wait: Wait = collective(True).wait
        return wait
    stream = _stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        collective(False)
        done.record(stream)

    def wait_here(tensors_of: object = collective) -> None:
        torch.cuda.current_stream(device).wait_event(done)

    return wait_here


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
