"""The op as users import it: configs come from the dispatcher.

Importing this module tells ``kernels.selection`` to ask the process's dispatcher; nothing is read
until the first call.
"""

from __future__ import annotations

import torch

from flce_tune.dispatch import Explanation, default_dispatcher
from flce_tune.kernels import selection
from flce_tune.kernels.config import Config, Tile
from flce_tune.kernels.op import (
    LinearCrossEntropy,
    LossOutputs,
    linear_cross_entropy,
    linear_logprobs,
)
from flce_tune.kernels.problem import Device, Problem, describe_device

__all__ = [
    "Config",
    "LinearCrossEntropy",
    "LossOutputs",
    "Problem",
    "Tile",
    "explain",
    "linear_cross_entropy",
    "linear_logprobs",
]


class _DispatcherChooser:
    """Adapts the process's dispatcher to what the op asks."""

    def choose(self, problem: Problem, device: Device, workspace_limit: int | None) -> Config:
        return default_dispatcher().choose(problem, device, workspace_limit=workspace_limit).config

    def replace(self, failed: Config, problem: Problem, device: Device, reason: str) -> Config:
        return default_dispatcher().quarantine(failed, problem, device, reason).config


selection.use(_DispatcherChooser())


def explain(
    problem: Problem, device: torch.device | str, *, workspace_limit: int | None = None
) -> Explanation:
    """Say which rule of the dispatcher chooses what for a problem, and why the others did not.

    Args:
        problem: what is to be computed.
        device: a torch device, such as "cuda" or "cpu".
        workspace_limit: bytes the op may hold beyond its inputs and gradients.
    """
    torch_device = torch.device(device)
    if torch_device.type == "cuda" and torch_device.index is None:
        torch_device = torch.device("cuda", torch.cuda.current_device())
    return default_dispatcher().explain(
        problem, describe_device(torch_device), workspace_limit=workspace_limit
    )
