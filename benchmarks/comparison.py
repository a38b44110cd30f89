"""One comparison: every implementation on the same inputs, in interleaved rounds."""

from __future__ import annotations

import gc
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from cases import (
    DataKind,
    Inputs,
    Result,
    Shape,
    dense_logit_gradient,
    fp32_truth,
    make_inputs,
    relative_errors,
)
from implementations import Implementation, Loss
from measure import (
    Deadline,
    OutOfTime,
    Stopwatch,
    at_most,
    half_quartile_range,
    peak_above,
    release,
)

from flce_tune.kernels.problem import DTYPE_NAMES

Log = Callable[[str], None]


@dataclass
class Contestant:
    """An implementation and what became of it on one set of inputs."""

    implementation: Implementation
    status: str = "ok"  # ok, absent, out of memory, out of time, error
    reason: str = ""
    loss: Loss | None = None  # None: not built, or out of the race
    errors: dict[str, float] = field(default_factory=dict)
    extra_bytes: int | None = None
    samples_ms: list[float] = field(default_factory=list)

    def again(self) -> Contestant:
        """The same contestant for other inputs; one that never started stays out."""
        if self.status in ("absent", "out of time"):
            return Contestant(self.implementation, self.status, self.reason)
        return Contestant(self.implementation, loss=self.loss)

    def fail(self, error: BaseException) -> None:
        """Note why it dropped out."""
        self.loss = None
        self.status = _status_of(error)
        self.reason = f"{type(error).__name__}: {error}".strip()[:500]

    def to_dict(self, floor_ms: float | None) -> dict[str, Any]:
        """JSON-ready; times only where there are any."""
        row: dict[str, Any] = {
            "name": self.implementation.name,
            "family": self.implementation.family,
            "gemm_work": self.implementation.gemm_work,
            "status": self.status,
            **self.implementation.details,
        }
        if self.reason:
            row["reason"] = self.reason
        if self.samples_ms:
            median = statistics.median(self.samples_ms)
            row |= {
                "median_ms": median,
                "spread_ms": half_quartile_range(self.samples_ms),
                "times_floor": median / floor_ms if floor_ms else None,
                "samples_ms": self.samples_ms,
            }
        if self.status == "ok":
            row |= {"extra_bytes": self.extra_bytes, "errors": self.errors}
        return row


def _status_of(error: BaseException) -> str:
    if isinstance(error, ImportError):
        return "absent"
    if isinstance(error, torch.cuda.OutOfMemoryError):
        return "out of memory"
    return "out of time" if isinstance(error, OutOfTime) else "error"


def forward_backward(loss: Loss, inputs: Inputs) -> Result:
    """One training step of the head."""
    value = loss(inputs.x, inputs.weight, inputs.target)
    dx, dw = torch.autograd.grad(value, (inputs.x, inputs.weight))
    return Result(loss=value.detach(), dx=dx, dw=dw)


class Floor:
    """The three dense GEMMs of forward and backward (6NDV), and nothing else."""

    def __init__(self, inputs: Inputs) -> None:
        self._x, self._weight = inputs.x.detach(), inputs.weight.detach()
        self._g = dense_logit_gradient(inputs)
        self._logits = torch.empty_like(self._g)
        self._dx, self._dw = torch.empty_like(self._x), torch.empty_like(self._weight)

    def __call__(self) -> None:
        torch.mm(self._x, self._weight.T, out=self._logits)
        torch.mm(self._g, self._weight, out=self._dx)
        torch.mm(self._g.T, self._x, out=self._dw)


