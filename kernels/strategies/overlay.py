"""``overlay``: the gradients' own storage holds numerators until they are written. 6 to 8NDV.

The forward pass leaves in dW as many columns of softmax numerators as fit, D / N of them, nearly
all if N <= D, and those of one more block in the workspace. Where that is not all, dX's storage
takes the first D columns (see ``HiddenHome``). One pass makes G of them, in place: the rows of dW
and the part of dX that follow from dX's columns, dX's next parts, and the next slabs of dW. The
rest of dW is still free: it takes the recomputed G of the next columns, with the workspace's block
again, and so on. dW is written once, without an accumulator; dX has one between its parts.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from flce_tune.kernels import loss as losses
from flce_tune.kernels.backends import even_parts
from flce_tune.kernels.config import Config
from flce_tune.kernels.numerators import ROW_MULTIPLE, Blocks, padded, primitives_of
from flce_tune.kernels.problem import Device, Problem, sizes
from flce_tune.kernels.products import Sum
from flce_tune.kernels.strategies import common, stored
from flce_tune.kernels.strategies.labels import Labels, first_references
from flce_tune.kernels.strategies.peers import Alone, Meeting, Own, Peers
from flce_tune.kernels.strategies.recompute import Recompute
from flce_tune.kernels.values import Gradients, Inputs, LossSpec, Statistics, Wanted

ELEMENTS_AHEAD = 1 << 22
"""Most elements of dX computed at once while its storage holds numerators: 128 tiles by hand, for
an H200's 132 multiprocessors."""
LEAST_GAIN = 0.04
"""Of the vocabulary, for which dX's storage is used: spare rows and one more part of dX cost more
than 1 % at 8192 × 2304 × 256000, where it saves 0.9 % of the columns."""


