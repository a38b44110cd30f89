"""Which config a call gets. Analysis alone until ``use`` installs a chooser that knows more."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from typing import Protocol, TypeVar

from flce_tune.errors import InvalidConfigError
from flce_tune.kernels import strategies
from flce_tune.kernels.config import Config
from flce_tune.kernels.problem import Device, Problem

Result = TypeVar("Result")


class Chooser(Protocol):
    """Chooses configs; must be quick, thread-safe and must not raise."""

    def choose(self, problem: Problem, device: Device, workspace_limit: int | None) -> Config:
        """Choose a config that ``strategies.reject`` accepts."""

    def replace(
        self,
        failed: Config,
        problem: Problem,
        device: Device,
        workspace_limit: int | None,
        reason: str,
    ) -> Config:
        """Report a config that failed to run here; choose another."""

    def limit(self, workspace_limit: int | None) -> int | None:
        """The call's own limit, or the process's; None: there is none."""


class AnalyticChooser:
    """The analytic default for everything."""

    def choose(self, problem: Problem, device: Device, workspace_limit: int | None) -> Config:
        """Choose by analysis alone."""
        return strategies.default(problem, device, workspace_limit)

    def replace(
        self,
        failed: Config,
        problem: Problem,
        device: Device,
        workspace_limit: int | None,
        reason: str,
    ) -> Config:
        """Warn, and choose by analysis alone."""
        warnings.warn(f"config {failed} does not run here: {reason}; using the default",
                      RuntimeWarning, stacklevel=2)  # fmt: skip
        return strategies.default(problem, device, workspace_limit)

    def limit(self, workspace_limit: int | None) -> int | None:
        """The call's own limit."""
        return workspace_limit


_chooser: Chooser = AnalyticChooser()


def use(chooser: Chooser) -> None:
    """Install the process's chooser."""
    global _chooser
    _chooser = chooser


def choose(problem: Problem, device: Device, workspace_limit: int | None) -> Config:
    """Ask the process's chooser."""
    return _chooser.choose(problem, device, workspace_limit)


def limit(workspace_limit: int | None) -> int | None:
    """The limit that holds for a call: its own, or the process's."""
    return _chooser.limit(workspace_limit)


def run(
    problem: Problem,
    device: Device,
    workspace_limit: int | None,
    explicit: str,  # JSON of a Config, or "" to choose
    work: Callable[[Config], Result],
) -> Result:
    """Run ``work`` with the explicit config, or with the chosen one, replaced once if it fails.

    Raises:
        InvalidConfigError: the explicit config cannot run here.
    """
    if explicit:
        config = strategies.completed(Config.from_dict(json.loads(explicit)), problem, device)
        strategies.require(config, problem, device)
        return work(config)
    config = choose(problem, device, workspace_limit)
    try:
        return work(config)
    except Exception as error:
        if not is_launch_error(error):
            raise
        reason = f"{type(error).__name__}: {error}"
        replacement = _chooser.replace(config, problem, device, workspace_limit, reason)
        if replacement == config:
            raise InvalidConfigError(f"config {config} does not run here: {reason}") from error
    return work(replacement)


def is_launch_error(error: Exception) -> bool:
    """Whether a kernel says with this error that it cannot be compiled or launched here."""
    try:
        from triton.compiler.errors import CompilationError
        from triton.runtime.errors import OutOfResources, PTXASError
    except ImportError:
        return False
    if isinstance(error, (CompilationError, OutOfResources, PTXASError)):
        return True
    # A failed pass of Triton's compiler has no class of its own.
    return type(error) is RuntimeError and str(error).startswith("PassManager::run failed")
