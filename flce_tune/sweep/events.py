"""What goes into a sweep, what it tells while it runs, and what it reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from flce_tune.kernels.problem import Device, Problem
from flce_tune.tuning_db.records import Measurement, Status, Winner

Stage = Literal["compile", "measure", "race", "final"]


@dataclass(frozen=True, slots=True)
class SweepOptions:
    """How a sweep goes about it."""

    strategies: tuple[str, ...] | None = None  # names; None: all of them
    budget: int | None = None  # most configs measured for one problem; None: the whole space
    quick: bool = False  # a small sample and a short final
    time_limit_s: float | None = None
    """For one problem. None: 180 s, 30 s if quick, no limit with a budget."""
    timeout_s: float = 60.0  # for one candidate, its compilation included
    seed: int = 0  # of the sample and of the inputs
    isolate: bool = True  # measure in a process of its own, which may crash or hang


class SweepEvents:
    """Receives progress; does nothing with it. Override what is of interest.

    Called from the thread that runs the sweep, or with several places from a thread for each; an
    exception ends the sweep.
    """

    def at(self, place: str) -> SweepEvents:
        """Give out what receives the progress of one of several places."""
        return self

    def on_wait(self, problem: Problem, owner: str) -> None:
        """Announce that another process is sweeping a problem, which is left for later."""

    def on_place_lost(self, place: str, reason: str, dropped: bool) -> None:
        """Announce that a place failed; its problem is done elsewhere, or there again."""

    def on_start(self, problem: Problem, total: int) -> None:
        """Announce a problem with at most ``total`` configs to measure."""

    def on_stage(self, stage: Stage, total: int) -> None:
        """Announce a stage of the current problem that handles at most ``total`` configs."""

    def on_measurement(self, measurement: Measurement, done: int, total: int) -> None:
        """Hand over a stored measurement, the ``done``-th of at most ``total``."""

    def on_winners(self, winners: Sequence[Winner]) -> None:
        """Hand over the stored winners of the current problem, fastest first."""


@dataclass(frozen=True, slots=True)
class ProblemReport:
    """How the sweep of one problem went."""

    problem: Problem
    device: Device | None = None  # None: no device ever got to it
    winners: tuple[Winner, ...] = ()  # fastest first; empty when interrupted or all failed
    measured: int = 0  # configs measured now, failures included
    resumed: int = 0  # configs whose earlier measurement was used
    left_out: int = 0  # configs that the time limit left unmeasured, at most
    failures: Mapping[Status, int] = field(default_factory=dict)  # of the configs measured now
    default_ms: float | None = None
    eager_ms: float | None = None  # plain PyTorch; None where it did not fit
    seconds: float = 0.0
    stages: Mapping[Stage, float] = field(default_factory=dict)  # seconds of each
    error: str | None = None  # why there are no winners

    @property
    def best_ms(self) -> float | None:
        """The fastest winner's median."""
        return min((w.measurement.median_ms or 0.0 for w in self.winners), default=None)


@dataclass(frozen=True, slots=True)
class SweepReport:
    """How a sweep went, problem by problem."""

    problems: tuple[ProblemReport, ...]
    interrupted: bool = False  # should_stop said so; what was measured is stored

    @property
    def winners(self) -> tuple[Winner, ...]:
        """The winners of all problems."""
        return tuple(winner for problem in self.problems for winner in problem.winners)
