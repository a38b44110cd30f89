"""What a sweep measures on: devices of this machine, or a Ray cluster."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal

import torch
import typer

from flce_tune.cli.console import print_note
from flce_tune.cli.targets import chosen_devices
from flce_tune.errors import SweepError
from flce_tune.kernels.problem import describe_device
from flce_tune.sweep.places import Place, local_places

if TYPE_CHECKING:
    from flce_tune.service.executors import LocalExecutor, RayExecutor

Executor = Literal["local", "ray"]
NO_RAY = "--executor ray needs Ray: pip install 'flce-tune[ray]'"


@dataclass(frozen=True, slots=True)
class Where:
    """What the options say to measure on."""

    devices: tuple[torch.device, ...]  # of this machine; empty: a Ray cluster
    accelerators: tuple[str, ...] = ()  # of the cluster; empty: all
    cpu: bool = False  # the CPUs of the cluster's nodes

    @contextmanager
    def places(self, problems: int) -> Iterator[Sequence[Place]]:
        """The places, no more of a kind than there are problems.

        Raises:
            SweepError: Ray is not installed, cannot be reached or has nothing of the kind.
        """
        if self.devices:
            yield local_places(self.devices)
            return
        try:
            from flce_tune.sweep.ray_cluster import ray_places
        except ModuleNotFoundError as error:
            if error.name != "ray":
                raise
            raise SweepError(NO_RAY) from error
        print_note("connecting to Ray ...")
        with ray_places(problems, accelerators=self.accelerators, cpu=self.cpu) as places:
            yield places

    def describe(self, places: Sequence[Place]) -> str:
        """What people read before a sweep begins."""
        if not self.devices:
            return f"a Ray cluster ({', '.join(place.name for place in places)})"
        return ", ".join(map(_describe, self.devices))


def where(
    executor: Executor, device: str | None, devices: str | None, accelerators: Sequence[str]
) -> Where:
    """Put the options together.

    Raises:
        typer.BadParameter: they do not fit together, or there is no such device.
    """
    if executor == "local":
        if accelerators:
            raise typer.BadParameter("--accelerator goes with --executor ray")
        return Where(tuple(chosen_devices(device, devices)))
    if devices is not None or device not in (None, "cpu"):
        raise typer.BadParameter(
            "with --executor ray, say --accelerator H200 for some types of GPU only, or --device "
            "cpu for the CPUs of the nodes"
        )
    if accelerators and device == "cpu":
        raise typer.BadParameter("--accelerator and --device cpu exclude each other")
    return Where((), tuple(accelerators), cpu=device == "cpu")


def job_executor(where: Where) -> LocalExecutor | RayExecutor:
    """What a service's or a worker's jobs are done on.

    Raises:
        SweepError: Ray is not installed.
    """
    from flce_tune.service.executors import LocalExecutor, RayExecutor

    if where.devices:
        return LocalExecutor(tuple(map(str, where.devices)))
    if find_spec("ray") is None:
        raise SweepError(NO_RAY)
    return RayExecutor(where.accelerators, where.cpu)


def _describe(device: torch.device) -> str:
    described = describe_device(device)
    unit = "cores" if described.kind == "cpu" else "SMs"
    return f"{device} ({described.name}, {described.sm_count} {unit})"
