"""The strategies' primitives on Triton and cuBLAS; the counterpart of ``torch_backend``."""

from __future__ import annotations

from torch import Tensor

from flce_tune.kernels.config import Tile
from flce_tune.kernels.torch_backend import raw_logits
from flce_tune.kernels.triton import row_gradient, rows
from flce_tune.kernels.triton.arguments import (
    begin_alike,
    cdiv,
    empty_statistics,
    gradient_flags,
    loss_scalars,
    next_power_of_2,
    statistics_flags,
    units_before,
)
from flce_tune.kernels.triton.coefficients import coefficients as coefficients
from flce_tune.kernels.triton.labels import target_gradients
from flce_tune.kernels.triton.reduce import row_weights as row_weights
from flce_tune.kernels.triton.reduce import total_loss as total_loss
from flce_tune.kernels.triton.tiled import tiled_logits, tiled_slab_gradient
from flce_tune.kernels.values import (
    Coefficients,
    Inputs,
    Labels,
    LossSpec,
    Statistics,
    Wanted,
)

STATISTICS_LANES = 512
STATISTICS_DEPTH = 4
STATISTICS_WARPS = 2
GRADIENT = (1024, 2)
"""Columns and warps of a program. Programs follow each other along a row, in the order of the
memory: neighbouring blocks of a ragged row share 128-byte lines."""
MOST_ROWS = 65535
"""Of a grid's second dimension."""


def logits(
    inputs: Inputs,
    loss: LossSpec,
    wanted: Wanted,
    out: Tensor | None,  # [n, V]; holds the raw logits afterwards; None: statistics only
    tile: Tile | None,  # None: cuBLAS, which needs ``out``
) -> Statistics:
    """Compute raw logits into ``out``, if any, and return their statistics."""
    if tile is not None:
        return tiled_logits(inputs, loss, wanted, out, tile)
    if out is None:
        raise ValueError("statistics without storing logits need a tile, got None")
    raw_logits(inputs, out)
    return statistics(out, inputs, loss, wanted)


def statistics(
    raw: Tensor,  # [n, V]
    labels: Labels,
    loss: LossSpec,
    wanted: Wanted,
) -> Statistics:
    """Row statistics of stored logits."""
    n, vocab = raw.shape
    result = empty_statistics(n, raw.device, loss, wanted)
    rows.statistics_kernel[(n,)](
        raw,
        raw.stride(0),
        labels.target,
        labels.class_weight,
        result.lse,
        result.lse_low,
        result.target_logit,
        result.logit_sum,
        result.mean_logit,
        result.prediction,
        vocab,
        *loss_scalars(loss),
        **statistics_flags(labels, loss, wanted),
        LANES=min(STATISTICS_LANES, next_power_of_2(vocab)),
        DEPTH=STATISTICS_DEPTH if vocab > STATISTICS_LANES else 1,
        num_warps=STATISTICS_WARPS,
    )
    return result


def gradient(
    raw: Tensor,  # [n, v] raw logits of columns first, first + 1, ...
    labels: Labels,
    stats: Statistics,
    coefficients: Coefficients,
    loss: LossSpec,
    out: Tensor,  # [n, v] ∂L/∂a; may be raw itself
    first_column: int = 0,
) -> None:
    """Turn raw logits into their gradient."""
    n, width = raw.shape
    most, warps = GRADIENT
    block = min(most, next_power_of_2(width))
    blocks = cdiv(width + units_before(raw), block)
    by_row = n <= MOST_ROWS
    row_gradient.gradient_kernel[(blocks, n) if by_row else (n, blocks)](
        raw,
        raw.stride(0),
        out,
        out.stride(0),
        stats.lse,
        labels.target,
        coefficients.a,
        coefficients.b,
        coefficients.c,
        coefficients.e,
        labels.class_weight,
        first_column,
        width,
        labels.vocab,
        *loss_scalars(loss),
        **gradient_flags(labels, coefficients, loss),
        ALIKE=begin_alike(raw, out),
        BY_ROW=by_row,
        BLOCK=block,
        num_warps=warps,
    )


def slab_gradient(
    inputs: Inputs,
    columns: slice,  # of the vocabulary
    stats: Statistics,
    coefficients: Coefficients,
    loss: LossSpec,
    out: Tensor,  # [N, v], compute dtype
    tile: Tile | None,
) -> None:
    """Recompute the raw logits of a vocabulary slab and turn them into their gradient."""
    slab = inputs.columns(columns)
    if tile is None:
        raw_logits(slab, out)
        gradient(out, inputs, stats, coefficients, loss, out, columns.start)
    else:
        tiled_slab_gradient(slab, inputs, stats, coefficients, loss, out, tile)
    target_gradients(inputs, columns.start, stats, coefficients, loss, out)
