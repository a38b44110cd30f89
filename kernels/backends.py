"""Which set of primitives a tensor gets: Triton and cuBLAS on a GPU, else plain torch."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from flce_tune.kernels.config import Config, Tile
from flce_tune.kernels.loss import RowWeights
from flce_tune.kernels.values import (
    Coefficients,
    Inputs,
    Labels,
    LossSpec,
    Statistics,
    Wanted,
)


class Backend(Protocol):
    """The primitives of strategies (see ``torch_backend``) and around them (see ``loss``)."""

    def row_weights(
        self,
        labels: Labels,
        loss: LossSpec,
        token_weight: Tensor | None,
        divisor: Tensor | None,
        reduction: str,
        compute: torch.dtype,
        *,
        later: bool,
    ) -> RowWeights:
        """Weigh the rows, before the products; ``loss.all_row_weights``."""

    def total_loss(
        self, labels: Labels, statistics: Statistics, loss: LossSpec, weights: RowWeights
    ) -> tuple[Tensor, Tensor]:
        """Reduce the losses, after the products; ``loss.total_loss``."""

    def coefficients(
        self,
        labels: Labels,
        statistics: Statistics,
        row_weight: Tensor,
        loss: LossSpec,
        grad_lse: Tensor | None = None,
        grad_entropy: Tensor | None = None,
        upstream: Tensor | None = None,
    ) -> Coefficients:
        """What the gradient is formed from, for each row; ``loss.coefficients``."""

    def logits(
        self, inputs: Inputs, loss: LossSpec, wanted: Wanted, out: Tensor | None, tile: Tile | None
    ) -> Statistics:
        """Compute raw logits into ``out``, if any, and return their statistics."""

    def statistics(self, raw: Tensor, labels: Labels, loss: LossSpec, wanted: Wanted) -> Statistics:
        """Row statistics of stored logits."""

    def gradient(
        self,
        raw: Tensor,
        labels: Labels,
        stats: Statistics,
        coefficients: Coefficients,
        loss: LossSpec,
        out: Tensor,
        first_column: int = 0,
    ) -> None:
        """Turn raw logits into their gradient; ``out`` may be ``raw``."""

    def slab_gradient(
        self,
        inputs: Inputs,
        columns: slice,
        stats: Statistics,
        coefficients: Coefficients,
        loss: LossSpec,
        out: Tensor,
        tile: Tile | None,
    ) -> None:
        """Recompute the raw logits of a vocabulary slab and turn them into their gradient."""


@functools.cache
def has_triton() -> bool:
    """Whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


def has_kernels(tensor: Tensor) -> bool:
    """Whether Triton kernels compute on tensors like this one."""
    return tensor.device.type == "cuda" and tensor.dtype != torch.float64 and has_triton()


def backend_of(tensor: Tensor) -> Backend:
    """Choose the primitives for tensors like this one."""
    if has_kernels(tensor):
        from flce_tune.kernels.triton import backend as triton_backend

        return triton_backend
    from flce_tune.kernels import torch_backend

    return torch_backend


_NOTHING = contextlib.nullcontext()


def on_device(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Make a device the current one, to launch kernels on its tensors."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _NOTHING
    return torch.cuda.device(device)


def even_parts(total: int, largest: int, multiple: int = 1) -> Iterator[slice]:
    """Cut [0, total) into as few parts of at most ``largest`` as possible, evenly.

    Part sizes are rounded up to ``multiple``, so that only the last one is ragged.
    """
    count = -(-total // largest)
    size = -(-total // count)
    size = min(-(-size // multiple) * multiple, largest)
    for start in range(0, total, size):
        yield slice(start, min(start + size, total))


def part_size(total: int, largest: int, multiple: int = 1) -> int:
    """Size of the first, and largest, of ``even_parts``."""
    first: int = next(even_parts(total, largest, multiple)).stop
    return first


def logits_buffer(rows: int, columns: int, like: Tensor, *, packed: bool = False) -> Tensor:
    """Uninitialised [rows, columns] whose row stride is a multiple of 128 bytes.

    The padding of the stride, not of the vocabulary, keeps ragged vocabularies fast: every row
    starts aligned and the padding is never read. There is none in a packed buffer; see
    ``must_be_packed``.
    """
    unit = 1 if packed else 128 // like.element_size()
    stride = -(-columns // unit) * unit
    buffer: Tensor = like.new_empty(rows, stride)
    return buffer[:, :columns]


def must_be_packed(bias: Tensor | None, config: Config) -> bool:
    """Whether logits are to be stored without gaps: those of a library that adds a bias.

    Not where a tile reads them, or their gradient: that needs aligned rows.

    cuBLAS adds it before rounding only if the result is contiguous, as plain torch's is; else
    PyTorch rounds the product, adds, and rounds again (1.4 times the error, measured on an H200).
    """
    return bias is not None and config.logits is config.dx is config.dw is None


def part_of(buffer: Tensor, rows: int, columns: int, *, packed: bool) -> Tensor:
    """[rows, columns] of a buffer, again without gaps if it must be packed."""
    if packed:
        return buffer.view(-1)[: rows * columns].view(rows, columns)
    return buffer[:rows, :columns]