class Overlay(Recompute):
    """Numerators, then gradients, in the gradients' storage; see the module's text."""

    name = "overlay"

    def reject(self, config: Config, problem: Problem, device: Device) -> str | None:
        """Say why the config cannot run here, or None if it can."""
        if config.chunk is not None:
            return f"overlay has no chunk, got {config.chunk}"
        if reason := stored.reject_problem(config, problem, device):
            return reason
        summed = _parts(_rounds(problem, config)) > 1
        return common.reject_gemms(config, problem, device, accumulated="dx" if summed else "")

    def space(self, problem: Problem, device: Device) -> Iterator[Config]:
        """Every slab and accumulator with tiles for all GEMMs; every GEMM at the default slab."""
        usual = self.default(problem, device)
        if problem.mode != "train" or stored.reject_problem(usual, problem, device):
            return
        for slab in sorted({*stored.fitted_slabs(problem, device), usual.slab or 0}):
            choose = common.gemm_variations if slab == usual.slab else common.gemm_bases
            for accumulator in common.accumulators(problem, "dx"):
                for products in choose(problem, device, "dx", accumulator):
                    yield products.config(self.name, slab=slab, accumulator=accumulator)

    def default(self, problem: Problem, device: Device) -> Config:
        """Slabs of 4096 columns, tiles for all GEMMs."""
        return common.preferred_tiles(problem, device).config(
            self.name,
            slab=4096,
            accumulator=common.accumulators(problem, "dx")[-1],
        )

    def workspace(self, config: Config, problem: Problem) -> int:
        """A block, rows ahead of dX's numerators, and the forward's tile sums or dX's."""
        if not stored.in_one_pass(problem):
            return super().workspace(config, problem)
        n, rounds = problem.tokens, _rounds(problem, config)
        # A frozen input or ranks that share the vocabulary leave dX's storage alone.
        block = _buffer_elements(n, _rounds(problem, config, dx_is_free=False)) * problem.itemsize
        backward = common.partial_sum_bytes(config, problem, n)
        if _in_dx(rounds):
            hidden = problem.hidden
            block += HiddenHome.spare_rows(n, hidden) * hidden * problem.itemsize
            of_columns = replace(problem, vocab=hidden)
            for rows in HiddenHome.pieces(n, hidden):
                sums = common.partial_sum_bytes(config, of_columns, rows.stop - rows.start)
                backward = max(backward, sums)
        if _parts(rounds) > 1 or config.dx is None:
            backward += common.accumulator_bytes(config, problem, n)
        return block + max(stored.forward_bytes(config, problem, n), backward)

    def products(self, config: Config, problem: Problem) -> float:
        """As ``recompute``, but for the columns whose numerators are held at first."""
        if not stored.in_one_pass(problem) or config.slab is None:
            return super().products(config, problem)
        held = _rounds(problem, config)[0].end
        return 4.0 - min(1.0, held / problem.vocab)

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
        everything = slice(0, len(inputs.x))
        x, weight = inputs.x, inputs.weight
        (n, hidden), vocab = x.shape, weight.shape[0]
        primitives = primitives_of(x)
        rounds = _rounds(sizes(x, vocab), config, dx_is_free=wanted.dx and not peers.others)
        out = weight.new_empty(vocab, hidden)
        home = stored.Home.of(out, x)
        in_dx = HiddenHome(x) if _in_dx(rounds) else None
        buffer = x.new_empty(_buffer_elements(n, rounds)).view(-1, rounds[0].slab)
        known = Labels(*first_references(inputs, loss, others=peers.others))
        first, _ = rounds[0].place(home, buffer, n)
        if in_dx is not None:
            first.insert(0, in_dx.blocks)
        local, totals = stored.forward(inputs, row_weight, loss, first, config, known)
        gradient = peers.exchange(everything, local)()

        found = primitives.factors(
            inputs, totals, local, gradient.statistics, gradient.given, row_weight, loss
        )
        for blocks in first:
            primitives.scale_blocks(blocks, found.row)
            primitives.set_labels(blocks, inputs.target, found.label)
        dx = db = given = None
        if wanted.db:
            db = weight.new_zeros(vocab, dtype=losses.statistics_dtype(x.dtype))
            stored.add_bias_gradient(db, first, inputs.target, None)
        if wanted.dx:
            hidden_sum = in_dx or peers.hidden_sum(x, x.dtype)
            dx = Sum(hidden_sum.partial, _parts(rounds), config.accumulator, config.dx, "v")
            if in_dx is not None:
                Sum(out, 1, "weight_dtype", config.dw, "n").add_transposed([in_dx.blocks], x)
                in_dx.add_to(dx, weight)
        for step in rounds:
            held, groups = step.place(home, buffer, n)
            if step is not rounds[0]:
                given = given or gradient.coefficients(inputs, row_weight, loss)
                for blocks in held:
                    primitives.gradients(
                        inputs, blocks, gradient.statistics, given, loss, config.logits
                    )
                if db is not None:
                    stored.add_bias_gradient(db, held, inputs.target, None)
            if dx is not None:
                dx.add_blocks(held, weight)
                if step is rounds[-1]:
                    dx.result()
                    hidden_sum.ready(everything)
            Sum(
                out, 1, "weight_dtype", config.dw, "n",
                yielding=peers.others and step is rounds[-1],
            ).add_transposed(groups, x)  # fmt: skip
        return gradient.merged, Gradients(
            None if dx is None else hidden_sum.result(),
            out,
            None if db is None else db.to(x.dtype),
        )

    def meetings(self, config: Config, problem: Problem, parts: int) -> list[Meeting]:
        """Once a call."""
        everything = slice(0, problem.tokens)
        return [Meeting(everything, (everything,))]


