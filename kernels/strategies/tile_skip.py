"""``tile_skip``: the gradients' products over the tiles of G in which any probability lies.

All tokens at once, numerators in place of logits, columns sorted by probability: ``skipping`` has
the algorithm. The loss is exact; gradients differ from the exact ones by what the config's
tolerance allows, so no other strategy's answer is this one's, and it runs only where it is asked
for. (2 + 4·kept)·NDV.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from flce_tune.kernels import loss as losses
from flce_tune.kernels.config import Config, Tile, require_tolerance
from flce_tune.kernels.numerators import Blocks, Entries, Merged, primitives_of
from flce_tune.kernels.problem import Device, Problem
from flce_tune.kernels.skipping import SAMPLE, Layout, Sorted, kernels_of, scaled_rows_with_means
from flce_tune.kernels.strategies import common, stored
from flce_tune.kernels.strategies.labels import first_references
from flce_tune.kernels.strategies.recompute import Recompute
from flce_tune.kernels.values import Gradients, Inputs, LossSpec, Statistics, Wanted

TOLERANCE = 1e-4
"""Adds less to dX than rounding G to bfloat16 does, on the models measured; docs/tile_skip.md."""
PLAIN_TILE = Tile(128, 128, 64)
"""Cuts G where plain torch computes."""


class TileSkip(Recompute):
    """Products over lists of tiles; see the module's text."""

    name = "tile_skip"

    def reject(self, config: Config, problem: Problem, device: Device) -> str | None:
        """Say why the config cannot run here, or None if it can."""
        if config.tolerance is None:
            return "tile_skip needs a tolerance, the least probability of a token in a kept tile"
        if reason := stored.reject_numerators(self.name, problem):
            return reason
        if reason := super().reject(config, problem, device):
            return reason
        if device.kind != "cuda":
            return None
        logits, dx, dw = config.logits, config.dx, config.dw
        if logits is None or dx is None or dw is None:
            return "tile_skip needs logits, dx and dw tiles on a GPU: cuBLAS skips nothing"
        if not dx.schedule == dw.schedule == "compiler":
            return "tile_skip has no products scheduled by hand, got a dx or dw tile that is"
        if dw.v_block != logits.v_block:
            return f"the dw tile has {dw.v_block} columns, the logits tile cuts {logits.v_block}"
        if logits.v_block % dx.v_block:
            return f"the dx tile takes {dx.v_block} columns, the logits tile cuts {logits.v_block}"
        if dx.n_block % dw.n_block:
            return f"the dw tile takes {dw.n_block} tokens, the dx tile cuts {dx.n_block}"
        return None

    def space(self, problem: Problem, device: Device) -> Iterator[Config]:
        """Nothing: a sweep compares strategies whose answers are the same."""
        yield from ()

    def default(self, problem: Problem, device: Device) -> Config:
        """The tolerance of TOLERANCE, and the first tiles that fit and go together."""
        usual = replace(
            super().default(problem, device), strategy=self.name, tolerance=TOLERANCE, logits=None
        )
        if device.kind != "cuda":
            return usual
        narrow_first = sorted(common.TILES["logits"], key=lambda tile: tile.v_block)
        tiles = itertools.product(narrow_first, common.TILES["dx"], common.TILES["dw"])
        configs = (replace(usual, logits=logits, dx=dx, dw=dw) for logits, dx, dw in tiles)
        fitting = (config for config in configs if not self.reject(config, problem, device))
        return next(fitting, usual)

    def workspace(self, config: Config, problem: Problem) -> int:
        """Numerators of all tokens, W once more, scaled x, tile sums, the sample's logits."""
        if not stored.in_one_pass(problem):
            return super().workspace(config, problem)
        layout = _layout(config, problem.tokens, problem.vocab)
        elements = layout.height * layout.width
        elements += (layout.width + layout.height) * problem.hidden
        sums = 3 * 4 * layout.column_tiles * problem.tokens
        sample = 3 * 4 * min(SAMPLE, problem.tokens) * problem.vocab
        return elements * problem.itemsize + max(sums, sample)

    def train(
        self,
        inputs: Inputs,
        row_weight: Tensor,
        loss: LossSpec,
        wanted: Wanted,
        config: Config,
    ) -> tuple[Statistics, Gradients]:
        """Compute statistics and the gradients of Σ_i r_i·loss_i in one go."""
        assert config.tolerance is not None
        everything = slice(0, len(inputs.x))
        x, vocab = inputs.x, inputs.vocab
        layout = _layout(config, len(x), vocab)
        chosen = Sorted.of(inputs, row_weight, loss, layout)
        e = x.new_empty(layout.height, layout.width)
        blocks = Blocks(e, len(x), slice(0, vocab))
        tile = config.logits or PLAIN_TILE

        label_logit, first = first_references(chosen.inputs, loss, others=False)
        sums = first.new_empty(2, layout.column_tiles, len(x))
        primitives, kernels = primitives_of(x), kernels_of(x)
        primitives.numerators(
            chosen.inputs, blocks.columns, first, label_logit, loss, e, layout.height, layout.width,
            sums[0], sums[1], tile,
        )  # fmt: skip
        merged = primitives.merge(sums[0], sums[1])
        primitives.align(blocks, everything, sums[0], merged.reference, row_weight, tile)
        statistics = Statistics(merged.lse, merged.lse_low, label_logit)
        found = primitives.factors(
            chosen.inputs, merged.total, statistics, statistics, None, row_weight, loss
        )
        keep = kernels.tile_sums(
            e, layout, sums[0], sums[1], merged, _label_exponentials(label_logit, merged),
            chosen.inputs.target, row_weight, config.tolerance,
        )  # fmt: skip
        del sums
        db = None
        if wanted.db:
            db = x.new_zeros(vocab, dtype=losses.statistics_dtype(x.dtype))
            stored.add_bias_gradient(db, [blocks], chosen.inputs.target, found)
            db = chosen.unsorted(db).to(x.dtype)
        primitives.set_labels(blocks, chosen.inputs.target, None)
        dx = dw = None
        if wanted.dx:
            dx = torch.empty_like(x)
            kernels.kept_product(
                e, layout, keep, chosen.weight, dx, found.row,
                Entries.of_dx(found.label, inputs.target, inputs.weight, layout.rows),
                config.dx, transposed=False,
            )  # fmt: skip
        if wanted.dw:
            kernels.column_sums(e, layout, found.row, keep)
            scaled = scaled_rows_with_means(x, found.row, e, layout)
            entries = Entries.of_dw(found.label, chosen.inputs.target, x, vocab, layout.columns)
            into = chosen.weight[:vocab]  # nobody reads it any more
            kernels.kept_product(
                e, layout, keep, scaled, into, None, entries, config.dw, transposed=True
            )
            dw = chosen.unsorted(into)
        return statistics, Gradients(dx, dw, db)


def _label_exponentials(label_logit: Tensor, merged: Merged) -> Tensor:  # [n]
    """2^(t - R) of each row's label, 0 where there is none."""
    e = torch.exp2(label_logit * math.log2(math.e) - merged.reference)
    return torch.where(label_logit.isnan(), 0.0, e)


def _layout(config: Config, tokens: int, vocab: int) -> Layout:
    rows, columns = config.dx or PLAIN_TILE, config.logits or PLAIN_TILE
    return Layout(tokens, vocab, rows.n_block, columns.v_block)


def skipping_config(tolerance: float, config: Config | None, workspace_limit: int | None) -> Config:
    """What a call asks for that gives a tolerance; ``strategies.completed`` adds the tiles.

    Raises:
        ValueError: something else chooses the config, too, or the tolerance is no probability.
    """
    if config is not None or workspace_limit is not None:
        raise ValueError(
            "tile_skip chooses the config itself: give neither config nor workspace_limit with it "
            '(a config of your own: Config("tile_skip", ..., tolerance=...))'
        )
    require_tolerance("tile_skip", tolerance)
    return Config("tile_skip", tolerance=float(tolerance))