@dataclass(frozen=True)
class Comparison:
    """How the implementations are run."""

    device: torch.device
    dtype: torch.dtype
    rounds: int
    prepare_seconds: float  # for one implementation's first calls, which may compile or tune
    log: Log

    def run(
        self,
        shape: Shape,
        data: DataKind,
        contestants: Sequence[Contestant],
        deadline: Deadline,
    ) -> dict[str, Any]:
        """Measure all contestants on one shape and kind of data.

        Returns the JSON-ready result, with fewer rounds than asked where time ran out. A
        contestant that fails is noted and the others go on; what the comparison itself needs
        (inputs, truth, floor) and cannot get, it raises.
        """
        inputs = make_inputs(shape, data, self.dtype, self.device)
        return self.run_on(inputs, shape, data, contestants, deadline)

    def run_on(
        self,
        inputs: Inputs,
        shape: Shape,
        data: str,
        contestants: Sequence[Contestant],
        deadline: Deadline,
    ) -> dict[str, Any]:
        """``run`` on inputs that are there already."""
        truth = fp32_truth(inputs)
        mean_loss = float(truth.loss)
        for contestant in contestants:
            self._prepare(contestant, inputs, truth, deadline)
        del truth
        release(self.device)
        floor_samples, rounds = self._race(contestants, inputs, deadline)
        floor_ms = statistics.median(floor_samples) if floor_samples else None
        return {
            "tokens": shape.tokens,
            "hidden": shape.hidden,
            "vocab": shape.vocab,
            "dtype": DTYPE_NAMES[self.dtype],
            "data": data,
            "mean_loss": mean_loss,
            "rounds": rounds,
            "floor_ms": floor_ms,
            "floor_tflops_6ndv": shape.dense_flops / floor_ms / 1e9 if floor_ms else None,
            "floor_samples_ms": floor_samples,
            "implementations": [contestant.to_dict(floor_ms) for contestant in contestants],
        }

    def _prepare(
        self, contestant: Contestant, inputs: Inputs, truth: Result, deadline: Deadline
    ) -> None:
        """Build, warm up, check and weigh one contestant; whatever it raises is noted."""
        if contestant.status != "ok":
            return
        self.log(f"  {contestant.implementation.name}")
        try:
            # half of what is left at most: a slow compiler must not starve all who follow
            with at_most(min(self.prepare_seconds, deadline.remaining / 2)):
                loss = contestant.loss or contestant.implementation.build()
                contestant.errors = relative_errors(forward_backward(loss, inputs), truth)
                release(self.device)
                contestant.extra_bytes = peak_above(
                    lambda: forward_backward(loss, inputs), self.device
                )
                contestant.loss = loss
        except (Exception, OutOfTime) as error:  # noqa: BLE001 isolation is the purpose
            contestant.fail(error)
            self.log(f"    {contestant.status}: {contestant.reason}")
        release(self.device)

    def _race(
        self, contestants: Sequence[Contestant], inputs: Inputs, deadline: Deadline
    ) -> tuple[list[float], int]:
        """Interleave all contestants and the floor; return the floor's samples and the rounds."""
        stopwatch, floor = Stopwatch(self.device), Floor(inputs)
        stopwatch.time(floor)
        for contestant in contestants:  # a round that does not count: it fills the allocator
            self._time(contestant, inputs, stopwatch, deadline)
            contestant.samples_ms.clear()
        floor_samples: list[float] = []
        gc.disable()
        try:
            for done in range(self.rounds):
                runners = [contestant for contestant in contestants if contestant.loss is not None]
                if deadline.remaining < 1.5 * _round_seconds(floor_samples, runners):
                    self.log(f"  time is up after {done} of {self.rounds} rounds")
                    return floor_samples, done
                floor_samples.append(stopwatch.time(floor))
                # whoever follows a hot neighbour finds a slower clock: no neighbours are kept
                random.Random(done).shuffle(runners)
                for contestant in runners:
                    self._time(contestant, inputs, stopwatch, deadline)
        finally:
            gc.enable()
        return floor_samples, self.rounds

    def _time(
        self, contestant: Contestant, inputs: Inputs, stopwatch: Stopwatch, deadline: Deadline
    ) -> None:
        """Take one sample. Isolates the contestant: whatever it raises is noted."""
        loss = contestant.loss
        if loss is None:
            return
        try:
            with at_most(deadline.remaining):
                sample = stopwatch.time(lambda: forward_backward(loss, inputs))
        except (Exception, OutOfTime) as error:  # noqa: BLE001 isolation is the purpose
            contestant.fail(error)
            release(stopwatch.device)
        else:
            contestant.samples_ms.append(sample)


def _round_seconds(floor_samples: list[float], runners: Sequence[Contestant]) -> float:
    """How long the next round should take, by the last one."""
    last = [samples[-1] for samples in (floor_samples, *(r.samples_ms for r in runners)) if samples]
    return sum(last) / 1e3
