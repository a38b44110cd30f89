"""Statistics of library logits that a backward pass computes again: from the same GEMM calls.

A library chooses its kernel by the shapes, and kernels differ in more than the order of a sum: one
may round a bfloat16 product, add the bias and round again. A logit that comes out one unit in the
last place higher than the lse knows it makes its p up to 6 % too large, where plain torch, whose
softmax sees one value, is off by that times 1 - p. So the logits are computed in the same blocks
forward and backward, some tokens × one slab of the vocabulary, which gives the same bits twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from flce_tune.kernels.backends import backend_of, even_parts, logits_buffer, part_of
from flce_tune.kernels.loss import scaled_logits
from flce_tune.kernels.strategies import common
from flce_tune.kernels.torch_backend import joined_lse
from flce_tune.kernels.values import Inputs, LossSpec, Statistics, Wanted

ROW_MULTIPLE = 128


def row_blocks(tokens: int, columns: int, itemsize: int) -> list[slice]:
    """Cut the tokens so that a block of so many columns fits an evaluation's budget."""
    rows = common.EVALUATION_BYTES // (columns * itemsize) // ROW_MULTIPLE * ROW_MULTIPLE
    return list(even_parts(tokens, max(ROW_MULTIPLE, rows), ROW_MULTIPLE))


def evaluate(
    inputs: Inputs,
    loss: LossSpec,
    wanted: Wanted,
    blocks: Sequence[slice],  # of the tokens
    slabs: Sequence[slice],  # of the vocabulary, the first the widest
    *,
    packed: bool,  # as the backward pass stores them
) -> Statistics:
    """Row statistics; one block of logits is held at a time."""
    buffer = logits_buffer(blocks[0].stop, slabs[0].stop, inputs.x, packed=packed)
    return common.concatenate(
        [_of_rows(inputs.rows(rows), loss, wanted, slabs, buffer, packed=packed) for rows in blocks]
    )


def _of_rows(
    inputs: Inputs,
    loss: LossSpec,
    wanted: Wanted,
    slabs: Sequence[slice],
    buffer: Tensor,
    *,
    packed: bool,
) -> Statistics:
    backend = backend_of(inputs.x)
    parts: list[Statistics] = []
    predictions: list[tuple[Tensor, Tensor]] = []
    for columns in slabs:
        raw = part_of(buffer, len(inputs.x), columns.stop - columns.start, packed=packed)
        slab = replace(inputs.columns(columns), target=inputs.target - columns.start)
        part = backend.logits(slab, loss, wanted, raw, None)
        if part.prediction is not None:
            largest = raw.gather(1, part.prediction[:, None])[:, 0]
            predictions.append((part.prediction + columns.start, scaled_logits(largest, loss)))
        parts.append(part)
    return parts[0] if len(parts) == 1 else _merge(parts, predictions, inputs.target, slabs)


def _merge(
    parts: Sequence[Statistics],  # each of one slab
    predictions: Sequence[tuple[Tensor, Tensor]],  # each slab's, and their logits, [n]; or none
    target: Tensor,  # [n]
    slabs: Sequence[slice],
) -> Statistics:
    """Statistics of all columns."""
    lse, low, share = joined_lse(
        torch.stack([part.lse for part in parts]), torch.stack([part.lse_low for part in parts])
    )
    target_logit = torch.full_like(lse, float("nan"))
    for part, columns in zip(parts, slabs, strict=True):
        inside = (target >= columns.start) & (target < columns.stop)
        target_logit = torch.where(inside, part.target_logit, target_logit)
    logit_sums = [part.logit_sum for part in parts if part.logit_sum is not None]
    means = [part.mean_logit for part in parts if part.mean_logit is not None]
    return Statistics(
        lse=lse,
        lse_low=low,
        target_logit=target_logit,
        logit_sum=torch.stack(logit_sums).sum(0) if logit_sums else None,
        mean_logit=_weighted_mean(torch.stack(means), share) if means else None,
        prediction=_first_largest(predictions) if predictions else None,
    )


def _weighted_mean(
    values: Tensor,  # [T, n]
    weights: Tensor,  # [T, n]
) -> Tensor:  # [n]
    """Mean over slabs; one without weight has no mean of its own."""
    return torch.where(weights == 0, 0.0, weights * values).sum(0)


def _first_largest(predictions: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    column, largest = predictions[0]
    for other, logit in predictions[1:]:
        column = torch.where(logit > largest, other, column)
        largest = torch.maximum(logit, largest)
    return column
