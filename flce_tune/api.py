"""The op as users import it: configs come from the dispatcher.

Importing this module tells ``kernels.selection`` to ask the process's dispatcher; nothing is read
until the first call.
"""

from __future__ import annotations

import functools

import torch

from flce_tune import settings
from flce_tune.dispatch import Explanation, default_dispatcher
from flce_tune.kernels import selection
from flce_tune.kernels.config import Config, Tile
from flce_tune.kernels.given_logits import cross_entropy
from flce_tune.kernels.module import LinearCrossEntropy
from flce_tune.kernels.op import linear_cross_entropy, linear_logprobs
from flce_tune.kernels.parallel.gathered import gathered_weight
from flce_tune.kernels.problem import Device, Problem, describe_device
from flce_tune.kernels.reduction import LossOutputs

__all__ = [
    "Config",
    "LinearCrossEntropy",
    "LossOutputs",
    "Problem",
    "Tile",
    "cross_entropy",
    "explain",
    "gathered_weight",
    "linear_cross_entropy",
    "linear_logprobs",
    "prefetch",
]


class _DispatcherChooser:
    """Adapts the process's dispatcher to what the op asks."""

    def choose(self, problem: Problem, device: Device, workspace_limit: int | None) -> Config:
        limit = _limit(workspace_limit)
        return default_dispatcher().choose(problem, device, workspace_limit=limit).config

    def limit(self, workspace_limit: int | None) -> int | None:
        return _limit(workspace_limit)

    def replace(
        self,
        failed: Config,
        problem: Problem,
        device: Device,
        workspace_limit: int | None,
        reason: str,
    ) -> Config:
        limit = _limit(workspace_limit)
        dispatcher = default_dispatcher()
        return dispatcher.quarantine(failed, problem, device, reason, workspace_limit=limit).config


def _limit(workspace_limit: int | None) -> int | None:
    """The call's own limit, or the one the environment sets."""
    return _environment_limit() if workspace_limit is None else workspace_limit


@functools.cache
def _environment_limit() -> int | None:
    return settings.load().workspace_limit


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
    return default_dispatcher().explain(
        problem, _described(device), workspace_limit=_limit(workspace_limit)
    )


def prefetch(device: torch.device | str) -> None:
    """Fetch winners for a device from the service at FLCE_TUNE_URL, if one is set.

    Without this the first call on the device does it, and waits: no longer than a few seconds,
    once. Later calls wait for nothing. In ``torch.distributed``, the first rank to come here (or
    to its first call) asks, and the others use what it heard.

    Args:
        device: a torch device, such as "cuda" or "cpu"; of this process, so set it before.
    """
    default_dispatcher().prepare(_described(device))


def _described(device: torch.device | str) -> Device:
    torch_device = torch.device(device)
    if torch_device.type == "cuda" and torch_device.index is None:
        torch_device = torch.device("cuda", torch.cuda.current_device())
    return describe_device(torch_device)
