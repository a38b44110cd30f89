"""Where a strategy's training pass meets the other ranks of a split vocabulary.

A rank knows the statistics of its own columns. What its gradient is computed from are those of the
whole vocabulary, and its share of dX must be summed with the others'. ``Alone``, the one device of
an ordinary call, has nobody to ask.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from flce_tune.kernels.backends import backend_of
from flce_tune.kernels.values import Coefficients, Labels, LossSpec, Statistics


class Meeting(NamedTuple):
    """Some tokens whose row statistics are exchanged, in parts, one collective a part."""

    rows: slice
    parts: tuple[slice, ...]  # of all tokens; they tile ``rows``


class RowGradient(NamedTuple):
    """What the gradient of some tokens follows from."""

    merged: Statistics  # over the whole vocabulary
    statistics: Statistics  # the same, made NaN where nobody has the label
    given: Coefficients | None  # None: the loss's own

    def coefficients(self, labels: Labels, row_weight: Tensor, loss: LossSpec) -> Coefficients:
        """The loss's own worked out, for the weights [n] of these tokens."""
        if self.given is not None:
            return self.given
        backend = backend_of(self.statistics.lse)
        return backend.coefficients(labels, self.statistics, row_weight, loss)


class HiddenSum(Protocol):
    """dX, summed over the ranks."""

    partial: Tensor  # [N, D], this rank's share, to be filled

    def ready(self, rows: slice) -> None:
        """Say that some rows of the share are there; rows come in order."""

    def result(self) -> Tensor:
        """[N, D], or this rank's part of it, in the gradient's dtype."""


class Peers(Protocol):
    """The ranks that hold the rest of the vocabulary."""

    parts: int  # into which a chunk is cut, so that one part's exchange hides behind another's work
    others: bool  # there are any: labels may be theirs, and collectives run beside the products

    def widest(self, vocab: int) -> int:
        """The most columns any rank has: what decides how all of them cut the tokens."""

    def exchange(
        self, rows: slice, local: Statistics, raw: Tensor | None = None
    ) -> Callable[[], RowGradient]:
        """Begin to merge the statistics of some tokens; the result waits for the merged ones.

        ``raw`` holds their logits, for the predictions.
        """

    def hidden_sum(self, x: Tensor, dtype: torch.dtype) -> HiddenSum:
        """Make room for dX, to be returned in ``dtype``."""


class Alone:
    """The peers of a rank that holds the whole vocabulary: none."""

    parts = 1
    others = False

    def widest(self, vocab: int) -> int:
        """Its own."""
        return vocab

    def exchange(
        self, rows: slice, local: Statistics, raw: Tensor | None = None
    ) -> Callable[[], RowGradient]:
        """Nothing is merged."""
        return lambda: RowGradient(local, local, None)

    def hidden_sum(self, x: Tensor, dtype: torch.dtype) -> HiddenSum:
        """dX itself."""
        return Own(torch.empty(x.shape, dtype=dtype, device=x.device))


class Own:
    """dX of one rank."""

    def __init__(self, partial: Tensor) -> None:
        self.partial = partial

    def ready(self, rows: slice) -> None:
        """Nobody waits for it."""

    def result(self) -> Tensor:
        """It is whole."""
        return self.partial
