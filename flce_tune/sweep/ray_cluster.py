"""What a Ray cluster has to measure on: GPUs by accelerator type, or the CPUs of whole nodes."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from flce_tune.errors import SweepError
from flce_tune.kernels.problem import Device
from flce_tune.sweep.ray_places import RayPlace, Wanted

UNKNOWN = "GPU"  # stands for the type of GPUs that Ray has no name for
CPU = "CPU"  # ... for that of CPUs
PREFIX = "accelerator_type:"  # of the resource by which Ray knows what GPUs a node has


@contextmanager
def ray_places(
    problems: int, *, accelerators: Sequence[str] = (), cpu: bool = False
) -> Iterator[list[RayPlace]]:
    """Connect to the cluster that Ray finds, or start one here; yields its places.

    Args:
        problems: how many there are for each kind of device; more places than that are no use.
        accelerators: only GPUs of these types, as Ray calls them; none: all GPUs.
        cpu: the CPUs of each node instead of GPUs.

    Raises:
        SweepError: Ray cannot be reached, or its cluster has nothing of the kind.
    """
    ours = not ray.is_initialized()
    try:
        if ours:
            ray.init(log_to_driver=False, include_dashboard=False, logging_level=logging.WARNING)
        nodes = [n for n in ray.nodes() if n["Alive"]]  # type: ignore[no-untyped-call]
    except (RayError, ConnectionError, ValueError, RuntimeError) as error:
        raise SweepError(f"no Ray cluster can be used: {error}") from error
    try:
        found = wanted_cpus(nodes) if cpu else wanted_gpus(nodes, accelerators)
        # Of each type no more than there are problems.
        groups = itertools.groupby(found, key=lambda one: one.options.get("accelerator_type"))
        chosen = [one for _, group in groups for one in list(group)[:problems]]
        yield [RayPlace(one) for one in chosen]
    finally:
        if ours:
            ray.shutdown()


def ray_devices(*, accelerators: Sequence[str] = (), cpu: bool = False) -> dict[str, Device]:
    """Describe one device of each type that the cluster has.

    Raises:
        SweepError: as ``ray_places``.
        PlaceLostError: one could not be had.
    """
    found = {}
    with ray_places(1, accelerators=accelerators, cpu=cpu) as places:
        for place in places:
            try:
                place.open(lambda: False)
                found[place.type] = place.device
            finally:
                place.close()
    return found


def wanted_gpus(nodes: Sequence[Mapping[str, Any]], accelerators: Sequence[str]) -> list[Wanted]:
    """List the GPUs of a cluster, type by type.

    Raises:
        SweepError: there are none of these types, or none at all.
    """
    counts: dict[str | None, int] = {}
    for node in nodes:
        resources = node["Resources"]
        kinds = [key.removeprefix(PREFIX) for key in resources if key.startswith(PREFIX)]
        kind = kinds[0] if kinds else None
        counts[kind] = counts.get(kind, 0) + int(resources.get("GPU", 0))
    counts = {kind: count for kind, count in counts.items() if count}
    known = ", ".join(f"{count} × {kind or 'unknown'}" for kind, count in counts.items())
    if unknown := set(accelerators) - set(counts):
        raise SweepError(
            f"the Ray cluster has no accelerators of type {', '.join(sorted(unknown))}; "
            f"it has {known or 'no GPUs'}"
        )
    if not counts:
        raise SweepError("the Ray cluster has no GPUs; --device cpu tunes the CPUs of its nodes")
    return [
        Wanted(
            f"{kind or UNKNOWN} {number}",
            kind or UNKNOWN,
            "cuda",
            {"num_gpus": 1, "num_cpus": 1, **({"accelerator_type": kind} if kind else {})},
        )
        for kind, count in counts.items()
        if not accelerators or kind in accelerators
        for number in range(1, count + 1)
    ]


def wanted_cpus(nodes: Sequence[Mapping[str, Any]]) -> list[Wanted]:
    """List the nodes of a cluster that have CPUs to give; a place takes all of a node's."""
    return [
        Wanted(
            f"{node['NodeManagerHostname']}/{node['NodeID'][:6]}",
            CPU,
            "cpu",
            {
                "num_cpus": int(node["Resources"]["CPU"]),
                "scheduling_strategy": NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
            },
        )
        for node in nodes
        if node["Resources"].get("CPU", 0) >= 1
    ]
