"""``overlay``: dW's own storage holds the numerators until dW is written. Between 6 and 8NDV.

The forward pass leaves in dW as many columns of softmax numerators as fit, D / N of them, nearly
all if N <= D, and those of one more block in the workspace. One pass makes G of them, in place:
dX's first part, and the first slabs of dW. The rest of dW is still free: it takes the recomputed G
of the next columns, with the workspace's block again, and so on. dW is written once, without an
accumulator; dX has one between its parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from flce_tune.kernels import loss as losses
from flce_tune.kernels.config import Config
from flce_tune.kernels.numerators import Blocks, padded, primitives_of
from flce_tune.kernels.problem import Device, Problem
from flce_tune.kernels.products import Sum
from flce_tune.kernels.strategies import common, stored
from flce_tune.kernels.strategies.labels import Labels, first_references
from flce_tune.kernels.strategies.peers import Alone, Meeting, Peers
from flce_tune.kernels.strategies.recompute import Recompute
from flce_tune.kernels.values import Gradients, Inputs, LossSpec, Statistics, Wanted


class Overlay(Recompute):
    """Numerators, then gradients, in dW's storage; see the module's text."""

    name = "overlay"

    def reject(self, config: Config, problem: Problem, device: Device) -> str | None:
        """Say why the config cannot run here, or None if it can."""
        if config.chunk is not None:
            return f"overlay has no chunk, got {config.chunk}"
        if reason := stored.reject_problem(config, problem, device):
            return reason
        rounds = _rounds(problem.tokens, problem.hidden, problem.vocab, config)
        summed = _parts(list(rounds)) > 1
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
        """A block, and the forward's tile sums or dX's."""
        if not stored.in_one_pass(problem):
            return super().workspace(config, problem)
        n, hidden, vocab = problem.tokens, problem.hidden, problem.vocab
        rounds = list(_rounds(n, hidden, vocab, config))
        block = _buffer_elements(n, rounds, stored.slab_of(config, vocab)) * problem.itemsize
        backward = common.partial_sum_bytes(config, problem, n)
        if _parts(rounds) > 1 or config.dx is None:
            backward += common.accumulator_bytes(config, problem, n)
        return block + max(stored.forward_bytes(config, problem, n), backward)

    def products(self, config: Config, problem: Problem) -> float:
        """As ``recompute``, but for the columns whose numerators are held at first."""
        if not stored.in_one_pass(problem) or config.slab is None:
            return super().products(config, problem)
        vocab = problem.vocab
        first = next(_rounds(problem.tokens, problem.hidden, vocab, config))
        held = first.blocks + first.one_more
        return 4.0 - min(1.0, held * stored.slab_of(config, vocab) / vocab)

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
        primitives, slab = primitives_of(x), stored.slab_of(config, vocab)
        rounds = list(_rounds(n, hidden, vocab, config))
        out = weight.new_empty(vocab, hidden)
        home = stored.Home.of(out, x)
        buffer = x.new_empty(_buffer_elements(n, rounds, slab) // slab, slab)
        known = Labels(*first_references(inputs, loss, others=peers.others))
        first, _ = rounds[0].place(home, buffer, n, slab)
        local, totals = stored.forward(inputs, row_weight, loss, first, config, known)
        gradient = peers.exchange(everything, local)()

        dx = db = given = None
        if wanted.dx:
            hidden_sum = peers.hidden_sum(x, x.dtype)
            dx = Sum(hidden_sum.partial, _parts(rounds), config.accumulator, config.dx, "v")
        if wanted.db:
            db = weight.new_zeros(vocab, dtype=losses.statistics_dtype(x.dtype))
        for step in rounds:
            held, groups = step.place(home, buffer, n, slab)
            if step is rounds[0]:
                found = primitives.factors(
                    inputs, totals, local, gradient.statistics, gradient.given, row_weight, loss
                )
                for blocks in held:
                    primitives.scale_blocks(blocks, found.row)
                    primitives.set_labels(blocks, inputs.target, found.label)
            else:
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


@dataclass(frozen=True, slots=True)
class Round:
    """Some columns whose blocks are held at once."""

    start: int  # first column
    blocks: int  # in dW
    one_more: bool  # whether there are columns for the workspace's block

    def place(
        self, dw: stored.Home, buffer: Tensor, tokens: int, slab: int
    ) -> tuple[list[Blocks], list[Blocks]]:
        """The blocks, and how they may be turned into dW."""
        held: list[Blocks] = []
        groups: list[Blocks] = []
        if self.blocks:
            held.append(dw.blocks(tokens, self.start, slab, self.blocks))
            groups.extend(dw.groups(held[0]))
        if self.one_more:
            first = self.start + self.blocks * slab
            held.append(Blocks(buffer, tokens, slice(first, min(first + slab, dw.columns))))
            groups.append(held[-1])
        return held, groups


def _rounds(tokens: int, hidden: int, vocab: int, config: Config) -> Iterator[Round]:
    """Cut the vocabulary into rounds."""
    slab, start = stored.slab_of(config, vocab), 0
    while start < vocab:
        blocks = stored.capacity(tokens, hidden, vocab, start, slab)
        blocks = min(blocks, -(-(vocab - start) // slab))
        one_more = start + blocks * slab < vocab
        yield Round(start, blocks, one_more)
        start += slab * (blocks + one_more)


def _parts(rounds: Sequence[Round]) -> int:
    """Of how many products dX is the sum."""
    return sum((step.blocks > 0) + step.one_more for step in rounds)


def _buffer_elements(tokens: int, rounds: Sequence[Round], slab: int) -> int:
    """Elements of the workspace's block, if there is one."""
    return padded(tokens) * slab if rounds[0].one_more else 0
