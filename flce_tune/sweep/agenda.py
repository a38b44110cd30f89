"""The problems that are left for one kind of device, handed out to its places one by one.

What another process is sweeping goes to the end of the list: it is waited for only when nothing
else is left, and if that process has done just what was wanted here, its winners are taken over.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from flce_tune.dispatch.convert import problem_record
from flce_tune.kernels.problem import Problem
from flce_tune.sweep.claims import Claim, Claims
from flce_tune.sweep.events import ProblemReport
from flce_tune.sweep.worker import StoppedError
from flce_tune.tuning_db.records import DeviceRecord, SweepLease

WAIT_S = 1.0  # between two looks at what another process is sweeping
POLL_S = 0.1  # how often should_stop is looked at
ATTEMPTS = 3  # places a problem may bring down before it is given up


@dataclass(eq=False, slots=True)
class Task:
    """One problem and how it went."""

    problem: Problem
    lost: list[str] = field(default_factory=list)  # why it was given back, time after time
    announced: bool = False  # that another process is sweeping it
    report: ProblemReport | None = None


@dataclass(frozen=True, slots=True)
class Turn:
    """A task that is ours to do now."""

    task: Task
    claim: Claim
    lease: SweepLease


class Agenda:
    """Thread-safe."""

    def __init__(
        self,
        problems: Sequence[Problem],
        device: DeviceRecord,
        claims: Claims,
        should_stop: Callable[[], bool],
        on_wait: Callable[[Problem, str], None],
    ) -> None:
        self.tasks = [Task(problem) for problem in problems]
        self._device = device
        self._claims = claims
        self._should_stop = should_stop
        self._on_wait = on_wait
        self._waiting = list(self.tasks)
        self._changed = threading.Condition()

    @property
    def done(self) -> bool:
        """Whether every problem has its report."""
        return all(task.report is not None for task in self.tasks)

    def take(self) -> Turn | None:
        """Wait for the next problem; None: all are done.

        Raises:
            StoppedError: ``should_stop`` said so.
        """
        with self._changed:
            while not self.done:
                turn = self._claim_one()
                if turn is not None:
                    return turn
                self._pause()
        return None

    def give_back(self, turn: Turn, reason: str | None = None) -> None:
        """Put a problem back in the list; with a reason, that is its fault unless it is known."""
        with self._changed:
            if reason is not None:
                turn.task.lost.append(reason)
            if len(turn.task.lost) < ATTEMPTS:
                self._waiting.append(turn.task)
            else:
                error = f"given up after {ATTEMPTS} attempts; the last: {turn.task.lost[-1]}"
                turn.task.report = ProblemReport(turn.task.problem, error=error)
            self._claims.release(turn.claim)
            self._changed.notify_all()

    def finish(self, turn: Turn, report: ProblemReport, finished: str | None) -> None:
        """Note the report of a problem; ``finished`` says to other processes what was done."""
        with self._changed:
            turn.task.report = report
            self._claims.release(turn.claim, finished=finished)
            self._changed.notify_all()

    def _claim_one(self) -> Turn | None:
        for task in self._waiting:
            claim, lease = self._claims.claim(self._device, problem_record(task.problem))
            if claim is not None:
                self._waiting.remove(task)
                return Turn(task, claim, lease)
            if not task.announced:
                task.announced = True
                self._on_wait(task.problem, lease.owner or "")
        return None

    def _pause(self) -> None:
        """Let others change something, in this process or another one."""
        for _ in range(round(WAIT_S / POLL_S)):
            if self._should_stop():
                raise StoppedError
            if self._changed.wait(POLL_S):
                return
