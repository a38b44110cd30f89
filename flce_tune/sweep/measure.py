"""Measures configs on one problem and device: the checks, the time, the workspace."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from flce_tune.kernels import strategies
from flce_tune.kernels.config import Config
from flce_tune.kernels.op import linear_cross_entropy
from flce_tune.kernels.problem import Problem
from flce_tune.kernels.reduction import LossOutputs
from flce_tune.sweep.check import Checker, Errors, WrongResultError, poisoned
from flce_tune.sweep.clocks import clock_mhz, throttle_reasons
from flce_tune.sweep.inputs import make_inputs, plain_loss
from flce_tune.sweep.ragged import ragged_neighbour
from flce_tune.sweep.resources import KernelResources, Launch, watched_kernels

FLUSHES = 64
STATISTICS = ("entropy", "prediction")  # asked for by problems with that feature

Run = Callable[[], dict[str, Tensor]]


@dataclass(frozen=True, slots=True)
class Trial:
    """What one checked config did."""

    sample_ms: float
    workspace_bytes: int  # measured on a GPU, estimated on a CPU
    errors: dict[str, float] = field(default_factory=dict)  # relative, by output name
    clocks_mhz: int | None = None
    registers: int | None = None  # of the largest Triton kernel, if there is one
    spills: int | None = None
    shared_memory: int | None = None  # bytes per block
    throttled: tuple[str, ...] = ()  # what held the clocks down
    same_as: Config | None = None  # measured before, with the same binaries: whose time this is


class Bench(Protocol):
    """One problem on one device, ready to measure configs. Lives in the worker process.

    The methods raise whatever goes wrong with the config at hand.
    """

    def compile(self, config: Config, ragged: bool) -> None:
        """Run the config once, unchecked: here, or on the ragged neighbour.

        Raises:
            HopelessKernelError: its kernels cannot be fast.
        """

    def trial(self, config: Config) -> Trial:
        """Check the config, then time one run and take its workspace.

        Raises:
            HopelessKernelError: its kernels cannot be fast.
            WrongResultError: the config computes something else.
        """

    def check_ragged(self, config: Config) -> None:
        """Check the config on a neighbour of the problem whose sizes no tile divides.

        Raises:
            WrongResultError: the config computes something else there.
        """

    def time(self, config: Config) -> float:
        """Time one run of a config that passed its trial, in ms."""

    def time_plain(self) -> float:
        """Time one run of plain PyTorch, in ms."""


class BenchFactory(Protocol):
    """Makes the bench inside the worker; must be importable there by its module and name."""

    def __call__(self, problem: Problem, device: torch.device, seed: int) -> Bench:
        """Prepare the inputs of a problem on a device."""


@dataclass(frozen=True, slots=True)
class _Binaries:
    """What a config runs: its kernels as compiled, each with its grid, and what surrounds them."""

    config: Config  # without its tiles, which only the kernels know
    launches: tuple[Launch, ...]


class OpBench:
    """Measures the op itself, forward and backward, on inputs of its own."""

    def __init__(self, problem: Problem, device: torch.device, seed: int) -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        self._problem = problem
        self._device = device
        self._seed = seed
        self._inputs = make_inputs(problem, device, seed)
        self._checksum = self._inputs.checksum()
        self._checker: Checker | None = None
        self._ragged: OpBench | None = None
        self._warm: set[Config] = set()  # configs that have run in this process
        self._trials: dict[Config, Trial] = {}
        self._timed: dict[_Binaries, Config] = {}  # who was timed with these
        self._timer = _cuda_timer(device) if device.type == "cuda" else _cpu_time

    def compile(self, config: Config, ragged: bool) -> None:
        """Run the config once, unchecked: here, or on the ragged neighbour."""
        with watched_kernels() as kernels:
            (self._neighbour() if ragged else self)._warm_up(config)
        kernels.require_hope()

    def trial(self, config: Config) -> Trial:
        """Check the config, then time one run and take its workspace."""
        self._ragged = None  # its memory must not come and go while the workspace is measured
        errors, kernels = self._check(config)
        kernels.require_hope()
        same = _Binaries(replace(config, logits=None, dx=None, dw=None), tuple(kernels.launches))
        if kernels.launches and same in self._timed:
            first = self._timed[same]
            return replace(self._trials[first], errors=errors, same_as=first)
        sample_ms, workspace = self._timed_with_workspace(config)
        self._require_untouched_inputs()
        self._timed[same] = config
        self._trials[config] = Trial(
            sample_ms,
            workspace,
            errors,
            clock_mhz(self._device),
            kernels.registers,
            kernels.spills,
            kernels.shared_memory,
            throttled=throttle_reasons(self._device),
        )
        return self._trials[config]

    def check_ragged(self, config: Config) -> None:
        """Check the config on a neighbour of the problem whose sizes no tile divides."""
        neighbour = self._neighbour()
        try:
            neighbour._check(config)
        except WrongResultError as error:
            p = neighbour._problem
            where = f"with N={p.tokens}, D={p.hidden}, V={p.vocab}"
            raise WrongResultError(f"{where}: {error}", error.errors) from error

    def time(self, config: Config) -> float:
        """Time one run of a config that passed its trial, in ms."""
        self._ragged = None  # its memory is not missed by what is timed
        if config not in self._warm:
            self._warm_up(config)
        return self._timer(lambda: self._run(config))

    def time_plain(self) -> float:
        """Time one run of plain PyTorch, in ms."""
        return self._timer(self._run_plain)

    def _neighbour(self) -> OpBench:
        if self._ragged is None:
            self._ragged = type(self)(ragged_neighbour(self._problem), self._device, self._seed)
        return self._ragged

    def _warm_up(self, config: Config) -> None:
        self._run(config)
        self._synchronize()
        self._warm.add(config)

    def _check(self, config: Config) -> tuple[Errors, KernelResources]:
        if self._checker is None:
            self._checker = Checker(self._problem, self._inputs, self._seed)
        with poisoned(), watched_kernels() as kernels:
            outputs = self._run(config)
        self._synchronize()
        self._warm.add(config)
        return self._checker.errors(outputs), kernels

    def _run(self, config: Config) -> dict[str, Tensor]:
        inputs = self._inputs
        with torch.set_grad_enabled(self._problem.mode != "eval"):
            loss = linear_cross_entropy(
                inputs.x,
                inputs.weight,
                inputs.target,
                bias=inputs.bias,
                reduction=inputs.reduction,
                label_smoothing=inputs.label_smoothing,
                softcap=inputs.softcap,
                class_weight=inputs.class_weight,
                outputs=STATISTICS if "statistics" in self._problem.features else (),
                accumulate=self._problem.accumulate,
                config=config,
            )
            if isinstance(loss, LossOutputs):
                loss = loss.loss
            assert isinstance(loss, Tensor)
            return inputs.outputs(loss)

    def _run_plain(self) -> dict[str, Tensor]:
        with torch.set_grad_enabled(self._problem.mode != "eval"):
            return self._inputs.outputs(plain_loss(self._inputs))

    def _require_untouched_inputs(self) -> None:
        if not torch.equal(self._inputs.checksum(), self._checksum):
            self._inputs = make_inputs(self._problem, self._device, self._seed)
            raise WrongResultError("the config wrote into its inputs", {})

    def _timed_with_workspace(self, config: Config) -> tuple[float, int]:
        if self._device.type == "cpu":
            return self.time(config), strategies.workspace(config, self._problem)
        before = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        sample_ms = self.time(config)
        peak = torch.cuda.max_memory_allocated(self._device) - before
        returned = sum(leaf.nbytes for leaf in self._inputs.leaves.values())
        return sample_ms, max(0, peak - returned)

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _cpu_time(run: Run) -> float:
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1e3


def _cuda_timer(device: torch.device) -> Callable[[Run], float]:
    """Time on the device between two events, starting with a cold L2 cache.

    About two milliseconds of writes are queued first, so that the host runs ahead of the device
    as it does in training: launching is not what configs are compared by.
    """
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    flush = torch.empty(max(2 * l2_bytes, 1 << 26), dtype=torch.int8, device=device)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]

    def timed(run: Run) -> float:
        for _ in range(FLUSHES):
            flush.zero_()
        start.record()
        run()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end))

    return timed
