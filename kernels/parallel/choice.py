"""Which config a split problem runs: the chooser's answer is for one device alone."""

from __future__ import annotations

from flce_tune.kernels import selection, strategies
from flce_tune.kernels.config import Config
from flce_tune.kernels.problem import Device, Problem
from flce_tune.kernels.strategies.base import OnePass


def choose(problem: Problem, device: Device, workspace_limit: int | None) -> Config:
    """The chooser's config, or one that serves a split problem better.

    ``full`` merges once a call and writes dW once: it is taken where it needs no more memory than
    the choice. A choice that would recompute the logits here gives way to one that does not, if
    that fits the limit.
    """
    chosen = selection.choose(problem, device, workspace_limit)
    if problem.mode == "eval" or "per_token" in problem.features:
        return chosen
    others = [Config("full", logits=chosen.logits, dw=chosen.dw)]
    if isinstance(strategies.get(chosen.strategy), OnePass):
        limit: int | None = strategies.workspace(chosen, problem)
    else:
        limit = selection.limit(workspace_limit)
        others.append(strategies.default(problem, device, limit))
    usable = [
        config
        for config in others
        if strategies.reject(config, problem, device) is None
        and (limit is None or strategies.workspace(config, problem) <= limit)
    ]
    return min(usable, key=lambda c: strategies.workspace(c, problem), default=chosen)
