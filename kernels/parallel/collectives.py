"""The collectives of ``torch.distributed`` in use here, under their names of every torch."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def gathered(group: ProcessGroup, mine: Tensor) -> Tensor:
    """Every rank's tensor of this shape, [ranks, ...]."""
    if group.size() == 1:
        return mine[None]
    parts = torch.empty(group.size(), *mine.shape, dtype=mine.dtype, device=mine.device)
    _gather(parts.view(-1), mine.contiguous().view(-1), group=group)
    return parts


def start_sum(group: ProcessGroup, tensor: Tensor) -> dist.Work:
    """Begin to replace the tensor by the sum over the ranks."""
    work: dist.Work = dist.all_reduce(tensor, group=group, async_op=True)
    return work


def start_scattered_sum(group: ProcessGroup, tensor: Tensor, mine: Tensor) -> dist.Work:
    """Begin to write this rank's part of the sum over the ranks, cut along the first dimension."""
    work: dist.Work = _scatter(mine, tensor, group=group, async_op=True)
    return work
