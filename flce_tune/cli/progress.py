"""How far a sweep is: a bar on a terminal, plain lines elsewhere. Always on stderr."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

from flce_tune.cli.units import format_ms
from flce_tune.cli.views import config_text, problem_text
from flce_tune.kernels.problem import Problem
from flce_tune.sweep.events import Stage, SweepEvents
from flce_tune.tuning_db.records import Measurement, Status, Winner

STAGES: dict[Stage, str] = {
    "compile": "compiling",
    "measure": "measuring",
    "race": "racing the best third",
    "final": "final",
}


@contextmanager
def reporting(console: Console, problems: int) -> Iterator[SweepEvents]:
    """Events that show the progress of a sweep of ``problems`` problems on ``console``."""
    if not console.is_terminal:
        yield Lines(console, _Heading(problems))
        return
    columns: tuple[ProgressColumn, ...] = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        _Count(),
        TimeElapsedColumn(),
        _Best(),
    )
    heading = _Heading(problems)
    progress = Progress(*columns, console=console, transient=True, auto_refresh=False)
    with progress, _ticking(progress, heading.lock):
        yield Bar(progress, heading)


@contextmanager
def _ticking(progress: Progress, lock: threading.Lock) -> Iterator[None]:
    """Draw ten times a second, never while a place prints: Rich's own thread would mix the two."""
    ended = threading.Event()

    def draw() -> None:
        while not ended.wait(0.1):
            with lock:
                progress.refresh()

    thread = threading.Thread(target=draw, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


class _Count(ProgressColumn):
    """``3/8``; nothing while a stage does not count."""

    def render(self, task: Task) -> Text:
        return Text("" if task.total is None else f"{task.completed:.0f}/{task.total:.0f}")


class _Best(ProgressColumn):
    """The fastest time so far."""

    def render(self, task: Task) -> Text:
        best = task.fields.get("best")
        return Text("" if best is None else f"best {format_ms(best)} ms", style="green")


class Bar(SweepEvents):
    """A progress bar; each problem leaves one line behind."""

    def __init__(self, progress: Progress, heading: _Heading, place: str | None = None) -> None:
        self._progress = progress
        self._heading = heading
        self._prefix = f"{place}: " if place else ""
        self._task: TaskID | None = None
        self._best: float | None = None

    def at(self, place: str) -> SweepEvents:
        """Give out a bar of its own for one of several places."""
        return Bar(self._progress, self._heading, place)

    def on_start(self, problem: Problem, total: int) -> None:
        """Head the problem."""
        self._best = None
        with self._heading.lock:
            self._say(self._prefix + self._heading.next(problem), "bold")

    def on_stage(self, stage: Stage, total: int) -> None:
        """Start a bar; only measuring is counted, the other stages pulse."""
        with self._heading.lock:
            self._clear()
            self._task = self._progress.add_task(
                self._prefix + STAGES[stage],
                total=total if stage == "measure" else None,
                best=self._best,
            )

    def on_measurement(self, measurement: Measurement, done: int, total: int) -> None:
        """Move the bar."""
        if measurement.median_ms is not None:
            self._best = min(self._best or measurement.median_ms, measurement.median_ms)
        if self._task is not None:
            self._progress.update(self._task, completed=done, total=total, best=self._best)

    def on_winners(self, winners: Sequence[Winner]) -> None:
        """Take the bar away."""
        with self._heading.lock:
            self._clear()

    def on_wait(self, problem: Problem, owner: str) -> None:
        """Say who is waited for."""
        with self._heading.lock:
            self._say(_waiting(problem, owner), "dim")

    def on_place_lost(self, place: str, reason: str, dropped: bool) -> None:
        """Say what was lost, and take its bar away."""
        with self._heading.lock:
            self._clear()
            self._progress.refresh()
            self._say(_lost(place, reason, dropped), "yellow")

    def _say(self, line: str, style: str) -> None:
        self._progress.console.print(Text(line, style=style))

    def _clear(self) -> None:
        if self._task is not None:
            self._progress.remove_task(self._task)
            self._task = None


class Lines(SweepEvents):
    """Lines for a log: each stage, each tenth of the way, each failure."""

    def __init__(self, console: Console, heading: _Heading, place: str | None = None) -> None:
        self._console = console
        self._heading = heading
        self._prefix = f"{place}: " if place else ""

    def at(self, place: str) -> SweepEvents:
        """Give out lines that begin with the place."""
        return Lines(self._console, self._heading, place)

    def on_start(self, problem: Problem, total: int) -> None:
        """Head the problem."""
        self._print(f"{self._heading.next(problem)}: {total} configs")

    def on_stage(self, stage: Stage, total: int) -> None:
        """Name the stage."""
        self._print(f"{STAGES[stage]}: {total}")

    def on_measurement(self, measurement: Measurement, done: int, total: int) -> None:
        """Report failures, and some of the rest."""
        outcome = f"{done}/{total} {config_text(measurement)}"
        if measurement.status is not Status.OK:
            reason = " ".join(measurement.message.split())[:200]
            self._print(f"{outcome}: {measurement.status.value} {reason}")
        elif done * 10 // max(total, 1) > (done - 1) * 10 // max(total, 1):
            self._print(f"{outcome}: {format_ms(measurement.median_ms)} ms")

    def on_winners(self, winners: Sequence[Winner]) -> None:
        """Name the fastest."""
        fastest = winners[0].measurement
        self._print(f"winner: {config_text(fastest)}: {format_ms(fastest.median_ms)} ms")

    def on_wait(self, problem: Problem, owner: str) -> None:
        """Say who is waited for."""
        self._print(_waiting(problem, owner))

    def on_place_lost(self, place: str, reason: str, dropped: bool) -> None:
        """Say what was lost."""
        self._console.print(_lost(place, reason, dropped), soft_wrap=True)

    def _print(self, line: str) -> None:
        self._console.print(self._prefix + line, soft_wrap=True)


class _Heading:
    """Numbers the problems, on whichever place they are."""

    def __init__(self, problems: int) -> None:
        self.lock = threading.Lock()  # one place draws at a time
        self._problems = problems
        self._numbers: dict[Problem, int] = {}

    def next(self, problem: Problem) -> str:
        """Name a problem; one that is tried again keeps its number."""
        number = self._numbers.setdefault(problem, len(self._numbers) + 1)
        return f"[{number}/{self._problems}] {problem_text(problem)}"


def _waiting(problem: Problem, owner: str) -> str:
    who = owner.partition(" ")[0] or "another process"
    return f"{problem_text(problem)} is being swept by a process on {who}; left for later"


def _lost(place: str, reason: str, dropped: bool) -> str:
    told = " ".join(reason.split())[:200]
    return f"{place} failed: {told}; " + ("it is left alone now" if dropped else "trying again")
