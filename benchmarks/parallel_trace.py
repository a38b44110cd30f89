"""Time in collectives, from a profile of a few steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

STEPS = 3
LONG = 30.0
"""Microseconds from which on a kernel is named in the timeline."""

Interval = tuple[float, float]


def collective_times(step: Callable[[], object], device: torch.device) -> dict[str, Any]:
    """Milliseconds a step spends in NCCL kernels, during which of them nothing else runs, and idle.

    The last step's long kernels are listed; NCCL's include the wait for the other ranks.
    """
    torch.cuda.synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        for _ in range(STEPS):
            step()
        torch.cuda.synchronize(device)
    kernels = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in trace.events() or []
        if event.device_type == DeviceType.CUDA
    )
    sent = united((start, end) for start, end, name in kernels if "nccl" in name.lower())
    computed = united((start, end) for start, end, name in kernels if "nccl" not in name.lower())
    hidden = _length(_common(sent, computed))
    return {
        "collective_ms": _length(sent) / STEPS / 1e3,
        "exposed_ms": (_length(sent) - hidden) / STEPS / 1e3,
        "idle_ms": _idle(kernels) / STEPS / 1e3,
        "last_step": _timeline(kernels[-(len(kernels) // STEPS) :]),
    }


def _idle(kernels: list[tuple[float, float, str]]) -> float:
    """Time between the first kernel and the last in which none runs."""
    busy = united((start, end) for start, end, _ in kernels)
    return busy[-1][1] - busy[0][0] - _length(busy) if busy else 0.0


def _timeline(kernels: list[tuple[float, float, str]]) -> list[str]:
    """``start + duration name`` in microseconds, of the kernels that take long or communicate."""
    return [
        f"{start - kernels[0][0]:.0f} + {end - start:.0f} {name[:60]}"
        for start, end, name in kernels
        if end - start >= LONG or "nccl" in name.lower()
    ]


def united(spans: Iterable[Interval]) -> list[Interval]:
    """The same time as spans that do not overlap, in order."""
    merged: list[Interval] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _common(one: list[Interval], other: list[Interval]) -> list[Interval]:
    """Time in both; each must be united."""
    found, i, j = [], 0, 0
    while i < len(one) and j < len(other):
        start, end = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if start < end:
            found.append((start, end))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return found


def _length(spans: list[Interval]) -> float:
    return sum(end - start for start, end in spans)
