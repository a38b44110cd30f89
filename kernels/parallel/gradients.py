"""This rank's gradients, dX summed over all ranks.

For mean and sum they come with the statistics, as ``chunked`` and ``full`` give them on one
device: per chunk of tokens logits, local statistics, one all-gather, G in place, dX on its way to
the other ranks while dW is computed. 6NDV over all ranks. What is sent is float32 and rounded once,
after the sum; ``accumulate="weight_dtype"`` halves the bytes. The other strategies, and gradients
for one upstream value per token, take two passes and round each rank's part of dX.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flce_tune.kernels import loss as losses
from flce_tune.kernels import strategies
from flce_tune.kernels.backends import backend_of, even_parts, logits_buffer, must_be_packed
from flce_tune.kernels.config import Config
from flce_tune.kernels.parallel.choice import ONE_PASS
from flce_tune.kernels.parallel.hidden import GradientSum
from flce_tune.kernels.parallel.job import Job
from flce_tune.kernels.parallel.merge import merge, nothing, stored_logits
from flce_tune.kernels.products import Sum, multiply
from flce_tune.kernels.strategies.chunked import CHUNK_MULTIPLE
from flce_tune.kernels.strategies.common import concatenate, gradient_dtype
from flce_tune.kernels.values import Coefficients, Gradients, Inputs, Statistics, Wanted


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
    if config.strategy not in ONE_PASS:
        merged = job.evaluate(inputs, wanted, config)
        stats, given = job.coefficients(merged, row_weight)
        return merged, backward(job, inputs, stats, given, wanted, config)
    n = len(inputs.x)
    bounds = list(even_parts(n, min(config.chunk or n, n), CHUNK_MULTIPLE))
    packed = must_be_packed(inputs.bias, config.logits)
    buffer = logits_buffer(bounds[0].stop, inputs.vocab, inputs.x, packed=packed)
    totals = _Totals(job, inputs, wanted, config, len(bounds))
    parts = []
    for rows in bounds:
        part, g = inputs.rows(rows), buffer[: rows.stop - rows.start]
        parts.append(_gradient(job, part, rows, row_weight[rows], wanted, config, out=g))
        totals.add(rows, g, part)
    return concatenate(parts), totals.result()


class _Totals:
    """Gradients over chunks of tokens: dX on its way to the other ranks before dW is computed."""

    def __init__(
        self, job: Job, inputs: Inputs, wanted: Wanted, config: Config, chunks: int
    ) -> None:
        (n, hidden), device = inputs.x.shape, inputs.x.device
        self._dtype = dtype = gradient_dtype(inputs.x.dtype)
        self._config = config
        self._dx = self._dw = self._db = None
        if wanted.dx:
            sent = torch.promote_types(dtype, torch.float32) if job.accumulate == "fp32" else dtype
            dx = torch.empty(n, hidden, dtype=sent, device=device)
            self._dx = GradientSum(job.shard, dx, sequence_parallel=job.sequence_parallel)
        if wanted.dw:
            self._dw = torch.empty(inputs.vocab, hidden, dtype=dtype, device=device)
            self._dw_sum = Sum(self._dw, chunks, config.accumulator, config.dw, "n")
        if wanted.db:
            exact = losses.statistics_dtype(inputs.x.dtype)
            self._db = torch.zeros(inputs.vocab, dtype=exact, device=device)

    def add(
        self,
        rows: slice,
        g: Tensor,  # [n, V_local]
        part: Inputs,
    ) -> None:
        """Add some tokens' share."""
        if self._dx is not None:
            dx = self._dx.partial[rows]
            if part.vocab:
                multiply(g, part.weight, dx, self._config.dx, "v")
            else:
                dx.zero_()
            self._dx.ready(rows)
        if self._dw is not None and part.vocab:
            self._dw_sum.add(g.t(), part.x)
        if self._db is not None:
            self._db += g.sum(0, dtype=self._db.dtype)

    def result(self) -> Gradients:
        """The sums, each rounded once."""
        if self._dw is not None and len(self._dw):
            self._dw = self._dw_sum.result()
        return Gradients(
            dx=None if self._dx is None else self._dx.result().to(self._dtype),
            dw=self._dw,
            db=None if self._db is None else self._db.to(self._dtype),
        )


def _gradient(
    job: Job,
    part: Inputs,
    rows: slice,
    row_weight: Tensor,
    wanted: Wanted,
    config: Config,
    out: Tensor,  # [n, V_local]
) -> Statistics:
    """Statistics of some tokens over the whole vocabulary, and G of this rank's columns."""
    backend = backend_of(out)
    if part.vocab:
        local = backend.logits(part, job.loss, wanted, out, config.logits)
    else:
        local = nothing(len(part.x), part.x, job.loss, wanted)
    largest = stored_logits(out, local, job.loss)
    merged = merge(job.shard, job.labels.rows(rows), local, largest)
    if part.vocab:
        stats, given = job.coefficients(merged, row_weight, rows)
        backend.gradient(out, part, stats, given, job.loss, out=out)
    return merged


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
    dx_sum = GradientSum(job.shard, gradients.dx, sequence_parallel=job.sequence_parallel)
    dx_sum.ready(slice(0, len(gradients.dx)))
    return Gradients(dx=dx_sum.result(), dw=gradients.dw, db=gradients.db)


def no_gradients(x: Tensor, weight: Tensor, wanted: Wanted) -> Gradients:
    """Zeros."""
    dtype = gradient_dtype(x.dtype)
    return Gradients(
        dx=x.new_zeros(x.shape, dtype=dtype) if wanted.dx else None,
        dw=weight.new_zeros(weight.shape, dtype=dtype) if wanted.dw else None,
        db=weight.new_zeros(weight.shape[0], dtype=dtype) if wanted.db else None,
    )
