"""How far a sweep is: a bar on a terminal, plain lines elsewhere. Always on stderr."""

from __future__ import annotations

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
        yield Lines(console, problems)
        return
    columns: tuple[ProgressColumn, ...] = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        _Count(),
        TimeElapsedColumn(),
        _Best(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        yield Bar(progress, problems)


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

    def __init__(self, progress: Progress, problems: int) -> None:
        self._progress = progress
        self._problems = problems
        self._started = 0
        self._task: TaskID | None = None
        self._best: float | None = None

    def on_start(self, problem: Problem, total: int) -> None:
        """Head the problem."""
        self._started += 1
        self._best = None
        heading = f"[{self._started}/{self._problems}] {problem_text(problem)}"
        self._progress.console.print(Text(heading, style="bold"))

    def on_stage(self, stage: Stage, total: int) -> None:
        """Start a bar; only measuring is counted, the other stages pulse."""
        if self._task is not None:
            self._progress.remove_task(self._task)
        known = total if stage == "measure" else None
        self._task = self._progress.add_task(STAGES[stage], total=known, best=self._best)

    def on_measurement(self, measurement: Measurement, done: int, total: int) -> None:
        """Move the bar."""
        if measurement.median_ms is not None:
            self._best = min(self._best or measurement.median_ms, measurement.median_ms)
        if self._task is not None:
            self._progress.update(self._task, completed=done, total=total, best=self._best)

    def on_winners(self, winners: Sequence[Winner]) -> None:
        """Take the bar away."""
        if self._task is not None:
            self._progress.remove_task(self._task)
            self._task = None


class Lines(SweepEvents):
    """Lines for a log: each stage, each tenth of the way, each failure."""

    def __init__(self, console: Console, problems: int) -> None:
        self._console = console
        self._problems = problems
        self._started = 0

    def on_start(self, problem: Problem, total: int) -> None:
        """Head the problem."""
        self._started += 1
        self._print(f"[{self._started}/{self._problems}] {problem_text(problem)}: {total} configs")

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

    def _print(self, line: str) -> None:
        self._console.print(line, soft_wrap=True)
