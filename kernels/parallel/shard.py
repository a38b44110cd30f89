"""A rank's part of the vocabulary, and what the loss knows of all of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from flce_tune.kernels.loss import out_of_range
from flce_tune.kernels.values import Coefficients, LossSpec, Statistics

Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Shard:
    """Classes [start, stop) are this rank's; they stand in the first rows of its weight."""

    group: ProcessGroup
    rank: int  # in the group
    ranges: tuple[Range, ...]  # of every rank, in order; they tile [0, V)

    @property
    def start(self) -> int:
        """First class of this rank."""
        return self.ranges[self.rank][0]

    @property
    def width(self) -> int:
        """Classes of this rank; 0 is possible."""
        start, stop = self.ranges[self.rank]
        return stop - start

    @property
    def vocab(self) -> int:
        """V, over all ranks."""
        return self.ranges[-1][1]

    @property
    def widest(self) -> int:
        """The most classes any rank has."""
        return max(stop - start for start, stop in self.ranges)

    @property
    def size(self) -> int:
        """Ranks of the group."""
        return len(self.ranges)

    def local(self, target: Tensor) -> Tensor:
        """Labels as this shard counts its columns; those of other ranks are no column of it."""
        return torch.where(self.owns(target), target - self.start, -1)

    def owns(self, target: Tensor) -> Tensor:
        """Which labels are this rank's classes."""
        start, stop = self.ranges[self.rank]
        return (target >= start) & (target < stop)

    def columns(self, class_weight: Tensor | None) -> Tensor | None:
        """This rank's entries of a tensor over all classes."""
        if class_weight is None:
            return None
        start, stop = self.ranges[self.rank]
        return class_weight[start:stop]

    def gradient_inputs(
        self, labels: GlobalLabels, merged: Statistics, given: Coefficients, loss: LossSpec
    ) -> tuple[Statistics, Coefficients]:
        """What G of this rank's columns is computed from.

        The label's own term belongs to the rank that holds the label. A label that nobody holds
        makes the row's gradient NaN on every rank, as it does on one device.
        """
        unknown = out_of_range(labels.target, labels.vocab, loss.ignore_index) & (given.b != 0)
        poisoned = replace(merged, lse=merged.lse.masked_fill(unknown, float("nan")))
        return poisoned, replace(given, b=torch.where(self.owns(labels.target), given.b, 0.0))


@dataclass(frozen=True, slots=True)
class GlobalLabels:
    """``values.Labels`` of the whole vocabulary."""

    target: Tensor  # [N] int64
    vocab: int
    class_weight: Tensor | None  # [V], statistics dtype

    def rows(self, rows: slice) -> GlobalLabels:
        """Restrict to some tokens."""
        return replace(self, target=self.target[rows])


def layout(rows: Sequence[int], given: Sequence[Range | None]) -> tuple[Range, ...]:
    """Every rank's classes: as given, or the rows of the ranks one after the other.

    Raises:
        ValueError: ranges that are no split of [0, V) in the order of the ranks.
    """
    ranges = [r for r in given if r is not None]
    if not ranges:
        stops = [sum(rows[: i + 1]) for i in range(len(rows))]
        ranges = [(stop - count, stop) for stop, count in zip(stops, rows, strict=True)]
    listed = ", ".join(f"{r} in {n} rows" for r, n in zip(given, rows, strict=True))
    if len(ranges) != len(rows):
        raise ValueError(f"vocab_range must be given on every rank or on none, got {listed}")
    expected = 0
    for (start, stop), count in zip(ranges, rows, strict=True):
        if start != expected or stop < start:
            raise ValueError(
                "vocab_range must be (start, stop), each rank beginning where the one before "
                f"ends and the first at 0, got {listed}"
            )
        if stop - start > count:
            raise ValueError(f"vocab_range may name at most as many classes as rows, got {listed}")
        expected = stop
    if expected == 0:
        raise ValueError(f"the ranks hold no class at all, got {listed}")
    return tuple(ranges)
