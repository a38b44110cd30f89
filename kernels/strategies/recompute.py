"""``recompute``: a forward that stores no logits, a backward by vocabulary slabs. 8NDV.

Forward: the lse of every row, from a GEMM that keeps only tile statistics (or, without such a
kernel, from blocks of logits that are thrown away). Backward: per slab of the vocabulary,
recompute the logits, turn them into G, write dW[slab] = Gᵀ·x once, add G·W[slab] to dX. No
atomics, no [V, D] accumulator; dX has one between slabs. The path for a loss per token, for a
second backward, and, its first half, for evaluation.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from flce_tune.kernels import loss as losses
from flce_tune.kernels.backends import (
    backend_of,
    even_parts,
    logits_buffer,
    must_be_packed,
    part_of,
    part_size,
)
from flce_tune.kernels.config import Config
from flce_tune.kernels.problem import Device, Problem
from flce_tune.kernels.products import Sum, multiply
from flce_tune.kernels.strategies import common, slabs
from flce_tune.kernels.values import (
    Coefficients,
    Gradients,
    Inputs,
    LossSpec,
    Statistics,
    Wanted,
)

SLAB_MULTIPLE = 256
SLABS = (1024, 2048, 4096, 8192, 16384)


class Recompute:
    """Vocabulary slabs; see the module's text."""

    name = "recompute"
    deterministic = True

    def reject(self, config: Config, problem: Problem, device: Device) -> str | None:
        """Say why the config cannot run here, or None if it can."""
        if config.slab is None:
            return "recompute needs a slab, the number of vocabulary columns per slab"
        if config.chunk is not None:
            return f"recompute has no chunk, got {config.chunk}"
        summed = config.slab < problem.vocab
        return common.reject_gemms(config, problem, device, accumulated="dx" if summed else "")

    def space(self, problem: Problem, device: Device) -> Iterator[Config]:
        """Every slab and accumulator with the base GEMMs; every GEMM at the default slab."""
        usual = self.default(problem, device).slab
        for slab in sorted({*SLABS, usual or SLABS[0]}):
            if slab >= problem.vocab and slab != usual:
                continue
            choose = common.gemm_variations if slab == usual else common.gemm_bases
            for accumulator in common.accumulators(problem, "dx"):
                for products in choose(problem, device, "dx", accumulator):
                    yield products.config(self.name, slab=slab, accumulator=accumulator)

    def default(self, problem: Problem, device: Device) -> Config:
        """Slabs of 256 MiB of logits; a forward that stores none where a tile fits Hopper's."""
        columns = (256 << 20) // (problem.tokens * problem.itemsize)
        slab = max(SLAB_MULTIPLE, columns // SLAB_MULTIPLE * SLAB_MULTIPLE)
        return Config(
            self.name,
            logits=common.preferred_tile("logits", problem, device),
            slab=min(slab, SLABS[-1]),
            accumulator=common.accumulators(problem, "dx")[0],
        )

    def workspace(self, config: Config, problem: Problem) -> int:
        """A slab of logits, or the forward's buffer if larger, and dX's sums."""
        slab = part_size(problem.vocab, self._slab(config, problem.vocab), SLAB_MULTIPLE)
        if config.logits is None:
            rows = slabs.row_blocks(problem.tokens, slab, problem.itemsize)[0].stop
            forward = common.logits_bytes(rows, slab, problem, None)
        else:
            forward = common.evaluation_bytes(config.logits, problem)
        if problem.mode == "eval":
            return forward
        backward = common.logits_bytes(problem.tokens, slab, problem, None)
        backward += common.partial_sum_bytes(config, problem, problem.tokens)
        if slab < problem.vocab:
            backward += common.accumulator_bytes(config, problem, problem.tokens)
        return max(forward, backward)

    def products(self, config: Config, problem: Problem) -> float:
        """The three GEMMs, and the logits once more."""
        return 4.0

    def _slab(self, config: Config, vocab: int) -> int:
        return vocab if config.slab is None else min(config.slab, vocab)

    def train(
        self,
        inputs: Inputs,
        row_weight: Tensor,
        loss: LossSpec,
        wanted: Wanted,
        config: Config,
    ) -> tuple[Statistics, Gradients]:
        """Compute statistics and the gradients of Σ_i r_i·loss_i in one go."""
        everything = [slice(0, len(inputs.x))]
        statistics = self._statistics(inputs, loss, wanted, config, everything)
        given = backend_of(inputs.x).coefficients(inputs, statistics, row_weight, loss)
        return statistics, self._gradients(
            inputs, statistics, given, loss, wanted, config, everything
        )

    def evaluate(
        self, inputs: Inputs, loss: LossSpec, wanted: Wanted, config: Config
    ) -> Statistics:
        """Compute statistics only."""
        blocks = self._row_blocks(inputs, config)
        return self._statistics(inputs, loss, wanted, config, blocks)

    def _row_blocks(self, inputs: Inputs, config: Config) -> list[slice]:
        """Tokens per GEMM where forward and backward are calls of their own."""
        if config.logits is not None:
            return [slice(0, len(inputs.x))]
        slab = self._slabs(inputs, config)[0].stop
        return slabs.row_blocks(len(inputs.x), slab, inputs.x.element_size())

    def _slabs(self, inputs: Inputs, config: Config) -> list[slice]:
        return list(even_parts(inputs.vocab, self._slab(config, inputs.vocab), SLAB_MULTIPLE))

    def _statistics(
        self, inputs: Inputs, loss: LossSpec, wanted: Wanted, config: Config, blocks: list[slice]
    ) -> Statistics:
        if config.logits is None:
            packed = must_be_packed(inputs.bias, config)
            columns = self._slabs(inputs, config)
            return slabs.evaluate(inputs, loss, wanted, blocks, columns, packed=packed)
        rows = common.evaluation_rows(len(inputs.x), inputs.vocab, config.logits)
        return common.evaluate(inputs, loss, wanted, config, rows)

    def backward(
        self,
        inputs: Inputs,
        statistics: Statistics,
        coefficients: Coefficients,
        loss: LossSpec,
        wanted: Wanted,
        config: Config,
    ) -> Gradients:
        """Compute the gradients for given row coefficients, recomputing the logits."""
        blocks = self._row_blocks(inputs, config)
        return self._gradients(inputs, statistics, coefficients, loss, wanted, config, blocks)

    def _gradients(
        self,
        inputs: Inputs,
        statistics: Statistics,
        coefficients: Coefficients,
        loss: LossSpec,
        wanted: Wanted,
        config: Config,
        blocks: list[slice],  # of the tokens, as the statistics were computed
    ) -> Gradients:
        x, weight = inputs.x, inputs.weight
        (n, hidden), vocab = x.shape, weight.shape[0]
        bounds = self._slabs(inputs, config)
        dtype = common.gradient_dtype(x.dtype)
        packed = must_be_packed(inputs.bias, config)
        buffer = logits_buffer(n, bounds[0].stop, x, packed=packed)
        dw = weight.new_empty(vocab, hidden, dtype=dtype) if wanted.dw else None
        db = torch.empty(vocab, dtype=dtype, device=x.device) if wanted.db else None
        dx = None
        if wanted.dx:
            out = x.new_empty(n, hidden, dtype=dtype)
            dx = Sum(out, len(bounds), config.accumulator, config.dx, "v")
        lse, target_logit = statistics.lse, statistics.target_logit
        parts = [
            (
                rows,
                inputs.rows(rows),
                replace(statistics, lse=lse[rows], target_logit=target_logit[rows]),
                common.coefficient_rows(coefficients, rows),
            )
            for rows in blocks
        ]
        for columns in bounds:
            g = part_of(buffer, n, columns.stop - columns.start, packed=packed)
            for rows, part, stats, given in parts:
                backend_of(x).slab_gradient(
                    part, columns, stats, given, loss, g[rows], config.logits
                )
            if dw is not None:
                multiply(g.t(), x, dw[columns], config.dw, "n")
            if dx is not None:
                dx.add(g, weight[columns])
            if db is not None:
                db[columns] = g.sum(0, dtype=losses.statistics_dtype(x.dtype)).to(dtype)
        return Gradients(dx=None if dx is None else dx.result(), dw=dw, db=db)
