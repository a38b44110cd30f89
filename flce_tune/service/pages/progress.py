"""How far a job is, put together from its events."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from flce_tune.dispatch.convert import problem_record
from flce_tune.service.pages import formats
from flce_tune.service.schemas import JobSpec, ProblemSpec
from flce_tune.tuning_db.records import JobEvent

LATEST = 8
"""Measurements shown while a job runs."""

STAGES = {
    "compile": "compiling kernels",
    "measure": "measuring configs",
    "race": "racing the best third",
    "final": "running the final",
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """One config measured."""

    config: str
    status: str
    ms: float | None
    message: str


@dataclass(frozen=True, slots=True)
class Front:
    """The winners of one problem of the job, fastest first, as the job reported them."""

    problem: ProblemSpec | None
    winners: tuple[Mapping[str, Any], ...]


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
        """Take note of more events, in their order."""
        for event in events:
            note = _NOTES.get(event.kind)
            if note is not None:
                note(self, event.data)

    @property
    def doing(self) -> str:
        """What the sweep is at, in words."""
        stage = STAGES.get(self.stage, "starting")
        if self.problems < 2:
            return stage
        return f"problem {max(self.number, 1)} of {self.problems}: {stage}"


def _state(progress: Progress, data: Mapping[str, Any]) -> None:
    if "attempt" in data:  # whoever takes the job over goes through all problems again
        progress.attempts = int(data["attempt"])
        progress.current, progress.number, progress.stage = None, 0, ""
        progress.done = progress.total = 0
        progress.fronts.clear()


def _step(progress: Progress, data: Mapping[str, Any]) -> None:
    if "problem" in data:
        progress.current = ProblemSpec.model_validate(data["problem"])
        progress.number += 1
        progress.stage = ""
    progress.stage = str(data.get("stage", progress.stage))
    progress.done, progress.total = int(data.get("done", 0)), int(data.get("total", 0))


def _measurement(progress: Progress, data: Mapping[str, Any]) -> None:
    progress.measured += 1
    status = str(data.get("status", ""))
    progress.failed += status != "ok"
    progress.done = int(data.get("done", progress.done))
    progress.total = int(data.get("total", progress.total))
    progress.latest.appendleft(
        Outcome(
            config=str(data.get("config", "")),
            status=status.replace("_", " "),
            ms=data.get("median_ms"),
            message=str(data.get("message", "")),
        )
    )


def _winners(progress: Progress, data: Mapping[str, Any]) -> None:
    progress.fronts.append(Front(progress.current, tuple(data.get("winners", ()))))


_NOTES = {"state": _state, "progress": _step, "measurement": _measurement, "winners": _winners}


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
