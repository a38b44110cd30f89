"""Which config a split problem runs: the chooser's answer is for one device alone."""

from __future__ import annotations

from flce_tune.kernels import selection, strategies
from flce_tune.kernels.config import Config
from flce_tune.kernels.problem import Device, Problem
from flce_tune.kernels.strategies.common import preferred_tile

LEAST_WORK = ("chunked", "full", "factored")
"""Strategies that stay 6NDV with a merge between statistics and gradient."""


def choose(problem: Problem, device: Device, workspace_limit: int | None) -> Config:
    """The chooser's config, or one that serves a split problem better.

    ``full`` merges once a call and writes dW once: it is taken where it needs no more memory than
    the choice. A choice that would recompute the logits here gives way to one that does not, if
    that fits the limit. dW gets a tile where one is known to be fast: a library's product keeps
    all multiprocessors, and dX's sum would wait for it.
    """
    chosen = selection.choose(problem, device, workspace_limit)
    if problem.mode == "eval" or "per_token" in problem.features:
        return chosen
    dw = chosen.dw or (preferred_tile("dw", problem, device) if problem.mode == "train" else None)
    others = [Config("full", logits=chosen.logits, dw=dw)]
    if chosen.strategy in LEAST_WORK:
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
