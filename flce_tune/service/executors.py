"""What does the jobs of one runner: devices of this machine, or a Ray cluster.

An executor lives where jobs are claimed. A job's process gets the site that the executor chose for
it, and opens the places there: those of ``flce-tune sweep``, each with problems of its own.
"""

from __future__ import annotations

import functools
import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Protocol

import torch

from flce_tune.dispatch.convert import device_record, device_slug
from flce_tune.errors import SweepError
from flce_tune.service import child
from flce_tune.service.devices import local_devices, select, selectors
from flce_tune.sweep.places import Place, local_places
from flce_tune.tuning_db.records import DeviceRecord

DESCRIBE_TIMEOUT_S = 400.0  # for a busy cluster to lend one device of each type for a moment


class PlacesAwayError(SweepError):
    """There is nothing to measure on at the moment; it is not the job's fault."""


class Site(Protocol):
    """Where one job is done. Can be pickled."""

    def places(self, problems: int) -> AbstractContextManager[Sequence[Place]]:
        """Its places, no more than there are problems.

        Raises:
            PlacesAwayError: there are none now.
        """


class Executor(Protocol):
    """Devices that jobs are done on."""

    def devices(self) -> Mapping[str, DeviceRecord]:
        """All of them, by name; those first that a job for any device is done on.

        Raises:
            PlacesAwayError: they cannot be asked now.
        """

    def selectors(self) -> list[str]:
        """What a job may ask for so that it is done here. Raises as ``devices``."""

    def site(self, wanted: str) -> Site:
        """All devices that a job's selector means and that are like the first of them.

        Raises:
            SweepError: there are none.
        """


def meant(wanted: str, devices: Mapping[str, DeviceRecord]) -> dict[str, DeviceRecord]:
    """Of the devices that a job's selector means, all that are like the first.

    Raises:
        SweepError: it means none of them.
    """
    first = select(wanted, devices)
    if first is None:
        raise SweepError(f"no device {wanted} here; there are {', '.join(devices)}")
    slug = device_slug(devices[first])
    return {
        name: record
        for name, record in devices.items()
        if device_slug(record) == slug and wanted in selectors({name: record})
    }


@dataclass(frozen=True, slots=True)
class LocalExecutor:
    """Devices of this machine."""

    names: tuple[str, ...] = ()  # as torch has them; none: all GPUs and the CPU

    def devices(self) -> Mapping[str, DeviceRecord]:
        """Those of this machine that were named."""
        here = local_devices()
        return {name: here[name] for name in self.names or here}

    def selectors(self) -> list[str]:
        """Their names, too."""
        return selectors(self.devices())

    def site(self, wanted: str) -> Site:
        """All GPUs that are like the first."""
        return LocalSite(tuple(meant(wanted, self.devices())))


@dataclass(frozen=True, slots=True)
class LocalSite:
    """Devices of this machine, by torch's names."""

    names: tuple[str, ...]

    @contextmanager
    def places(self, problems: int) -> Iterator[Sequence[Place]]:
        """A place for each."""
        yield local_places([torch.device(name) for name in self.names[:problems]])


@dataclass(frozen=True, slots=True)
class RayExecutor:
    """The Ray cluster that Ray finds, or starts here. What it has is asked once, at the start."""

    accelerators: tuple[str, ...] = ()  # only GPUs of these types, as Ray calls them; none: all
    cpu: bool = False  # the CPUs of its nodes instead of GPUs; all are taken to be alike

    def devices(self) -> Mapping[str, DeviceRecord]:
        """One of each type of accelerator, by Ray's name for it; or "CPU"."""
        return _ray_devices(self)

    def selectors(self) -> list[str]:
        """No names: a job cannot ask for a type in Ray's words."""
        devices = self.devices()
        return sorted(set(selectors(devices)) - set(devices))

    def site(self, wanted: str) -> Site:
        """All nodes with accelerators like the first type that is meant."""
        return RaySite(tuple(meant(wanted, self.devices())))


@dataclass(frozen=True, slots=True)
class RaySite:
    """Devices of a Ray cluster, by type."""

    types: tuple[str, ...]

    @contextmanager
    def places(self, problems: int) -> Iterator[Sequence[Place]]:
        """A place for each device that the cluster has now."""
        from flce_tune.sweep import ray_cluster

        cpu = self.types == (ray_cluster.CPU,)
        named = () if cpu or ray_cluster.UNKNOWN in self.types else self.types
        with ExitStack() as stack:
            try:
                found = stack.enter_context(
                    ray_cluster.ray_places(problems, accelerators=named, cpu=cpu)
                )
            except SweepError as error:
                raise PlacesAwayError(str(error)) from error
            fitting = [place for place in found if place.type in self.types]
            if not fitting:
                raise PlacesAwayError(f"the Ray cluster has no {', '.join(self.types)} now")
            yield fitting


@functools.cache
def _ray_devices(executor: RayExecutor) -> Mapping[str, DeviceRecord]:
    """Ask in another process: this one stays without connections to a cluster."""
    command = child.command(__name__, print_ray_devices.__name__, json.dumps(asdict(executor)))
    try:
        told = subprocess.run(
            command, stdout=subprocess.PIPE, check=True, timeout=DESCRIBE_TIMEOUT_S
        ).stdout
    except subprocess.SubprocessError as error:
        raise PlacesAwayError(f"the Ray cluster was not described: {error}") from error
    answer = json.loads(told.splitlines()[-1])
    if "error" in answer:
        raise PlacesAwayError(answer["error"])
    return {name: DeviceRecord(**record) for name, record in answer["devices"].items()}


def print_ray_devices(argument: str) -> None:
    """Print the records as JSON, or what is wrong; runs in a process of its own."""
    from flce_tune.sweep.places import PlaceLostError
    from flce_tune.sweep.ray_cluster import ray_devices

    wanted = json.loads(argument)
    try:
        found = ray_devices(accelerators=wanted["accelerators"], cpu=wanted["cpu"])
    except (SweepError, PlaceLostError) as error:
        print(json.dumps({"error": str(error)}))
        return
    print(json.dumps({"devices": {n: asdict(device_record(d)) for n, d in found.items()}}))
