"""Time in collectives, from a profile of a few steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

STEPS = 3

Interval = tuple[float, float]


def collective_times(step: Callable[[], object], device: torch.device) -> dict[str, Any]:
    """Milliseconds a step spends in NCCL kernels, and those during which nothing else runs."""
    torch.cuda.synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        for _ in range(STEPS):
            step()
        torch.cuda.synchronize(device)
    sent, computed = [], []
    for event in trace.events() or []:
        if event.device_type != DeviceType.CUDA:
            continue
        span = (event.time_range.start, event.time_range.end)
        (sent if "nccl" in event.name.lower() else computed).append(span)
    busy = united(sent)
    exposed = _length(busy) - _length(_common(busy, united(computed)))
    return {
        "collective_ms": _length(busy) / STEPS / 1e3,
        "exposed_ms": exposed / STEPS / 1e3,
    }


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
