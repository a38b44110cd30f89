"""Where a sweep measures: a device of this host, or of another one."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import IO, Protocol

import torch

from flce_tune.dispatch.convert import toolchain_record
from flce_tune.errors import SweepError
from flce_tune.kernels.problem import Device, Problem, describe_device
from flce_tune.sweep.absent import META, NO_GPU, CompilingFactory
from flce_tune.sweep.failures import CandidateError
from flce_tune.sweep.measure import BenchFactory, OpBench
from flce_tune.sweep.nursery import Nursery, can_fork
from flce_tune.sweep.processes import usable_cores
from flce_tune.sweep.worker import LocalRunner, Process, Runner, Worker
from flce_tune.tuning_db.records import ToolchainRecord

MOST_COMPILERS = 64  # each holds torch, up to a gigabyte
PROBE_TIMEOUT_S = 60.0
SMALLEST = Problem(1, 1, 1, dtype="float32")


class PlaceLostError(Exception):
    """The place does not answer any more; what was being measured says nothing of its config."""


class Place(Protocol):
    """One device that measures one problem at a time."""

    @property
    def name(self) -> str:
        """What people call it, unique among the places of a sweep."""

    def open(self, should_stop: Callable[[], bool]) -> None:
        """Get hold of it; the rest may be used from then on.

        Raises:
            PlaceLostError: it cannot be had.
            StoppedError: ``should_stop`` said so.
        """

    def close(self) -> None:
        """Let go of it. It may be opened again."""

    @property
    def device(self) -> Device:
        """What it is."""

    @property
    def toolchain(self) -> ToolchainRecord:
        """The software measurements are taken with there."""

    def runner(
        self,
        make_bench: BenchFactory,
        problem: Problem,
        seed: int,
        should_stop: Callable[[], bool] | None = None,
    ) -> Runner:
        """Make a runner whose bench lives there.

        Its calls may also raise PlaceLostError.
        """

    def compiler(
        self,
        make_bench: BenchFactory,
        problem: Problem,
        should_stop: Callable[[], bool] | None = None,
    ) -> Runner:
        """Make a runner that can compile for the GPU, and does not touch it.

        Its calls may also raise PlaceLostError.
        """

    def compilers(self) -> int:
        """How many of them may work while a runner measures."""


class LocalPlace:
    """A device of this host."""

    def __init__(
        self,
        device: torch.device,
        *,
        name: str | None = None,
        visible: str | None = None,
        isolate: bool = True,
        shares: int = 1,
    ) -> None:
        """Describe the device.

        Args:
            device: as this process knows it.
            name: what people call it; by default as torch does.
            visible: its UUID, to be the only GPU that workers see; None: they see what we see.
            isolate: measure in another process.
            shares: how many places share the cores of this host.
        """
        self.name = name or str(device)
        self.device = describe_device(device)
        self.toolchain = toolchain_record(device)
        self._torch_device = device
        self._visible = visible
        self._isolate = isolate
        self._shares = shares
        self._nursery: Nursery | None = None
        self._lock = threading.Lock()  # of the nursery: compilers may be asked for side by side

    def open(self, should_stop: Callable[[], bool]) -> None:
        """It is always there."""

    def close(self) -> None:
        """End what starts compilers, and them."""
        with self._lock:
            nursery, self._nursery = self._nursery, None
        if nursery is not None:
            nursery.close()

    def runner(
        self,
        make_bench: BenchFactory,
        problem: Problem,
        seed: int,
        should_stop: Callable[[], bool] | None = None,
    ) -> Runner:
        """Make a runner: a worker process, or this one where nothing is isolated."""
        if not self._isolate:
            return LocalRunner(make_bench, problem, self._torch_device, seed)
        device = self._torch_device
        if self._visible is not None and device.type == "cuda":
            device = torch.device("cuda", 0)  # the worker sees no other
        return Worker(make_bench, problem, device, seed, should_stop, visible=self._visible)

    def compiler(
        self,
        make_bench: BenchFactory,
        problem: Problem,
        should_stop: Callable[[], bool] | None = None,
    ) -> Runner:
        """Make a runner: a worker process that sees no GPU, so that it cannot have a context."""
        factory = CompilingFactory(make_bench, self.device)
        start = (
            functools.partial(self._fork, should_stop or (lambda: False)) if can_fork() else None
        )
        return Worker(factory, problem, META, 0, should_stop, visible=NO_GPU, start=start)

    def _fork(self, should_stop: Callable[[], bool], descriptor: int, output: IO[bytes]) -> Process:
        with self._lock:
            if self._nursery is None:
                self._nursery = Nursery(NO_GPU)
            nursery = self._nursery
        return nursery.start(descriptor, output, should_stop)

    def compilers(self) -> int:
        """This place's share of the cores but one, which is for what is measured."""
        return min(max(1, usable_cores() // self._shares - 1), MOST_COMPILERS)


def local_places(devices: Sequence[torch.device], *, isolate: bool = True) -> list[LocalPlace]:
    """Make a place of each device; each GPU's workers see that GPU alone."""
    return [
        LocalPlace(
            device,
            visible=_uuid(device) if len(devices) > 1 else None,
            isolate=isolate,
            shares=len(devices),
        )
        for device in devices
    ]


def _uuid(device: torch.device) -> str | None:
    """A GPU's UUID as CUDA_VISIBLE_DEVICES takes it; None for other devices."""
    if device.type != "cuda":
        return None
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    return uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"


def works(place: Place) -> bool:
    """Whether a fresh process can compute anything there: if not, no config is at fault."""
    runner = place.runner(OpBench, SMALLEST, 0)
    try:
        runner.call("time_plain", timeout_s=PROBE_TIMEOUT_S)
    except (CandidateError, SweepError, PlaceLostError):
        return False
    finally:
        runner.close()
    return True
