"""``overlay``: dW's own storage holds the numerators until dW is written. Between 6 and 8NDV.

The forward pass leaves in dW as many columns of softmax numerators as fit: D / N of them, nearly
all if N <= D. They become dX's first part and the first slabs of dW. The rest of dW is still free:
it takes the recomputed G of the next columns, and so on, until what is left is less than a block,
for which there is one in the workspace. dW is written once, without an accumulator; dX has one
between the rounds.
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
from flce_tune.kernels.strategies.labels import Labels, LabelShare
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
        summed = len(list(_rounds(problem.tokens, problem.hidden, problem.vocab, config))) > 1
        return common.reject_gemms(config, problem, device, accumulated="dx" if summed else "")

    def space(self, problem: Problem, device: Device) -> Iterator[Config]:
        """Every slab and accumulator with tiles for all GEMMs; every GEMM at the default slab."""
        usual = self.default(problem, device)
        if problem.mode != "train" or stored.reject_problem(usual, problem, device):
            return
        for slab in sorted({*stored.SLABS, usual.slab or 0}):
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
        """The forward's tile sums, or scaled x or a block, and dX's sums."""
        if not stored.in_one_pass(problem):
            return super().workspace(config, problem)
        n, hidden, vocab = problem.tokens, problem.hidden, problem.vocab
        rounds = list(_rounds(n, hidden, vocab, config))
        elements = _buffer_elements(n, hidden, rounds, stored.slab_of(config, vocab))
        backward = elements * problem.itemsize
        backward += common.partial_sum_bytes(config, problem, n)
        if len(rounds) > 1 or config.dx is None:
            backward += common.accumulator_bytes(config, problem, n)
        return max(stored.forward_bytes(config, problem, n), backward)

    def products(self, config: Config, problem: Problem) -> float:
        """As ``recompute``, but for the columns that dW's storage holds at first."""
        if not stored.in_one_pass(problem) or config.slab is None:
            return super().products(config, problem)
        vocab = problem.vocab
        first = next(_rounds(problem.tokens, problem.hidden, vocab, config))
        return 4.0 - min(1.0, first.blocks * stored.slab_of(config, vocab) / vocab)

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
        first = home.blocks(n, 0, slab, rounds[0].blocks) if rounds[0].blocks else None
        kept = [] if first is None else [first]
        known = Labels.of(inputs, loss, config, others=peers.others)
        local, totals = stored.forward(inputs, row_weight, loss, kept, config, known)
        gradient = peers.exchange(everything, local)()

        buffer = x.new_empty(_buffer_elements(n, hidden, rounds, slab))
        dx = db = given = None
        if wanted.dx:
            hidden_sum = peers.hidden_sum(x, x.dtype)
            dx = Sum(
                hidden_sum.partial, len(rounds), config.accumulator, config.dx, "v",
                scaled=first is not None,
            )  # fmt: skip
        if wanted.db:
            db = weight.new_zeros(vocab, dtype=losses.statistics_dtype(x.dtype))
        for step in rounds:
            blocks, groups = step.place(home, buffer, n, slab)
            rows, factor, labels = x, None, LabelShare(None, None)
            if first is not None and step.start == 0:
                found = primitives.factors(
                    inputs, totals, local, gradient.statistics, gradient.given, row_weight, loss,
                    known.order,
                )  # fmt: skip
                if db is not None:
                    stored.add_bias_gradient(db, [blocks], inputs.target, found)
                labels = LabelShare.place(inputs, known, x, found, [blocks], config)
                rows, factor = buffer[: n * hidden].view(n, hidden), found.row
                primitives.scaled_rows(x, factor, rows)
            else:
                given = given or gradient.coefficients(inputs, row_weight, loss)
                primitives.gradients(
                    inputs, blocks, gradient.statistics, given, loss, config.logits
                )
                if db is not None:
                    stored.add_bias_gradient(db, [blocks], inputs.target, None)
            if dx is not None:
                dx.add_blocks([blocks], weight, factor, labels.dx)
                if step is rounds[-1]:
                    dx.result()
                    hidden_sum.ready(everything)
            Sum(
                out, 1, "weight_dtype", config.dw, "n",
                yielding=peers.others and step is rounds[-1],
            ).add_transposed(groups, rows, labels.dw)  # fmt: skip
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
    blocks: int  # in dW; 0: one block in the workspace

    def place(
        self, dw: stored.Home, buffer: Tensor, tokens: int, slab: int
    ) -> tuple[Blocks, list[Blocks]]:
        """The blocks, and how they may be turned into dW."""
        if self.blocks:
            blocks = dw.blocks(tokens, self.start, slab, self.blocks)
            return blocks, list(dw.groups(blocks))
        data = buffer[: padded(tokens) * slab].view(-1, slab)
        blocks = Blocks(data, tokens, slice(self.start, min(self.start + slab, dw.columns)))
        return blocks, [blocks]


def _rounds(tokens: int, hidden: int, vocab: int, config: Config) -> Iterator[Round]:
    """Cut the vocabulary into rounds."""
    slab, start = stored.slab_of(config, vocab), 0
    while start < vocab:
        step = Round(start, stored.capacity(tokens, hidden, vocab, start, slab))
        yield step
        start += slab * max(step.blocks, 1)


def _buffer_elements(tokens: int, hidden: int, rounds: Sequence[Round], slab: int) -> int:
    """Elements of the workspace: scaled x for the first round, a block for the last ones."""
    scaled = tokens * hidden if rounds[0].blocks else 0
    block = padded(tokens) * slab if not rounds[-1].blocks else 0
    return max(scaled, block)
