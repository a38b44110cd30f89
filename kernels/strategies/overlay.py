"""``overlay``: numerators kept in dW's own storage until dW is written. Between 6NDV and 8NDV.

dW [V, D] is written last, so its storage is free during the forward pass and holds what it can of
the softmax numerators E (see ``numerators``): D / N of them, all if N <= D. ``kept`` further
columns are held in the workspace; only what is left is recomputed, slab by slab, as in
``recompute``. dW is written once, without an accumulator.

Layout: blocks of ``slab`` columns, the first B of them right-aligned in dW. dX reads all blocks
before any is overwritten. Then block j, the j-th slab of the vocabulary, becomes dW[slab j]: that
ends at row (j+1)·slab, block j begins at element V·D - (B-j)·slab·N, and B is the largest count
for which the first never passes the second.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flce_tune.kernels import loss as losses
from flce_tune.kernels.backends import backend_of, even_parts
from flce_tune.kernels.config import Config
from flce_tune.kernels.numerators import (
    ROW_MULTIPLE,
    Blocks,
    factors,
    first_reference,
    padded,
    primitives_of,
    tile_columns,
)
from flce_tune.kernels.problem import Device, Problem
from flce_tune.kernels.products import Sum, multiply
from flce_tune.kernels.strategies import common
from flce_tune.kernels.strategies.recompute import SLAB_MULTIPLE, Recompute
from flce_tune.kernels.values import (
    Gradients,
    Inputs,
    LossSpec,
    Statistics,
    Wanted,
)

SLABS = (2048, 4096, 8448)
"""8448 columns are 33 tiles of 256: with 16 tiles of D = 4096 or 128 of N, whole waves on 132
multiprocessors."""
KEPT_SHARES = (8, 4, 2, 1)
"""Fractions of the vocabulary worth keeping."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Which columns' numerators live where."""

    overlaid: slice  # in dW
    kept: slice  # in the workspace
    recomputed: slice  # nowhere

    @classmethod
    def plan(cls, tokens: int, hidden: int, vocab: int, config: Config) -> Layout:
        """As many columns as fit in dW, then the config's, then the rest."""
        slab = _slab(config, vocab)
        rows = padded(tokens)
        storage = vocab * hidden
        blocks = min(
            (storage - slab * hidden) // (slab * rows),  # writing the first slab of dW
            (storage - slab * rows) // (slab * hidden),  # reading the last block
        )
        overlaid = max(0, blocks) * slab
        kept = min(vocab, overlaid + -(-(config.kept or 0) // slab) * slab)
        return cls(slice(0, overlaid), slice(overlaid, kept), slice(kept, vocab))

    @property
    def stored(self) -> tuple[slice, ...]:
        """The parts whose numerators live somewhere."""
        return tuple(part for part in (self.overlaid, self.kept) if part.stop > part.start)


class Overlay(Recompute):
    """Numerators in dW's storage; see the module's text."""

    name = "overlay"

    def reject(self, config: Config, problem: Problem, device: Device) -> str | None:
        """Say why the config cannot run here, or None if it can."""
        if reason := self._reject_problem(config, problem, device):
            return reason
        slab = _slab(config, problem.vocab)
        if config.logits is not None and slab % config.logits.v_block:
            return f"slab {slab} is not a multiple of the logits tile's {config.logits.v_block}"
        filled = tile_columns(config.logits, slab)
        if config.dx is not None and config.dx.v_block > filled:
            return f"the dx tile takes {config.dx.v_block} columns, a logits tile fills {filled}"
        plan = Layout.plan(problem.tokens, problem.hidden, problem.vocab, config)
        summed = _parts(plan, slab) > 1
        return common.reject_gemms(config, problem, device, accumulated="dx" if summed else "")

    def _reject_problem(self, config: Config, problem: Problem, device: Device) -> str | None:
        if config.slab is None:
            return "overlay needs a slab, the number of vocabulary columns per block"
        if config.chunk is not None:
            return f"overlay has no chunk, got {config.chunk}"
        if device.kind == "cuda" and config.logits is None:
            return "overlay needs a logits tile on a GPU: cuBLAS computes no exponentials"
        if problem.dtype == "float16":
            return "overlay keeps exponentials, for which float16 has too few exponents"
        unknown = {"softcap", "label_smoothing", "statistics"} & set(problem.features)
        if unknown and problem.mode == "train":
            return f"overlay knows no {', '.join(sorted(unknown))}"
        return None

    def space(self, problem: Problem, device: Device) -> Iterator[Config]:
        """Every slab, share kept and accumulator with the base GEMMs; GEMMs at the default."""
        usual = self.default(problem, device)
        if problem.mode != "train" or self._reject_problem(usual, problem, device):
            return
        for products in common.gemm_variations(problem, device):
            for kept in (None, problem.vocab):
                yield replace(
                    products.config(self.name, slab=usual.slab, accumulator=usual.accumulator),
                    kept=kept,
                )
        shares = [None, *(-(-problem.vocab // share) for share in KEPT_SHARES)]
        for slab in SLABS:
            for kept in shares:
                for accumulator in common.accumulators(problem):
                    for products in common.gemm_bases(problem, device)[-1:]:
                        yield replace(
                            products.config(self.name, slab=slab, accumulator=accumulator),
                            kept=kept,
                        )

    def default(self, problem: Problem, device: Device) -> Config:
        """Slabs of 4096 columns, nothing kept beside dW."""
        return Config(
            self.name,
            logits=common.preferred_tile("logits", problem, device),
            slab=4096,
            accumulator=common.accumulators(problem)[0],
        )

    def workspace(self, config: Config, problem: Problem) -> int:
        """Kept numerators, then scaled x, or a slab where nothing is kept; dX's accumulator."""
        if problem.mode != "train" or "per_token" in problem.features:
            return super().workspace(config, problem)
        n, hidden, vocab = problem.tokens, problem.hidden, problem.vocab
        slab = _slab(config, vocab)
        plan = Layout.plan(n, hidden, vocab, config)
        kept = _columns(plan.kept, slab) * padded(n) * problem.itemsize
        tiles = -(-vocab // tile_columns(config.logits, slab)) + 2
        sums = 8 * min(n, _rows_per_step(tiles)) * tiles
        elements = max(n * hidden, 0 if kept else _slab_elements(plan, n, slab))
        backward = elements * problem.itemsize
        if _parts(plan, slab) > 1 or config.dx is None:
            backward += common.accumulator_bytes(config, problem, n * hidden)
        return kept + max(sums, backward)

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
        slab = _slab(config, vocab)
        plan = Layout.plan(n, hidden, vocab, config)
        dw = weight.new_empty(vocab, hidden)
        kept = x.new_empty(_columns(plan.kept, slab) * padded(n))
        stored = _blocks(plan, dw, kept, n, slab)
        statistics, totals = _forward(inputs, row_weight, loss, stored, plan, config)
        given = losses.coefficients(inputs, statistics, row_weight, loss)
        found = factors(inputs, totals, statistics, given, loss)
        for blocks in stored:
            primitives_of(x).set_labels(blocks, inputs.target, found.label)

        free = x.new_empty(max(n * hidden, 0 if kept.numel() else _slab_elements(plan, n, slab)))
        scaled = torch.mul(x, found.row[:, None], out=free[: n * hidden].view(n, hidden))
        dx = None
        if wanted.dx:
            dx = Sum(
                (n, hidden), x.dtype, x.device, _parts(plan, slab), config.accumulator,
                config.dx, "v", scaled=True,
            )  # fmt: skip
            dx.add_numerators(stored, weight, found.row)
        db = weight.new_empty(vocab) if wanted.db else None
        for blocks in stored:
            for columns, e in blocks.parts():
                if db is not None:
                    db[columns] = _weighted_sum(e, found.row).to(db.dtype)
                multiply(e.t(), scaled, dw[columns], config.dw, "n")

        buffer = (kept if kept.numel() else free)[: padded(n) * slab].view(-1, slab)[:n]
        for columns in _slabs(plan.recomputed, slab):
            g = buffer[:, : columns.stop - columns.start]
            backend_of(x).slab_gradient(inputs, columns, statistics, given, loss, g, config.logits)
            if db is not None:
                db[columns] = g.sum(0, dtype=losses.statistics_dtype(x.dtype)).to(db.dtype)
            multiply(g.t(), x, dw[columns], config.dw, "n")
            if dx is not None:
                dx.add(g, weight[columns])
        return statistics, Gradients(dx=None if dx is None else dx.result(), dw=dw, db=db)


def _slab(config: Config, vocab: int) -> int:
    """Columns of a block: the config's, but no more than the vocabulary, rounded up to tiles."""
    assert config.slab is not None
    return min(config.slab, -(-vocab // SLAB_MULTIPLE) * SLAB_MULTIPLE)


def _parts(plan: Layout, slab: int) -> int:
    """How many parts dX is summed from."""
    return len(plan.stored) + len(list(_slabs(plan.recomputed, slab)))


def _columns(part: slice, slab: int) -> int:
    """Columns of the blocks that hold a part of the vocabulary."""
    blocks: int = -(-(part.stop - part.start) // slab)
    return blocks * slab


def _slab_elements(plan: Layout, tokens: int, slab: int) -> int:
    """Elements of the slab that recomputing needs, if it is needed."""
    return padded(tokens) * slab if plan.recomputed.stop > plan.recomputed.start else 0


def _slabs(part: slice, slab: int) -> Iterator[slice]:
    for start in range(part.start, part.stop, slab):
        yield slice(start, min(start + slab, part.stop))


def _rows_per_step(tiles: int) -> int:
    """Tokens whose tile sums fit the forward pass's budget."""
    return max(ROW_MULTIPLE, common.EVALUATION_BYTES // (8 * tiles) // ROW_MULTIPLE * ROW_MULTIPLE)


def _blocks(plan: Layout, dw: Tensor, kept: Tensor, tokens: int, slab: int) -> tuple[Blocks, ...]:
    """The stored parts: right-aligned in dW, and in the workspace."""
    storage = dw.view(-1)
    overlaid = _columns(plan.overlaid, slab) * padded(tokens)
    homes = ((storage[storage.numel() - overlaid :], plan.overlaid), (kept, plan.kept))
    return tuple(Blocks(home.view(-1, slab), tokens, part) for home, part in homes if home.numel())


def _forward(
    inputs: Inputs,
    row_weight: Tensor,  # [N]
    loss: LossSpec,
    stored: tuple[Blocks, ...],
    plan: Layout,
    config: Config,
) -> tuple[Statistics, Tensor]:
    """Fill the stored blocks; return the statistics and Σ_c 2^(t - R) [N]."""
    primitives = primitives_of(inputs.x)
    n, vocab = len(inputs.x), inputs.vocab
    slab = _slab(config, vocab)
    step = tile_columns(config.logits, slab)
    homes: list[Blocks | None] = [*stored]
    parts = [blocks.columns for blocks in stored]
    if plan.recomputed.stop > plan.recomputed.start:
        homes.append(None)
        parts.append(plan.recomputed)
    counts = [-(-(part.stop - part.start) // step) for part in parts]
    label_logit = primitives.label_logits(inputs, loss)
    first = first_reference(label_logit)
    merged = []
    for rows in even_parts(n, _rows_per_step(sum(counts)), ROW_MULTIPLE):
        some = inputs.rows(rows)
        sums = first.new_empty(2, sum(counts), len(some.x))
        references, totals = (list(kind.split(counts)) for kind in sums)
        for part, blocks, of_tiles, total in zip(parts, homes, references, totals, strict=True):
            primitives.numerators(
                some, part, first[rows], label_logit[rows], loss,
                None if blocks is None else blocks.data[rows.start :], padded(n), slab,
                of_tiles, total, config.logits,
            )  # fmt: skip
        merged.append(primitives.merge(sums[0], sums[1]))
        for blocks, of_tiles in zip(stored, references, strict=False):
            primitives.align(
                blocks, rows, of_tiles, merged[-1].reference, row_weight[rows], config.logits
            )
    lse = torch.cat([step.lse for step in merged])
    return Statistics(lse, label_logit), torch.cat([step.total for step in merged])


def _weighted_sum(
    e: Tensor,  # [n, v]
    factor: Tensor,  # [n]
) -> Tensor:  # [v], statistics dtype
    """Eᵀ·f; the factor as three bfloat16 terms, which are exact, where E is bfloat16 on a GPU."""
    if e.device.type != "cuda":
        return e.t().to(factor.dtype) @ factor
    terms = []
    for _ in range(3):
        terms.append(factor.to(e.dtype))
        factor = factor - terms[-1].to(factor.dtype)
    return torch.mm(e.t(), torch.stack(terms, 1), out_dtype=factor.dtype).sum(1)
