"""When each stage of the sweep of one problem has to end.

What is worth most comes first in every stage, so that what a stage has no time for is the least
promising; a stage that ends early leaves its time to the next ones.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from flce_tune.sweep.events import Stage, SweepOptions

Clock = Callable[[], float]  # seconds


@dataclass(frozen=True, slots=True)
class Effort:
    """How long the stages may be."""

    limit_s: float  # for one problem, unless something else was asked for
    measure: float  # the part of it by whose end the measuring ends
    race: float
    final: float  # the rest is for what comes after the last round
    second_runs: int  # more runs of the best third
    finalists: int
    rounds: int  # of the final, at most
    final_s: float  # about how long the final may take


FULL = Effort(180.0, 0.70, 0.86, 0.96, second_runs=2, finalists=16, rounds=15, final_s=20.0)
QUICK = Effort(30.0, 0.60, 0.76, 0.92, second_runs=1, finalists=8, rounds=9, final_s=6.0)


def effort_of(options: SweepOptions) -> Effort:
    """What the options ask for."""
    return QUICK if options.quick else FULL


def limit_of(options: SweepOptions) -> float:
    """Seconds for one problem; infinite where a number of configs was asked for instead."""
    if options.time_limit_s is not None:
        return options.time_limit_s
    return effort_of(options).limit_s if options.budget is None else math.inf


class Schedule:
    """The ends of the stages on one clock."""

    def __init__(
        self, options: SweepOptions, *, spent_s: float = 0.0, clock: Clock = time.monotonic
    ) -> None:
        """Start now; ``spent_s`` of the limit have been used before."""
        effort, self.limit_s = effort_of(options), limit_of(options)
        self._clock = clock
        started = clock() - spent_s
        self._ends: dict[Stage, float] = {
            "measure": started + effort.measure * self.limit_s,
            "race": started + effort.race * self.limit_s,
            "final": started + effort.final * self.limit_s,
        }

    def left(self, stage: Stage) -> float:
        """Seconds until a stage has to end; negative once it is late."""
        return self._ends[stage] - self._clock()

    def over(self, stage: Stage) -> bool:
        """Whether a stage has had its time."""
        return self.left(stage) <= 0
