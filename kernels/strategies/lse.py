"""Row statistics from sums of softmax numerators, where logits are not stored.

Less work than a maximum for each tile and row: one exponential a logit, relative to the label's
logit, which is known beforehand. See ``kernels.numerators`` for the algebra.
"""

from __future__ import annotations

import torch

from flce_tune.kernels.backends import even_parts
from flce_tune.kernels.config import Tile
from flce_tune.kernels.numerators import first_reference, primitives_of
from flce_tune.kernels.values import Inputs, LossSpec, Statistics


def by_numerators(inputs: Inputs, loss: LossSpec, tile: Tile, rows_per_step: int) -> Statistics:
    """The lse and the label's logit of each row, some rows at a time."""
    primitives = primitives_of(inputs.x)
    n, vocab = len(inputs.x), inputs.vocab
    label_logit = primitives.label_logits(inputs, loss)
    first = first_reference(label_logit)
    tiles = -(-vocab // tile.v_block)
    parts = list(even_parts(n, rows_per_step))
    sums = first.new_empty(2 * tiles * max(part.stop - part.start for part in parts))
    merged = []
    for rows in parts:
        some = inputs.rows(rows)
        count = len(some.x)
        references, totals = sums[: 2 * tiles * count].view(2, tiles, count)
        primitives.numerators(
            some, slice(0, vocab), first[rows], label_logit[rows], loss, None, 0, tile.v_block,
            references, totals, tile,
        )  # fmt: skip
        merged.append(primitives.merge(references, totals))
    if len(merged) == 1:
        return Statistics(merged[0].lse, merged[0].lse_low, label_logit)
    _, _, lse, low = (torch.cat(sums) for sums in zip(*merged, strict=True))
    return Statistics(lse, low, label_logit)
