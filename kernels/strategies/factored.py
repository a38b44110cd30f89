"""``factored``: token chunks whose logits are stored as softmax numerators. 6NDV.

As ``chunked``, without its pass over the logits: the GEMM stores exponentials, and the row factors
that make G of them go to dX's epilogue and to x. While the first chunk is worked on, dW holds
nothing yet and its storage takes part of that chunk's blocks (see ``stored``), so that the first
chunk has more tokens than the workspace has room for: N + D of them where dW would hold D. One
chunk of all tokens writes dW once.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from flce_tune.kernels import loss as losses
from flce_tune.kernels.backends import even_parts
from flce_tune.kernels.config import Accumulator, Config
from flce_tune.kernels.numerators import ROW_MULTIPLE, Blocks, factors, padded, primitives_of
from flce_tune.kernels.problem import DTYPES, Device, Problem
from flce_tune.kernels.products import Sum
from flce_tune.kernels.strategies import common, stored
from flce_tune.kernels.strategies.recompute import Recompute
from flce_tune.kernels.values import Gradients, Inputs, LossSpec, Statistics, Wanted

CHUNKS = (512, 1024, 2048, 3072, 4096, 6144, 8192, 12288, 16384)


class Factored(Recompute):
    """Chunks of numerators; see the module's text."""

    name = "factored"

    def reject(self, config: Config, problem: Problem, device: Device) -> str | None:
        """Say why the config cannot run here, or None if it can."""
        if config.chunk is None:
            return "factored needs a chunk, the tokens whose numerators the workspace holds"
        if reason := stored.reject_problem(config, problem, device):
            return reason
        summed = len(_chunks(problem.tokens, problem.hidden, problem.vocab, config)) > 1
        return common.reject_gemms(config, problem, device, accumulated="dw" if summed else "")

    def space(self, problem: Problem, device: Device) -> Iterator[Config]:
        """Every chunk, slab and accumulator with tiles for all GEMMs; every GEMM at the default."""
        usual = self.default(problem, device)
        if problem.mode != "train" or stored.reject_problem(usual, problem, device):
            return
        for chunk in sorted({*CHUNKS, usual.chunk or CHUNKS[0]}):
            if chunk >= problem.tokens and chunk != usual.chunk:
                continue
            for slab in stored.SLABS:
                everything = chunk == usual.chunk and slab == usual.slab
                choose = common.gemm_variations if everything else common.gemm_bases
                for accumulator in common.accumulators(problem):
                    for products in choose(problem, device):
                        yield products.config(
                            self.name, chunk=chunk, slab=slab, accumulator=accumulator
                        )

    def default(self, problem: Problem, device: Device) -> Config:
        """Chunks of 1 GiB of numerators, slabs of 4096 columns."""
        rows = (1 << 30) // (problem.vocab * problem.itemsize)
        chunk = max(ROW_MULTIPLE, rows // ROW_MULTIPLE * ROW_MULTIPLE)
        return Config(
            self.name,
            chunk=min(chunk, padded(problem.tokens)),
            slab=4096,
            logits=common.preferred_tile("logits", problem, device),
            accumulator=common.accumulators(problem)[0],
        )

    def workspace(self, config: Config, problem: Problem) -> int:
        """Numerators of a chunk, the forward's tile sums or scaled x, and dW's accumulator."""
        if problem.mode != "train" or "per_token" in problem.features:
            return super().workspace(config, problem)
        hidden, vocab = problem.hidden, problem.vocab
        slab = stored.slab_of(config, vocab)
        chunks = _chunks(problem.tokens, hidden, vocab, config)
        rows = max(map(_rows, chunks))
        total = _buffer_elements(chunks, vocab, slab) * problem.itemsize
        backward = rows * hidden * problem.itemsize
        if config.dx is None or 0 < chunks[0][1] * slab < vocab:
            of_dx = replace(config, accumulator=_dx_accumulator(config, DTYPES[problem.dtype]))
            backward += common.accumulator_bytes(of_dx, problem, rows * hidden)
        total += max(stored.forward_bytes(config, problem, rows), backward)
        if len(chunks) > 1:
            total += common.accumulator_bytes(config, problem, vocab * hidden)
        return total

    def train(
        self,
        inputs: Inputs,
        row_weight: Tensor,
        loss: LossSpec,
        wanted: Wanted,
        config: Config,
    ) -> tuple[Statistics, Gradients]:
        """Compute statistics and the gradients of Σ_i r_i·loss_i in one go."""
        x, weight = inputs.x, inputs.weight
        (n, hidden), vocab = x.shape, weight.shape[0]
        slab = stored.slab_of(config, vocab)
        chunks = _chunks(n, hidden, vocab, config)
        out = weight.new_empty(vocab, hidden)
        dw = Sum(out, len(chunks), config.accumulator, config.dw, "n")
        primitives = primitives_of(x)
        buffer = x.new_empty(_buffer_elements(chunks, vocab, slab))
        dx = x.new_empty(n, hidden) if wanted.dx else None
        db = None
        if wanted.db:
            db = weight.new_zeros(vocab, dtype=losses.statistics_dtype(x.dtype))
        parts = []
        for rows, count in chunks:
            some = inputs.rows(rows)
            home = _Home(out, buffer, len(some.x), slab, count)
            of_chunk = None
            if dx is not None:
                accumulator = _dx_accumulator(config, x.dtype)
                of_chunk = Sum(dx[rows], len(home.blocks), accumulator, config.dx, "v", scaled=True)
            statistics, totals = stored.forward(some, row_weight[rows], loss, home.blocks, config)
            given = losses.coefficients(some, statistics, row_weight[rows], loss)
            found = factors(some, totals, statistics, given, loss)
            for blocks in home.blocks:
                primitives.set_labels(blocks, some.target, found.label)
            scaled = torch.empty_like(some.x)
            primitives.scaled_rows(some.x, found.row, scaled)
            products = stored.Products(weight, of_chunk, db)
            products.add(home.blocks, scaled, found.row, dw, home.groups)
            if of_chunk is not None:
                of_chunk.result()
            parts.append(statistics)
        return common.concatenate(parts), Gradients(
            dx, dw.result(), None if db is None else db.to(x.dtype)
        )


def _dx_accumulator(config: Config, dtype: torch.dtype) -> Accumulator:
    """Of the first chunk's dX, whose blocks lie in two places."""
    return "split24" if config.dx is not None and dtype == torch.bfloat16 else "fp32"


class _Home:
    """Where a chunk's blocks lie: ``count`` in dW, the others in the workspace."""

    def __init__(self, dw: Tensor, buffer: Tensor, tokens: int, slab: int, count: int) -> None:
        vocab, hidden = dw.shape
        self.blocks: list[Blocks] = []
        self.groups: list[Blocks] = []
        if count:
            self.blocks.append(stored.in_dw(dw, tokens, 0, slab, count))
            self.groups.extend(stored.without_overlap(self.blocks[0], hidden, vocab))
        if (first := count * slab) < vocab:
            elements = -(-(vocab - first) // slab) * slab * padded(tokens)
            data = buffer[:elements].view(-1, slab)
            self.blocks.append(Blocks(data, tokens, slice(first, vocab)))
            self.groups.append(self.blocks[-1])


@functools.lru_cache(256)
def _chunks(tokens: int, hidden: int, vocab: int, config: Config) -> tuple[tuple[slice, int], ...]:
    """Each chunk's tokens, and how many of its blocks lie in dW: only the first one's do."""
    assert config.chunk is not None
    slab = stored.slab_of(config, vocab)
    blocks = -(-vocab // slab)
    room = blocks * padded(config.chunk)

    def fits(rows: int) -> bool:
        return (blocks - stored.blocks_in_dw(rows, hidden, vocab, slab)) * padded(rows) <= room

    first = min(config.chunk, tokens)
    while first < tokens and fits(min(first + ROW_MULTIPLE, tokens)):
        first = min(first + ROW_MULTIPLE, tokens)
    count = min(blocks, stored.blocks_in_dw(first, hidden, vocab, slab))
    chunks = [(slice(0, first), count)]
    if first < tokens:
        for rows in even_parts(tokens - first, config.chunk, ROW_MULTIPLE):
            chunks.append((slice(first + rows.start, first + rows.stop), 0))
    return tuple(chunks)


def _rows(chunk: tuple[slice, int]) -> int:
    rows: int = chunk[0].stop - chunk[0].start
    return rows


def _buffer_elements(chunks: Sequence[tuple[slice, int]], vocab: int, slab: int) -> int:
    """Elements of the numerators outside dW, of the chunk that has most."""
    blocks = -(-vocab // slab)
    return max((blocks - chunk[1]) * slab * padded(_rows(chunk)) for chunk in chunks)