class HiddenHome(Own):
    """dX [N, D], whose storage holds a block of the first D columns until dX is written.

    A token's numerators lie some rows behind its dX, so that dX, no more rows at a time, overwrites
    those of tokens whose dX is there. The block's dW is written before: the first rows, which are
    all in front of dW's own blocks.
    """

    def __init__(self, x: Tensor) -> None:
        tokens, hidden = x.shape
        storage = x.new_empty(tokens + self.spare_rows(tokens, hidden), hidden)
        super().__init__(storage[:tokens])
        block = storage[len(storage) - padded(tokens) :]
        self.blocks = Blocks(block, tokens, slice(0, hidden))

    @staticmethod
    def spare_rows(tokens: int, hidden: int) -> int:
        """Rows of the storage beyond dX's."""
        return _rows_ahead(tokens, hidden) + padded(tokens) - tokens

    @staticmethod
    def pieces(tokens: int, hidden: int) -> Iterator[slice]:
        """The rows of dX that are computed at a time, in order."""
        return even_parts(tokens, _rows_ahead(tokens, hidden), ROW_MULTIPLE)

    def add_to(self, dx: Sum, weight: Tensor) -> None:
        """Add the block's part of dX, which overwrites it."""
        for columns, g in self.blocks.parts():
            dx.add(g, weight[columns], self.pieces(*g.shape))


def _rows_ahead(tokens: int, hidden: int) -> int:
    """How many rows a token's numerators in dX's storage lie behind its dX."""
    rows = ELEMENTS_AHEAD // hidden // ROW_MULTIPLE * ROW_MULTIPLE
    return min(max(ROW_MULTIPLE, rows), padded(tokens))


@dataclass(frozen=True, slots=True)
class Round:
    """Some columns whose blocks are held at once, beside those in dX's storage."""

    start: int  # first column
    slab: int
    blocks: int  # in dW
    one_more: bool  # whether there are columns for the workspace's block

    @property
    def end(self) -> int:
        """The column behind the last, or more than there are."""
        return self.start + (self.blocks + self.one_more) * self.slab

    def place(
        self, dw: stored.Home, buffer: Tensor, tokens: int
    ) -> tuple[list[Blocks], list[Blocks]]:
        """The blocks, and how they may be turned into dW."""
        held: list[Blocks] = []
        groups: list[Blocks] = []
        if self.blocks:
            held.append(dw.blocks(tokens, self.start, self.slab, self.blocks))
            groups.extend(dw.groups(held[0]))
        if self.one_more:
            columns = slice(self.end - self.slab, min(self.end, dw.columns))
            held.append(Blocks(buffer, tokens, columns))
            groups.append(held[-1])
        return held, groups


@functools.lru_cache(256)
def _rounds(problem: Problem, config: Config, *, dx_is_free: bool = True) -> tuple[Round, ...]:
    """Cut the vocabulary into rounds.

    The first of them begins with column 0, or where dX's storage is free, and holding columns
    0 to D - 1 there leaves less to recompute by LEAST_GAIN, with column D.
    """
    hidden, vocab = problem.hidden, problem.vocab
    tiles = config.logits, config.dx, config.dw
    fits = hidden < vocab and all(tile is None or hidden % tile.v_block == 0 for tile in tiles)
    without = tuple(_cut(problem, config, 0))
    if not dx_is_free or not fits or len(without) == 1:
        return without
    with_dx = tuple(_cut(problem, config, hidden))
    gain = min(with_dx[0].end, vocab) - without[0].end
    return with_dx if gain >= LEAST_GAIN * vocab else without


def _cut(problem: Problem, config: Config, start: int) -> Iterator[Round]:
    """Rounds of the columns from ``start`` on."""
    tokens, hidden, vocab = problem.tokens, problem.hidden, problem.vocab
    slab = stored.slab_of(config, vocab)
    while start < vocab:
        blocks = stored.capacity(tokens, hidden, vocab, start, slab)
        blocks = min(blocks, -(-(vocab - start) // slab))
        one_more = start + blocks * slab < vocab
        yield Round(start, slab, blocks, one_more)
        start += slab * (blocks + one_more)


def _in_dx(rounds: Sequence[Round]) -> bool:
    """Whether dX's storage holds the columns before the first round's."""
    return rounds[0].start > 0


def _parts(rounds: Sequence[Round]) -> int:
    """Of how many products dX is the sum."""
    return _in_dx(rounds) + sum((step.blocks > 0) + step.one_more for step in rounds)


def _buffer_elements(tokens: int, rounds: Sequence[Round]) -> int:
    """Elements of the workspace's block, if there is one."""
    return padded(tokens) * rounds[0].slab if rounds[0].one_more else 0
