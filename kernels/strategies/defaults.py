"""The analytic default: what runs where nothing was tuned."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from flce_tune.kernels import strategies
from flce_tune.kernels.config import Config
from flce_tune.kernels.problem import Device, Problem

LEAST_CHUNK = 512
"""Tokens; dW's sum takes longer than its product in shorter chunks, and than computing twice."""


def analytic_default(
    problem: Problem, device: Device, workspace_limit: int | None = None
) -> Config:
    """Return the first valid candidate within the limit, or the smallest of all."""
    valid = [c for c in candidates(problem, device) if not strategies.reject(c, problem, device)]
    if workspace_limit is None:
        return valid[0]
    for config in valid:
        if strategies.workspace(config, problem) <= workspace_limit:
            return config
    return min(valid, key=lambda config: strategies.workspace(config, problem))


def candidates(problem: Problem, device: Device) -> Iterator[Config]:
    """Name configs from the fastest expected to the smallest.

    Per-token gradients and evaluation recompute; training computes its gradients in the forward
    pass, in chunks that halve until they are too short to be worth it.
    """
    recompute = strategies.get("recompute").default(problem, device)
    overlay = strategies.get("overlay").default(problem, device)
    chunked = strategies.get("chunked").default(problem, device)
    if problem.mode == "eval" or "per_token" in problem.features:
        yield recompute
    assert chunked.chunk is not None
    chunk = chunked.chunk
    while chunk == chunked.chunk or chunk >= LEAST_CHUNK:
        yield replace(chunked, chunk=chunk)
        chunk //= 2
    yield overlay
    assert recompute.slab is not None
    slab = recompute.slab
    while slab >= 256:
        yield replace(recompute, slab=slab)
        slab //= 2
