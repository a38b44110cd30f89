"""This rank's gradients, dX summed over all ranks.

For mean and sum, strategies of one pass give them with the statistics, as on one device: logits,
local statistics, one all-gather, G, dX on its way to the other ranks while dW is computed. 6NDV
over all ranks. What is sent is float32 and rounded once, after the sum; ``accumulate=
"weight_dtype"`` halves the bytes. The other strategies, and gradients for one upstream value per
token, take two passes and round each rank's part of dX.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from flce_tune.kernels import strategies
from flce_tune.kernels.config import Config
from flce_tune.kernels.parallel.hidden import GradientSum
from flce_tune.kernels.parallel.job import Job
from flce_tune.kernels.parallel.merge import nothing, start_merge, stored_logits
from flce_tune.kernels.problem import sizes
from flce_tune.kernels.strategies.base import OnePass
from flce_tune.kernels.strategies.common import concatenate, gradient_dtype
from flce_tune.kernels.strategies.peers import RowGradient
from flce_tune.kernels.values import Coefficients, Gradients, Inputs, Statistics, Wanted


class SplitPeers:
    """The ranks of a job; see ``strategies.peers``."""

    parts = 2
    others = True

    def __init__(self, job: Job, row_weight: Tensor) -> None:
        self._job, self._row_weight = job, row_weight

    def widest(self, vocab: int) -> int:
        """The most columns any rank has."""
        return self._job.shard.widest

    def exchange(
        self, rows: slice, local: Statistics, raw: Tensor | None = None
    ) -> Callable[[], RowGradient]:
        """Begin to merge the statistics of some tokens."""
        job, row_weight = self._job, self._row_weight[rows]
        finish = start_merge(
            job.shard,
            job.labels.rows(rows),
            local,
            stored_logits(raw, local, job.loss),
            aside=len(row_weight) < len(self._row_weight),  # others' work comes between
        )

        def exchanged() -> RowGradient:
            merged = finish()
            return RowGradient(merged, *job.coefficients(merged, row_weight, rows))

        return exchanged

    def hidden_sum(self, x: Tensor, dtype: torch.dtype) -> GradientSum:
        """Make room for dX in the dtype it is sent in."""
        job = self._job
        sent = torch.promote_types(dtype, torch.float32) if job.accumulate == "fp32" else dtype
        partial = torch.empty(x.shape, dtype=sent, device=x.device)
        return GradientSum(job.shard, partial, dtype, sequence_parallel=job.sequence_parallel)


def train(
    job: Job,
    inputs: Inputs,
    row_weight: Tensor,  # [N] r_i, 0 for ignored rows
    wanted: Wanted,
    config: Config,
) -> tuple[Statistics, Gradients]:
    """Statistics over the whole vocabulary, and the gradients of Σ_i r_i·loss_i."""
    if not (wanted.dx or wanted.dw or wanted.db):
        return job.evaluate(inputs, wanted, config), Gradients()
    strategy = strategies.get(config.strategy)
    if not isinstance(strategy, OnePass):
        merged = job.evaluate(inputs, wanted, config)
        stats, given = job.coefficients(merged, row_weight)
        return merged, backward(job, inputs, stats, given, wanted, config)
    peers = SplitPeers(job, row_weight)
    if inputs.vocab == 0:
        return _without_columns(job, inputs, wanted, config, strategy, peers)
    return strategy.train(inputs, row_weight, job.loss, wanted, config, peers)


def _without_columns(
    job: Job,
    inputs: Inputs,
    wanted: Wanted,
    config: Config,
    strategy: OnePass,
    peers: SplitPeers,
) -> tuple[Statistics, Gradients]:
    """What a rank without classes does: join the others' collectives, in their order."""
    gradients = no_gradients(inputs.x, inputs.weight, wanted)
    dx = None
    if gradients.dx is not None:
        dx = peers.hidden_sum(inputs.x, gradients.dx.dtype)
        dx.partial.zero_()
    problem = sizes(inputs.x, job.shard.widest)
    found = []
    for meeting in strategy.meetings(config, problem, peers.parts):
        pending = []
        for rows in meeting.parts:
            local = nothing(rows.stop - rows.start, inputs.x, job.loss, wanted)
            pending.append(peers.exchange(rows, local))
        found += [exchanged().merged for exchanged in pending]
        if dx is not None:
            dx.ready(meeting.rows)
    dx_sum = None if dx is None else dx.result()
    return concatenate(found), Gradients(dx_sum, gradients.dw, gradients.db)


def backward(
    job: Job,
    inputs: Inputs,
    statistics: Statistics,
    coefficients: Coefficients,
    wanted: Wanted,
    config: Config,
) -> Gradients:
    """The gradients for given row coefficients, recomputing the logits."""
    if inputs.vocab == 0:
        gradients = no_gradients(inputs.x, inputs.weight, wanted)
    else:
        strategy = strategies.get(config.strategy)
        gradients = strategy.backward(inputs, statistics, coefficients, job.loss, wanted, config)
    if gradients.dx is None:
        return gradients
    dx = gradients.dx
    dx_sum = GradientSum(job.shard, dx, dx.dtype, sequence_parallel=job.sequence_parallel)
    dx_sum.ready(slice(0, len(dx)))
    return Gradients(dx=dx_sum.result(), dw=gradients.dw, db=gradients.db)


def no_gradients(x: Tensor, weight: Tensor, wanted: Wanted) -> Gradients:
    """Zeros."""
    dtype = gradient_dtype(x.dtype)
    return Gradients(
        dx=x.new_zeros(x.shape, dtype=dtype) if wanted.dx else None,
        dw=weight.new_zeros(weight.shape, dtype=dtype) if wanted.dw else None,
        db=weight.new_zeros(weight.shape[0], dtype=dtype) if wanted.db else None,
    )
