"""How far a job is, put together from its events."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError

from flce_tune.dispatch.convert import problem_record
from flce_tune.service.pages import formats
from flce_tune.service.schemas import JobSpec, ProblemSpec
from flce_tune.tuning_db.records import JobEvent

Count = Annotated[int, Field(ge=0, le=2**63 - 1)]

LATEST = 8
"""Measurements shown while a job runs."""

STAGES = {
    "compile": "compiling kernels",
    "measure": "measuring configs",
    "race": "racing the best third",
    "final": "running the final",
}


class Step(BaseModel):
    """A "progress" event: a problem or a stage begins."""

    problem: ProblemSpec | None = None
    stage: str | None = None
    done: Count = 0
    total: Count = 0


class Outcome(BaseModel):
    """A "measurement" event: how one config fared."""

    config: str = ""
    status: str
    median_ms: float | None = None
    message: str = ""
    done: Count = 0
    total: Count = 0


class Best(BaseModel):
    """A winner, as the job reported it."""

    config: dict[str, Any]
    median_ms: float | None = None
    workspace_bytes: Count | None = None
    default_ms: float | None = None
    eager_ms: float | None = None


class _Winners(BaseModel):
    winners: list[Best]


@dataclass(frozen=True, slots=True)
class Front:
    """The winners of one problem of the job, fastest first."""

    problem: ProblemSpec | None
    winners: list[Best]


@dataclass(slots=True)
class Progress:
    """What the events of one job add up to."""

    problems: int  # the job has
    current: ProblemSpec | None = None
    number: int = 0  # of the current problem, from 1; 0: none yet
    stage: str = ""
    done: int = 0  # of the stage
    total: int = 0
    measured: int = 0
    failed: int = 0
    attempts: int = 0
    latest: deque[Outcome] = field(default_factory=lambda: deque(maxlen=LATEST))
    fronts: list[Front] = field(default_factory=list)

    def add(self, events: Iterable[JobEvent]) -> None:
        """Take note of more events, in their order.

        A worker may report anything; what is not as its kind should be is passed over.
        """
        for event in events:
            with contextlib.suppress(ValidationError):
                self._note(event)

    def _note(self, event: JobEvent) -> None:
        if event.kind == "state" and "attempt" in event.data:
            self._start_again()
        elif event.kind == "progress":
            step = Step.model_validate(event.data)
            if step.problem is not None:
                self.current = step.problem
                self.number += 1
            self.stage = step.stage or ""
            self.done, self.total = step.done, step.total
        elif event.kind == "measurement":
            outcome = Outcome.model_validate(event.data)
            self.measured += 1
            self.failed += outcome.status != "ok"
            self.done, self.total = outcome.done, outcome.total
            self.latest.appendleft(outcome)
        elif event.kind == "winners":
            found = _Winners.model_validate(event.data)
            self.fronts.append(Front(self.current, found.winners))

    def _start_again(self) -> None:
        """Whoever takes the job over goes through all its problems again."""
        self.attempts += 1
        self.current, self.number, self.stage = None, 0, ""
        self.done = self.total = 0
        self.fronts.clear()

    @property
    def doing(self) -> str:
        """What the sweep is at, in words."""
        stage = STAGES.get(self.stage, "starting")
        if self.problems < 2:
            return stage
        return f"problem {max(self.number, 1)} of {self.problems}: {stage}"


def title(spec: JobSpec) -> str:
    """What a job tunes, in one line."""
    if spec.preset is not None:
        return f"{spec.preset}: N = {', '.join(str(p.tokens) for p in spec.problems)}"
    first = spec.problems[0]
    more = f" and {len(spec.problems) - 1} more" if len(spec.problems) > 1 else ""
    return f"{first.tokens} × {first.hidden} × {first.vocab} {first.dtype}{more}"


def slug(problem: ProblemSpec) -> str:
    """The problem's name in addresses."""
    return formats.problem_slug(problem_record(problem.problem()))
