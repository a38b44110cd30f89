"""The contract every strategy keeps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, runtime_checkable

from torch import Tensor

from flce_tune.kernels.config import Config
from flce_tune.kernels.problem import Device, Problem
from flce_tune.kernels.strategies.peers import Meeting, Peers
from flce_tune.kernels.values import (
    Coefficients,
    Gradients,
    Inputs,
    LossSpec,
    Statistics,
    Wanted,
)


class Strategy(Protocol):
    """An algorithm for the loss and its gradients.

    Every strategy gives the same answer to the same inputs; they differ in time and workspace.
    """

    name: str
    deterministic: bool

    def reject(self, config: Config, problem: Problem, device: Device) -> str | None:
        """Say why the config cannot run here, or None if it can."""

    def space(self, problem: Problem, device: Device) -> Iterator[Config]:
        """Enumerate the configs worth measuring; some may be rejected."""

    def default(self, problem: Problem, device: Device) -> Config:
        """Choose a config by analysis alone; never rejected on a supported device."""

    def workspace(self, config: Config, problem: Problem) -> int:
        """Bytes held at the peak beyond inputs and returned gradients, estimated."""

    def products(self, config: Config, problem: Problem) -> float:
        """Products of 2NDV FLOPs in a training step: 3, and more where logits are recomputed."""

    def train(
        self,
        inputs: Inputs,
        row_weight: Tensor,  # [N] r_i, 0 for ignored rows
        loss: LossSpec,
        wanted: Wanted,
        config: Config,
    ) -> tuple[Statistics, Gradients]:
        """Compute statistics and the gradients of Σ_i r_i·loss_i in one go."""

    def evaluate(
        self, inputs: Inputs, loss: LossSpec, wanted: Wanted, config: Config
    ) -> Statistics:
        """Compute statistics only."""

    def backward(
        self,
        inputs: Inputs,
        statistics: Statistics,
        coefficients: Coefficients,
        loss: LossSpec,
        wanted: Wanted,
        config: Config,
    ) -> Gradients:
        """Compute the gradients for given row coefficients, recomputing the logits."""


@runtime_checkable
class OnePass(Strategy, Protocol):
    """A strategy that can meet the ranks of a split vocabulary between statistics and gradient.

    Every rank must meet the others in the same order: what ``meetings`` lists.
    """

    def train(
        self,
        inputs: Inputs,
        row_weight: Tensor,  # [N] r_i, 0 for ignored rows
        loss: LossSpec,
        wanted: Wanted,
        config: Config,
        peers: Peers | None = None,
    ) -> tuple[Statistics, Gradients]:
        """Compute statistics and the gradients of Σ_i r_i·loss_i in one go, dX over all ranks."""

    def meetings(self, config: Config, problem: Problem, parts: int) -> list[Meeting]:
        """Which tokens' statistics are exchanged, in order; V is the widest rank's."""
