"""Verification: measures known winners again, and keeps those that still win.

A short sweep of nothing but the default config and the winners: the same check, the same
interleaved final, the same rules of who wins. The winners are the incumbents, so that a tie, which
is all that noise brings, demotes nobody.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from flce_tune.dispatch.convert import config_of, device_record, problem_of
from flce_tune.errors import InvalidConfigError, SweepError
from flce_tune.kernels import strategies
from flce_tune.kernels.config import Config
from flce_tune.kernels.problem import Problem
from flce_tune.sweep.agenda import Agenda, Turn
from flce_tune.sweep.claims import Claims
from flce_tune.sweep.events import ProblemReport, SweepEvents, SweepOptions
from flce_tune.sweep.measure import BenchFactory, OpBench
from flce_tune.sweep.places import LocalPlace
from flce_tune.sweep.tuning import ProblemSweep
from flce_tune.sweep.worker import StoppedError
from flce_tune.tuning_db.records import ProblemRecord, Status, Winner
from flce_tune.tuning_db.store import Store


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one winner."""

    before: Winner
    reason: str | None  # why it does not win any more; None: it still does


@dataclass(frozen=True, slots=True)
class Verification:
    """How the verification of one problem went."""

    problem: ProblemRecord
    sweep: ProblemReport | None  # its winners are the surviving front; None: it could not start
    verdicts: tuple[Verdict, ...]  # fastest first; empty when interrupted or failed
    error: str | None = None  # why nothing is known; the stored front is as it was


def verify(
    fronts: Sequence[Sequence[Winner]],
    store: Store,
    device: torch.device,
    options: SweepOptions | None = None,
    *,
    events: SweepEvents | None = None,
    should_stop: Callable[[], bool] | None = None,
    make_bench: BenchFactory = OpBench,
) -> list[Verification]:
    """Measure each front again on ``device`` and store what is left of it.

    Every measurement is kept. Where not even the default config ran, or after an interruption,
    the stored front of that problem stays. A list shorter than ``fronts`` was interrupted. A
    problem that a sweep or another verification has at the moment is left to the end.

    Args:
        fronts: the winners of one problem of this device each, not empty, fastest first.
        store: where measurements and fronts go.
        device: the device to measure on.
        options: timeout, seed and isolation; quick unless given.
        events: receives progress.
        should_stop: is asked several times a second.
        make_bench: decides how a config is measured.

    Raises:
        StoreError: the store failed.
    """
    options = replace(options or SweepOptions(quick=True), time_limit_s=math.inf)
    events, stopped = events or SweepEvents(), should_stop or (lambda: False)
    place = LocalPlace(device, isolate=options.isolate)
    done: dict[ProblemRecord, Verification] = {}
    left: dict[Problem, Sequence[Winner]] = {}
    for front in fronts:
        record, tokens = front[0].measurement.problem, front[0].measurement.tokens
        try:
            left[problem_of(record, tokens)] = front
        except ValueError as error:
            done[record] = Verification(
                record, None, (), f"this version cannot measure it: {error}"
            )
    with Claims(store) as claims, contextlib.suppress(StoppedError):
        agenda = Agenda(list(left), device_record(place.device), claims, stopped, events.on_wait)
        while (turn := agenda.take()) is not None:
            front = left[turn.task.problem]
            if turn.task.announced:  # who had it may have stored other winners
                front = _stored(front, store) or front
            again = _Again(
                turn.task.problem,
                store,
                place,
                options,
                events,
                lambda claim=turn.claim: claim.lost or stopped(),  # type: ignore[misc]
                make_bench,
            )
            report = _report(again, front, agenda, turn, stopped)
            if report is not None:
                record = front[0].measurement.problem
                verdicts = () if report.error else tuple(map(again.verdict, front))
                done[record] = Verification(record, report, verdicts, report.error)
    records = (front[0].measurement.problem for front in fronts)
    return [done[record] for record in records if record in done]


def _report(
    again: _Again,
    front: Sequence[Winner],
    agenda: Agenda,
    turn: Turn,
    stopped: Callable[[], bool],
) -> ProblemReport | None:
    """Verify a front that is ours to verify; None: somebody else got the problem, and it waits."""
    try:
        report = again.run_again(front)
    except BaseException as error:
        agenda.give_back(turn)
        if isinstance(error, StoppedError) and not stopped():
            return None
        raise
    agenda.finish(turn, report, finished=None)
    return report


def _stored(front: Sequence[Winner], store: Store) -> tuple[Winner, ...]:
    one = front[0].measurement
    return tuple(store.winners(device=one.device, problem=one.problem))


class _Again(ProblemSweep):
    """A sweep of the default config and given winners alone."""

    def run_again(self, winners: Sequence[Winner]) -> ProblemReport:
        """Check and race them, store the front.

        Raises:
            StoppedError: ``should_stop`` said so.
        """
        default = strategies.default(self._problem, self._device)
        incumbents = [c for w in winners if (c := _config(w)) and self._why_not(c) is None]
        configs = list(dict.fromkeys([default, *incumbents]))
        try:
            self._events.on_start(self._problem, len(configs))
            self._events.on_stage("measure", len(configs))
            self._measure(configs, len(configs))
            self._final(default, incumbents)
        except SweepError as error:
            self._progress = replace(self._progress, error=str(error))
        finally:
            self._runner.close()
        return self.report()

    def verdict(self, winner: Winner) -> Verdict:
        """Tell what became of a winner."""
        config = _config(winner)
        if config is None:
            return Verdict(winner, "this version cannot read its config")
        if reason := self._why_not(config):
            return Verdict(winner, f"it cannot run here: {reason}")
        if any(_config(left) == config for left in self._progress.winners):
            return Verdict(winner, None)
        outcome = self._journal.outcomes[config]
        if outcome.status is not Status.OK:
            message = " ".join(outcome.message.split())[:200]
            return Verdict(winner, f"{outcome.status.value}: {message}")
        better = self._progress.winners[0].measurement
        return Verdict(
            winner,
            f"others are as fast and no larger: it took {outcome.median_ms:.4g} ms now, "
            f"the fastest {better.median_ms:.4g} ms",
        )

    def _why_not(self, config: Config) -> str | None:
        return strategies.reject(config, self._problem, self._device)


def _config(winner: Winner) -> Config | None:
    try:
        return config_of(winner.measurement)
    except InvalidConfigError:
        return None
