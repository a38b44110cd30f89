"""``factored``: token chunks whose logits are stored as softmax numerators. 6NDV.

As ``chunked``, without its pass over the logits: the GEMM stores exponentials, and the row factors
that make G of them go to dX's epilogue and to x. While the first chunk is worked on, dW and its
accumulator hold nothing yet and take part of that chunk's blocks (see ``stored``), so that the
first chunk has more tokens than the workspace has room for. One chunk of all tokens writes dW once;
a slab of the whole vocabulary leaves dW's storage alone, and each product is one launch.
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
from flce_tune.kernels.label_sums import carried_bytes, label_sum_bytes
from flce_tune.kernels.numerators import (
    ROW_MULTIPLE,
    Blocks,
    padded,
    primitives_of,
)
from flce_tune.kernels.problem import DTYPES, Device, Problem, sizes
from flce_tune.kernels.products import Sum
from flce_tune.kernels.strategies import common, stored
from flce_tune.kernels.strategies.labels import Labels, LabelShare
from flce_tune.kernels.strategies.peers import Alone, Meeting, Peers
from flce_tune.kernels.strategies.recompute import Recompute
from flce_tune.kernels.values import Gradients, Inputs, LossSpec, Statistics, Wanted

CHUNKS = (256, 512, 768, 1024, 2048, 3072, 4096, 6144, 8192, 12288, 16384)


class Factored(Recompute):
    """Chunks of numerators; see the module's text."""

    name = "factored"

    def reject(self, config: Config, problem: Problem, device: Device) -> str | None:
        """Say why the config cannot run here, or None if it can."""
        if config.chunk is None:
            return "factored needs a chunk, the tokens whose numerators the workspace holds"
        if reason := stored.reject_problem(config, problem, device):
            return reason
        summed = len(_chunks(problem, config)) > 1
        return common.reject_gemms(config, problem, device, accumulated="dw" if summed else "")

    def space(self, problem: Problem, device: Device) -> Iterator[Config]:
        """Every chunk and accumulator; every slab and every GEMM at the default chunk."""
        usual = self.default(problem, device)
        if problem.mode != "train" or stored.reject_problem(usual, problem, device):
            return
        everything_at_once = padded(problem.tokens)
        shorter = {chunk for chunk in (*CHUNKS, usual.chunk or 0) if 0 < chunk < problem.tokens}
        for chunk in sorted({*shorter, everything_at_once}):
            slabs = list(stored.SLABS if chunk == usual.chunk else stored.SLABS[1:2])
            if chunk == everything_at_once:
                slabs.append(stored.whole_slab(problem.vocab))
            for slab in slabs:
                everything = chunk == usual.chunk and slab == usual.slab
                choose = common.gemm_variations if everything else common.gemm_bases
                for accumulator in common.accumulators(problem):
                    for products in choose(problem, device, "dw", accumulator):
                        yield products.config(
                            self.name, chunk=chunk, slab=slab, accumulator=accumulator
                        )

    def default(self, problem: Problem, device: Device) -> Config:
        """Chunks of 1 GiB of numerators, slabs of 4096 columns, tiles for all GEMMs."""
        rows = (1 << 30) // (problem.vocab * problem.itemsize)
        chunk = max(ROW_MULTIPLE, rows // ROW_MULTIPLE * ROW_MULTIPLE)
        return common.preferred_tiles(problem, device).config(
            self.name,
            chunk=min(chunk, padded(problem.tokens)),
            slab=4096,
            accumulator=common.accumulators(problem)[-1],
        )

    def workspace(self, config: Config, problem: Problem) -> int:
        """Numerators of a chunk, the forward's tile sums, dX's, or scaled x and labels', dW's."""
        if not stored.in_one_pass(problem):
            return super().workspace(config, problem)
        hidden, vocab = problem.hidden, problem.vocab
        slab = stored.slab_of(config, vocab)
        chunks = _chunks(problem, config)
        rows = max(map(_rows, chunks))
        total = _buffer_elements(chunks, vocab, slab) * problem.itemsize
        sums = common.partial_sum_bytes(config, problem, rows)
        if config.dx is None or 0 < sum(chunks[0][1]) * slab < vocab:
            of_dx = replace(config, accumulator=_dx_accumulator(config, DTYPES[problem.dtype]))
            sums += common.accumulator_bytes(of_dx, problem, rows)
        of_dw = rows * hidden * problem.itemsize
        if len(chunks) > 1:
            total += common.accumulator_bytes(config, problem, vocab)
        if config.dw is not None and config.dw.schedule != "compiler":
            of_dw += carried_bytes(rows, hidden)
            of_dw += label_sum_bytes(rows, vocab, hidden, slab) if len(chunks) == 1 else 0
        total += max(stored.forward_bytes(config, problem, rows), of_dw, sums)
        return total

    def products(self, config: Config, problem: Problem) -> float:
        """The three GEMMs; a loss per token is ``recompute``'s."""
        if not stored.in_one_pass(problem):
            return super().products(config, problem)
        return 3.0

    def train(
        self,
        inputs: Inputs,
        row_weight: Tensor,
        loss: LossSpec,
        wanted: Wanted,
        config: Config,
        peers: Peers | None = None,
    ) -> tuple[Statistics, Gradients]:
        """Compute statistics and the gradients of Σ_i r_i·loss_i in one go."""
        peers = peers or Alone()
        x, weight = inputs.x, inputs.weight
        hidden, vocab = x.shape[1], weight.shape[0]
        slab = stored.slab_of(config, vocab)
        chunks = _chunks(sizes(x, vocab), config, peers.widest(vocab))
        out = weight.new_empty(vocab, hidden)
        dw = Sum(out, len(chunks), config.accumulator, config.dw, "n", yielding=peers.others)
        primitives = primitives_of(x)
        buffer = x.new_empty(_buffer_elements(chunks, vocab, slab))
        homes = [stored.Home.of(home, x) for home in (out, dw.accumulator) if home is not None]
        dx = peers.hidden_sum(x, x.dtype) if wanted.dx else None
        db = None
        if wanted.db:
            db = weight.new_zeros(vocab, dtype=losses.statistics_dtype(x.dtype))
        parts = []
        lengths = [_rows(chunk) for chunk in chunks]
        known = Labels.of(inputs, loss, config, lengths, others=peers.others)
        for (rows, counts), labels in zip(chunks, known.split(lengths), strict=True):
            some, weights = inputs.rows(rows), row_weight[rows]
            blocks, groups = _place(homes, counts, buffer, len(some.x), vocab, slab)
            local, totals = stored.forward(some, weights, loss, blocks, config, labels)
            merged, statistics, given = peers.exchange(rows, local)()
            found = primitives.factors(
                some, totals, local, statistics, given, weights, loss, labels.order, rows.start
            )
            if db is not None:
                stored.add_bias_gradient(db, blocks, some.target, found)
            share = LabelShare.place(some, labels, x, found, blocks, config)
            if dx is not None:
                accumulator = _dx_accumulator(config, x.dtype)
                of_chunk = Sum(
                    dx.partial[rows], len(blocks), accumulator, config.dx, "v", scaled=True
                )
                of_chunk.add_blocks(blocks, weight, found.row, share.dx)
                of_chunk.result()
                dx.ready(rows)
                del of_chunk  # its accumulator makes room for scaled x
            scaled = torch.empty_like(some.x)
            primitives.scaled_rows(some.x, found.row, scaled)
            dw.add_transposed(groups, scaled, share.dw)
            del scaled
            parts.append(merged)
        return common.concatenate(parts), Gradients(
            None if dx is None else dx.result(),
            dw.result(),
            None if db is None else db.to(x.dtype),
        )

    def meetings(self, config: Config, problem: Problem, parts: int) -> list[Meeting]:
        """Chunk by chunk: once a call if one chunk takes all tokens."""
        return [Meeting(rows, (rows,)) for rows, _ in _chunks(problem, config)]


def _dx_accumulator(config: Config, dtype: torch.dtype) -> Accumulator:
    """Of the first chunk's dX, whose blocks lie in two places."""
    return "split24" if config.dx is not None and dtype == torch.bfloat16 else "fp32"


def _place(
    homes: Sequence[stored.Home],
    counts: Sequence[int],  # of blocks in each
    buffer: Tensor,  # for the others
    tokens: int,
    vocab: int,
    slab: int,
) -> tuple[list[Blocks], list[Blocks]]:
    """A chunk's blocks, and how they may be turned into dW."""
    blocks: list[Blocks] = []
    groups: list[Blocks] = []
    first = 0
    for home, count in zip(homes, counts, strict=False):
        if count:
            blocks.append(home.blocks(tokens, first, slab, count))
            groups.extend(home.groups(blocks[-1]))
            first += count * slab
    if first < vocab:
        elements = -(-(vocab - first) // slab) * slab * padded(tokens)
        blocks.append(Blocks(buffer[:elements].view(-1, slab), tokens, slice(first, vocab)))
        groups.append(blocks[-1])
    return blocks, groups


Chunk = tuple[slice, tuple[int, ...]]
"""Tokens, and how many of their blocks lie in dW, and in its accumulator."""


@functools.lru_cache(256)
def _chunks(problem: Problem, config: Config, widest: int | None = None) -> tuple[Chunk, ...]:
    """Cut the tokens: the first chunk as large as its blocks in dW allow, the others even.

    Ranks that share a vocabulary cut as the one with the ``widest`` part of it must.
    """
    assert config.chunk is not None
    tokens = problem.tokens
    cut = problem if widest is None else replace(problem, vocab=widest)

    def fits(rows: int) -> bool:
        blocks = -(-cut.vocab // stored.slab_of(config, cut.vocab))
        left = blocks - sum(_counts(cut, config, rows))
        return left * padded(rows) <= blocks * padded(config.chunk or 0)

    first = min(config.chunk, tokens)
    while first < tokens and fits(min(first + ROW_MULTIPLE, tokens)):
        first = min(first + ROW_MULTIPLE, tokens)
    chunks: list[Chunk] = [(slice(0, first), _counts(problem, config, first))]
    if first < tokens:
        for rows in even_parts(tokens - first, config.chunk, ROW_MULTIPLE):
            chunks.append((slice(first + rows.start, first + rows.stop), ()))
    return tuple(chunks)


def _counts(problem: Problem, config: Config, rows: int) -> tuple[int, ...]:
    """How many of the first chunk's blocks dW and its accumulator take, if it has so many rows."""
    slab = stored.slab_of(config, problem.vocab)
    blocks = -(-problem.vocab // slab)
    accumulator = common.accumulator_bytes(config, problem, 1) // problem.itemsize
    found: list[int] = []
    for per_column in (problem.hidden, accumulator if rows < problem.tokens else 0):
        if per_column:
            fit = stored.capacity(rows, per_column, problem.vocab, sum(found) * slab, slab)
            found.append(min(fit, blocks - sum(found)))
    return tuple(found)


def _rows(chunk: Chunk) -> int:
    rows: int = chunk[0].stop - chunk[0].start
    return rows


def _buffer_elements(chunks: Sequence[Chunk], vocab: int, slab: int) -> int:
    """Elements of the numerators outside dW, of the chunk that has most."""
    blocks = -(-vocab // slab)
    return max((blocks - sum(chunk[1])) * slab * padded(_rows(chunk)) for chunk in chunks)
