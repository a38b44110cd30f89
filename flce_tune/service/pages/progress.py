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


class News(BaseModel):
    """What an event says of one place; jobs with a single one do not name it."""

    place: str = ""


class Step(News):
    """A "progress" event: a problem or a stage begins."""

    problem: ProblemSpec | None = None
    stage: str | None = None
    done: Count = 0
    total: Count = 0


class Outcome(News):
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


class _Winners(News):
    winners: list[Best]


@dataclass(frozen=True, slots=True)
class Front:
    """The winners of one problem of the job, fastest first."""

    problem: ProblemSpec | None
    winners: list[Best]


@dataclass(slots=True)
class Track:
    """What one place is at."""

    current: ProblemSpec | None = None
    stage: str = ""
    done: int = 0  # of the stage
    total: int = 0


@dataclass(slots=True)
class Progress:
    """What the events of one job add up to."""

    problems: int  # the job has
    number: int = 0  # of the problem that was begun last, from 1; 0: none yet
    tracks: dict[str, Track] = field(default_factory=dict)  # by place
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
            track = self._track(step)
            if step.problem is not None:
                track.current = step.problem
                self.number += 1
            track.stage = step.stage or ""
            track.done, track.total = step.done, step.total
        elif event.kind == "measurement":
            outcome = Outcome.model_validate(event.data)
            self.measured += 1
            self.failed += outcome.status != "ok"
            track = self._track(outcome)
            track.done, track.total = outcome.done, outcome.total
            self.latest.appendleft(outcome)
        elif event.kind == "winners":
            found = _Winners.model_validate(event.data)
            track = self._track(found)
            self.fronts.append(Front(track.current, found.winners))

    def _start_again(self) -> None:
        """Whoever takes the job over goes through all its problems again."""
        self.attempts += 1
        self.number = 0
        self.tracks.clear()
        self.fronts.clear()

    def _track(self, news: News) -> Track:
        """The place's, now the latest."""
        track = self.tracks.pop(news.place) if news.place in self.tracks else Track()
        self.tracks[news.place] = track
        return track

    @property
    def done(self) -> int:
        """Configs that the running stages have handled, of all places."""
        return sum(track.done for track in self.tracks.values())

    @property
    def total(self) -> int:
        """Configs that the running stages handle at most."""
        return sum(track.total for track in self.tracks.values())

    @property
    def stage(self) -> str:
        """Of the place that was heard of last."""
        return [*self.tracks.values()][-1].stage if self.tracks else ""

    @property
    def doing(self) -> str:
        """What the sweep is at, in words."""
        stage = STAGES.get(self.stage, "starting")
        if self.problems < 2:
            return stage
        told = f"problem {max(self.number, 1)} of {self.problems}: {stage}"
        return f"{told}, on {len(self.tracks)} devices" if len(self.tracks) > 1 else told


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
