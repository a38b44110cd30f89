"""A place somewhere in a Ray cluster.

The sweep itself, its search and the tuning database stay in the driver. A node only runs an actor,
which keeps worker processes like those of a local sweep; each call of a bench is one call of the
actor. So a node that is lost takes along nothing but the measurement it was at.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import ray
import torch
from ray.exceptions import RayError

from flce_tune.dispatch.convert import kernel_hash
from flce_tune.errors import SweepError
from flce_tune.kernels.problem import Device, Problem
from flce_tune.sweep.failures import CandidateError
from flce_tune.sweep.measure import BenchFactory
from flce_tune.sweep.places import LocalPlace, PlaceLostError
from flce_tune.sweep.worker import POLL_S, START_TIMEOUT_S, Method, Runner, StoppedError
from flce_tune.tuning_db.records import ToolchainRecord

OPEN_TIMEOUT_S = 300.0  # for a busy or growing cluster to find room, and a node to import torch
SLACK_S = 60.0  # beyond a candidate's own timeout, until its node counts as lost
CALLS = 256  # at once to one actor; more than there are cores to compile on


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to ask Ray for to get one place."""

    name: str
    type: str  # of accelerator, as Ray calls it; or what stands for one
    device: str  # "cuda" or "cpu"
    options: Mapping[str, Any]  # of the actor


class RayPlace:
    """A device that Ray finds for us. Used by one thread, its runners by several."""

    def __init__(self, wanted: Wanted) -> None:
        self._wanted = wanted
        self._actor: Any = None
        self._description: tuple[Device, ToolchainRecord] | None = None

    @property
    def name(self) -> str:
        """Accelerator type and number, or host and node."""
        return self._wanted.name

    @property
    def type(self) -> str:
        """Accelerator type, or what stands for one."""
        return self._wanted.type

    @property
    def device(self) -> Device:
        """What Ray found; known while the place is open."""
        return self._described[0]

    @property
    def toolchain(self) -> ToolchainRecord:
        """The software there; known while the place is open."""
        return self._described[1]

    @property
    def _described(self) -> tuple[Device, ToolchainRecord]:
        assert self._description is not None, "the place is not open"
        return self._description

    def open(self, should_stop: Callable[[], bool]) -> None:
        """Wait until Ray has scheduled the actor and its node has imported torch."""
        options = {"max_concurrency": CALLS, **self._wanted.options}
        self._actor = ray.remote(_Host).options(**options).remote(self._wanted.device)
        self._description = self.ask("describe", should_stop=should_stop, timeout_s=OPEN_TIMEOUT_S)
        if self.toolchain.kernel_hash != kernel_hash():
            raise PlaceLostError("its flce-tune has other kernels; install the same version there")

    def close(self) -> None:
        """End the actor, and with it all it has started."""
        if self._actor is not None:
            ray.kill(self._actor)
        self._actor = None

    def runner(
        self,
        make_bench: BenchFactory,
        problem: Problem,
        seed: int,
        should_stop: Callable[[], bool] | None = None,
    ) -> Runner:
        """Make a runner whose worker process is a child of the actor."""
        return _RayRunner(self, ("runner", (make_bench, problem, seed)), should_stop)

    def compiler(
        self,
        make_bench: BenchFactory,
        problem: Problem,
        should_stop: Callable[[], bool] | None = None,
    ) -> Runner:
        """Make a runner that compiles, whose worker process is a child of the actor."""
        return _RayRunner(self, ("compiler", (make_bench, problem)), should_stop)

    def compilers(self) -> int:
        """As many as the node says."""
        count: int = self.ask("compilers", should_stop=lambda: False, timeout_s=START_TIMEOUT_S)
        return min(count, CALLS // 2)

    def tell(self, method: str, *args: object) -> None:
        """Call a method of the actor, whatever becomes of it."""
        if self._actor is not None:
            getattr(self._actor, method).remote(*args)

    def ask(
        self, method: str, *args: object, should_stop: Callable[[], bool], timeout_s: float
    ) -> Any:
        """Call a method of the actor and wait for its answer.

        Raises:
            PlaceLostError: the actor or its node is gone, or does not answer in time.
            StoppedError: ``should_stop`` said so.
        """
        deadline = time.monotonic() + timeout_s
        try:
            answer = getattr(self._actor, method).remote(*args)
            while not ray.wait([answer], timeout=POLL_S)[0]:
                if should_stop():
                    raise StoppedError
                if time.monotonic() > deadline:
                    raise PlaceLostError(f"no answer within {timeout_s:g} s")
            return ray.get(answer)
        except RayError as error:
            raise PlaceLostError(f"{type(error).__name__}: {error}") from error


_Order = tuple[Literal["runner", "compiler"], tuple[Any, ...]]
"""Which method of a place makes a runner, and of what."""


class _RayRunner:
    """Calls a bench in a worker process of an actor."""

    def __init__(
        self,
        place: RayPlace,
        order: _Order,
        should_stop: Callable[[], bool] | None,
    ) -> None:
        self._place = place
        self._order = order
        self._should_stop = should_stop or (lambda: False)
        self._key = uuid.uuid4().hex

    def prepare(self) -> None:
        """Have the worker process started."""
        self._place.tell("prepare", self._key, self._order)

    def call(self, method: Method, *args: object, timeout_s: float) -> Any:
        """Call a method of the bench; errors come back as from a local worker."""
        outcome, value = self._place.ask(
            "call",
            self._key,
            self._order,
            method,
            args,
            timeout_s,
            should_stop=self._should_stop,
            timeout_s=START_TIMEOUT_S + timeout_s + SLACK_S,
        )
        if outcome == "value":
            return value
        if outcome == "impossible":
            raise SweepError(value)
        raise CandidateError(*value)

    def close(self) -> None:
        """End the worker process."""
        self._place.tell("close", self._key)


class _Host:
    """The actor: a place of the node it runs on, and the runners that are open there."""

    def __init__(self, device: str) -> None:
        here = torch.device("cuda", 0) if device == "cuda" else torch.device(device)
        self._place = LocalPlace(here, shares=_gpus_of_this_node() if device == "cuda" else 1)
        self._runners: dict[str, Runner] = {}
        self._lock = threading.Lock()

    def describe(self) -> tuple[Device, ToolchainRecord]:
        return self._place.device, self._place.toolchain

    def compilers(self) -> int:
        return self._place.compilers()

    def prepare(self, key: str, order: _Order) -> None:
        self._runner(key, order).prepare()

    def call(
        self,
        key: str,
        order: _Order,
        method: Method,
        args: tuple[object, ...],
        timeout_s: float,
    ) -> tuple[str, Any]:
        """Errors go as values: exceptions of an actor mean that it failed itself."""
        try:
            value = self._runner(key, order).call(method, *args, timeout_s=timeout_s)
            return "value", value
        except CandidateError as error:
            return "failure", (error.status, error.message, error.errors)
        except SweepError as error:
            return "impossible", str(error)

    def close(self, key: str) -> None:
        with self._lock:
            runner = self._runners.pop(key, None)
        if runner is not None:
            runner.close()

    def _runner(self, key: str, order: _Order) -> Runner:
        kind, arguments = order
        with self._lock:
            if key not in self._runners:
                self._runners[key] = getattr(self._place, kind)(*arguments)
            return self._runners[key]


def _gpus_of_this_node() -> int:
    here = ray.get_runtime_context().get_node_id()
    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    resources = [node["Resources"] for node in nodes if node["NodeID"] == here]
    return max(1, int(resources[0].get("GPU", 1))) if resources else 1
