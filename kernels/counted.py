"""Leaving ignored rows out of the products: which rows stay, and the way there and back.

The counted rows come first, then as many ignored ones as fill ROW_MULTIPLE, so that a count that
changes with every batch gives few different shapes. The filling rows are ignored like any other:
no row is special after this, and no row appears twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flce_tune.kernels.arguments import check_target_range, direct

ROW_MULTIPLE = 128
"""Rows of a GEMM tile: fewer would be computed as slowly."""


@dataclass(frozen=True, slots=True)
class CountedRows:
    """The M rows of a batch that are computed, of N."""

    order: Tensor  # [M] int64, places among all rows, each at most once
    counted: Tensor  # [M] bool, False for rows that only fill up
    tokens: int  # N
    poison: Tensor | None  # [] float32; NaN if a row that counts was left out, else 1; None for 1

    @classmethod
    def of(
        cls,
        target: Tensor,  # [N]
        ignore_index: int,
        max_counted: int | None,  # as the caller knows it; None: count, and wait for the result
    ) -> CountedRows | None:
        """Find the rows to compute; None where that would be all of them.

        Raises:
            RuntimeError: the rows would have to be counted while a CUDA graph is captured.
        """
        n = target.shape[0]
        ignored = target == ignore_index
        kept = _count(ignored) if max_counted is None else max_counted
        rows = max(1, -(-kept // ROW_MULTIPLE)) * ROW_MULTIPLE
        if rows >= n:
            return None
        order = torch.argsort(ignored.to(torch.uint8), stable=True)[:rows]
        poison = None
        if max_counted is not None:
            poison = torch.where((~ignored).sum() > rows, float("nan"), 1.0)
        return cls(order, ~ignored.index_select(0, order), n, poison)

    def take(
        self,
        tensor: Tensor,  # [N, ...]
    ) -> Tensor:  # [M, ...]
        """Take the rows; the gradient of the others is exactly zero."""
        taken: Tensor = _Take.apply(tensor, self.order)  # type: ignore[no-untyped-call]
        return taken

    def spread(
        self,
        rows: Tensor,  # [M], or empty for what was not computed
    ) -> Tensor:  # [N], or empty
        """Put results per row back in their places, 0 where a row does not count."""
        if rows.shape[0] == 0:
            return rows
        kept = self.poisoned(torch.where(self.counted, rows, 0))
        return kept.new_zeros(self.tokens).index_copy(0, self.order, kept)

    def poisoned(self, value: Tensor) -> Tensor:
        """Make the value, and every gradient through it, NaN if a row that counts is missing."""
        if self.poison is None or not value.is_floating_point():
            return value
        return value * self.poison.to(value.dtype)


def counted_rows(
    target: Tensor,  # [N]
    vocab: int,
    ignore_index: int,
    *,
    check_targets: bool,
    drop_ignored: bool,
    max_counted: int | None,
) -> CountedRows | None:
    """What a call's options ask for: the rows to compute, or None for all.

    Raises:
        ValueError: a ``max_counted`` that is no count, or without ``drop_ignored``.
        TargetOutOfRangeError: as the op would raise it, with the label's place among all rows.
        RuntimeError: see ``CountedRows.of``.
    """
    if max_counted is not None:
        if not drop_ignored:
            raise ValueError("max_counted goes with drop_ignored=True, got drop_ignored=False")
        if not isinstance(max_counted, int) or isinstance(max_counted, bool) or max_counted < 0:
            raise ValueError(
                f"max_counted must be an int of at least 0, or None to count, got {max_counted!r}"
            )
    if not drop_ignored:
        return None
    if direct(target) and (check_targets or target.device.type == "cpu"):
        check_target_range(target, vocab, ignore_index)
    return CountedRows.of(target, ignore_index, max_counted)


class _Take(torch.autograd.Function):
    """``index_select`` whose backward copies: no row is taken twice, so there is no sum."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, order: Tensor) -> Tensor:
        """Take rows."""
        ctx.save_for_backward(order)
        ctx.shape = tensor.shape
        return tensor.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Put their gradients back among zeros."""
        (grad,) = grads
        (order,) = ctx.saved_tensors
        return grad.new_zeros(ctx.shape).index_copy(0, order, grad), None


def _count(ignored: Tensor) -> int:
    """Count the other rows; waits for the device."""
    if torch.compiler.is_compiling():
        torch._dynamo.graph_break("drop_ignored=True counts rows on the host; give max_counted")
    if ignored.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "drop_ignored=True counts rows on the host, which cannot be captured in a CUDA graph: "
            "give an upper bound, max_counted=..., or capture with drop_ignored=False"
        )
    return ignored.numel() - int(ignored.sum())
