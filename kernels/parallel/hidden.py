"""The hidden states and their gradient between ranks: gathered, summed, scattered."""

from __future__ import annotations

import torch
from torch import Tensor

from flce_tune.kernels.parallel.collectives import (
    Wait,
    gathered,
    start_scattered_sum,
    start_sum,
)
from flce_tune.kernels.parallel.shard import Shard


def all_tokens(shard: Shard, x: Tensor, *, sequence_parallel: bool) -> Tensor:
    """x of all tokens; under sequence parallelism each rank has one part of them, in order."""
    if not sequence_parallel:
        return x
    return gathered(shard.group, x).flatten(0, 1)


class GradientSum:
    """dX summed over the ranks, while the caller goes on with dW.

    All-reduced part by part as the parts are ready; reduce-scattered when all of them are.
    """

    def __init__(
        self,
        shard: Shard,
        dx: Tensor,  # [N, D], this rank's part, to be filled before it is sent
        dtype: torch.dtype,  # of the result
        *,
        sequence_parallel: bool,
    ) -> None:
        self.partial = self._result = dx
        self._shard, self._dtype, self._scatter = shard, dtype, sequence_parallel
        self._waits: list[Wait] = []

    def ready(self, rows: slice) -> None:
        """Send this rank's part of some rows' gradient; rows come in order."""
        if not self._scatter:
            self._waits.append(start_sum(self._shard.group, self.partial[rows]))
        elif rows.stop == len(self.partial):
            n, hidden = self.partial.shape
            self._result = self.partial.new_empty(n // self._shard.size, hidden)
            self._waits.append(start_scattered_sum(self._shard.group, self.partial, self._result))

    def result(self) -> Tensor:
        """The sum of what all ranks sent; a GPU waits, its host does not."""
        for wait in self._waits:
            wait()
        return self._result.to(self._dtype)
