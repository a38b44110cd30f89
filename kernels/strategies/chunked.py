"""``chunked``: token chunks; all gradients are computed in the forward pass. 6NDV.

Per chunk of tokens: logits GEMM with row statistics, softmax gradient in place over the logits,
dX = G·W written once, dW += Gᵀ·x. Workspace: chunk × V logits, and the accumulator of dW beside
dW itself (4 bytes an element in float32, 1 as split24) when there is more than one chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from flce_tune.kernels import loss as losses
from flce_tune.kernels.backends import (
    backend_of,
    even_parts,
    logits_buffer,
    must_be_packed,
    part_size,
)
from flce_tune.kernels.config import Config
from flce_tune.kernels.problem import Device, Problem, sizes
from flce_tune.kernels.products import Sum, multiply
from flce_tune.kernels.strategies import common
from flce_tune.kernels.strategies.peers import Alone, Meeting, Peers
from flce_tune.kernels.values import (
    Coefficients,
    Gradients,
    Inputs,
    LossSpec,
    Statistics,
    Wanted,
)

CHUNK_MULTIPLE = 128
CHUNKS = (256, 512, 1024, 2048, 4096, 8192, 16384)


class Chunked:
    """Token chunks; see the module's text."""

    name = "chunked"
    deterministic = True

    def reject(self, config: Config, problem: Problem, device: Device) -> str | None:
        """Say why the config cannot run here, or None if it can."""
        if config.chunk is None:
            return "chunked needs a chunk, the number of tokens per chunk"
        return self._reject_common(config, problem, device)

    def _reject_common(self, config: Config, problem: Problem, device: Device) -> str | None:
        if config.slab is not None:
            return f"{self.name} has no slab, got {config.slab}"
        summed = config.chunk is not None and config.chunk < problem.tokens
        return common.reject_gemms(config, problem, device, accumulated="dw" if summed else "")

    def space(self, problem: Problem, device: Device) -> Iterator[Config]:
        """Every chunk and accumulator with the base GEMMs; every GEMM at the default chunk."""
        usual = self.default(problem, device).chunk
        for chunk in sorted({*CHUNKS, usual or CHUNKS[0]}):
            if chunk >= problem.tokens and chunk != usual:
                continue
            choose = common.gemm_variations if chunk == usual else common.gemm_bases
            for accumulator in common.accumulators(problem):
                for products in choose(problem, device, "dw", accumulator):
                    yield products.config(self.name, chunk=chunk, accumulator=accumulator)

    def default(self, problem: Problem, device: Device) -> Config:
        """Chunks of 512 MiB of logits: long enough for the GEMMs to run at full rate.

        The library's products, but what is scheduled by hand where that can be: not dX, whose
        tiles are too few in a chunk to fill a GPU.
        """
        rows = max(1, (512 << 20) // (problem.vocab * problem.itemsize))
        chunk = max(CHUNK_MULTIPLE, rows // CHUNK_MULTIPLE * CHUNK_MULTIPLE)
        products, accumulator = common.by_hand(problem, device)
        return replace(products, dx=None).config(
            self.name, chunk=min(chunk, 4096), accumulator=accumulator
        )

    def workspace(self, config: Config, problem: Problem) -> int:
        """Logits of a chunk, partial sums of dX, and the accumulator of dW."""
        chunk = self._chunk(config, problem.tokens)
        total = common.logits_bytes(chunk, problem.vocab, problem, config.logits)
        if problem.mode != "eval":
            total += common.partial_sum_bytes(config, problem, chunk)
        if problem.mode == "train" and chunk < problem.tokens:
            total += common.accumulator_bytes(config, problem, problem.vocab)
        return total

    def products(self, config: Config, problem: Problem) -> float:
        """The three GEMMs."""
        return 3.0

    def _chunk(self, config: Config, tokens: int) -> int:
        largest = tokens if config.chunk is None else config.chunk
        return part_size(tokens, max(1, min(largest, tokens)), CHUNK_MULTIPLE)

    def meetings(self, config: Config, problem: Problem, parts: int) -> list[Meeting]:
        """Chunk by chunk; ``full`` meets the other ranks once."""
        cut = parts if config.chunk is not None else 1
        found = []
        for rows in even_parts(problem.tokens, self._chunk(config, problem.tokens)):
            count = rows.stop - rows.start
            within = even_parts(count, -(-count // cut), CHUNK_MULTIPLE)
            found.append(Meeting(rows, tuple(_moved(part, rows.start) for part in within)))
        return found

    def train(
        self,
        inputs: Inputs,
        row_weight: Tensor,
        loss: LossSpec,
        wanted: Wanted,
        config: Config,
        peers: Peers | None = None,
    ) -> tuple[Statistics, Gradients]:
        """Compute statistics and the gradients of Σ_i r_i·loss_i in one go.

        Of a chunk cut in parts, each part's statistics are on their way to the peers while the next
        part's logits, or the gradient of the one before, are computed.
        """
        peers = peers or Alone()
        found: list[Statistics] = []

        def gradient(meeting: Meeting, buffer: Tensor) -> Iterator[slice]:
            backend, pending = backend_of(buffer), []
            for rows in meeting.parts:
                raw = buffer[_moved(rows, -meeting.rows.start)]
                local = backend.logits(inputs.rows(rows), loss, wanted, raw, config.logits)
                pending.append((rows, raw, peers.exchange(rows, local, raw)))
            for rows, raw, exchanged in pending:
                some, of_rows = inputs.rows(rows), exchanged()
                given = of_rows.coefficients(some, row_weight[rows], loss)
                backend.gradient(raw, some, of_rows.statistics, given, loss, out=raw)
                found.append(of_rows.merged)
                yield rows

        meetings = self.meetings(config, sizes(inputs.x, inputs.vocab), peers.parts)
        gradients = self._chunks(inputs, wanted, config, meetings, peers, gradient)
        return common.concatenate(found), gradients

    def evaluate(
        self, inputs: Inputs, loss: LossSpec, wanted: Wanted, config: Config
    ) -> Statistics:
        """Compute statistics only."""
        return common.evaluate(inputs, loss, wanted, config, self._chunk(config, len(inputs.x)))

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

        def gradient(meeting: Meeting, buffer: Tensor) -> Iterator[slice]:
            rows = meeting.rows
            stats = replace(
                statistics, lse=statistics.lse[rows], target_logit=statistics.target_logit[rows]
            )
            given = common.coefficient_rows(coefficients, rows)
            backend_of(buffer).slab_gradient(
                inputs.rows(rows), slice(0, inputs.vocab), stats, given, loss, buffer,
                config.logits,
            )  # fmt: skip
            yield rows

        meetings = self.meetings(config, sizes(inputs.x, inputs.vocab), 1)
        return self._chunks(inputs, wanted, config, meetings, Alone(), gradient)

    def _chunks(
        self,
        inputs: Inputs,
        wanted: Wanted,
        config: Config,
        meetings: Sequence[Meeting],
        peers: Peers,
        gradient: Callable[[Meeting, Tensor], Iterator[slice]],  # fills the buffer with G
    ) -> Gradients:
        x, vocab = inputs.x, inputs.vocab
        dtype = common.gradient_dtype(x.dtype)
        packed = must_be_packed(inputs.bias, config)
        buffer = logits_buffer(_rows(meetings[0]), vocab, x, packed=packed)
        dx = peers.hidden_sum(x, dtype) if wanted.dx else None
        dw = db = None
        if wanted.dw:
            out = x.new_empty(vocab, x.shape[1], dtype=dtype)
            dw = Sum(out, len(meetings), config.accumulator, config.dw, "n", yielding=peers.others)
        if wanted.db:
            wide = torch.float64 if dtype == torch.float32 else losses.statistics_dtype(dtype)
            db = torch.zeros(vocab, dtype=wide, device=x.device)
        for meeting in meetings:
            g = buffer[: _rows(meeting)]
            for rows in gradient(meeting, g):
                if dx is not None:
                    part = g[_moved(rows, -meeting.rows.start)]
                    multiply(part, inputs.weight, dx.partial[rows], config.dx, "v")
            if dx is not None:
                dx.ready(meeting.rows)
            if dw is not None:
                dw.add(g.t(), x[meeting.rows])
            if db is not None:
                db += g.sum(0, dtype=losses.statistics_dtype(dtype))
        return Gradients(
            dx=None if dx is None else dx.result(),
            dw=None if dw is None else dw.result(),
            db=None if db is None else db.to(dtype),
        )


def _moved(rows: slice, by: int) -> slice:
    return slice(rows.start + by, rows.stop + by)


def _rows(meeting: Meeting) -> int:
    count: int = meeting.rows.stop - meeting.rows.start
    return count
