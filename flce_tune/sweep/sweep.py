"""The driver: sweeps problems one after the other, or several at once on several devices."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace

import torch

from flce_tune.dispatch.convert import device_record, problem_record
from flce_tune.errors import SweepError
from flce_tune.kernels import strategies
from flce_tune.kernels.problem import Device, Problem
from flce_tune.sweep.agenda import Agenda, Turn
from flce_tune.sweep.claims import Claims
from flce_tune.sweep.events import ProblemReport, SweepEvents, SweepOptions, SweepReport
from flce_tune.sweep.measure import BenchFactory, OpBench
from flce_tune.sweep.places import LocalPlace, Place, PlaceLostError, works
from flce_tune.sweep.tuning import ProblemSweep
from flce_tune.sweep.worker import StoppedError
from flce_tune.tuning_db.store import Store

STRIKES = 2  # losses in a row after which a place is left alone


def sweep(
    problems: Sequence[Problem],
    store: Store,
    where: torch.device | Sequence[Place],
    options: SweepOptions | None = None,
    *,
    events: SweepEvents | None = None,
    should_stop: Callable[[], bool] | None = None,
    make_bench: BenchFactory = OpBench,
    spent_s: float = 0.0,
) -> SweepReport:
    """Tune each problem on a device, or on each kind of device among places.

    Everything is stored as it comes. The same call after an interruption goes on where it stopped:
    configs that this toolchain has measured on this kind of device, or that have failed there, are
    not measured again. A problem that another process is sweeping on this kind of device is left
    to the end; once that has done the same, its winners are reported.

    Args:
        problems: what to tune.
        store: where measurements and winners go.
        where: a device of this host; or places, each of which measures one problem at a time.
        options: how; the defaults unless given.
        events: receives progress.
        should_stop: is asked several times a second; when it says yes the report tells what was
            done so far.
        make_bench: decides how a config is measured.
        spent_s: what has been used of the time limit of each place's first problem.

    Raises:
        SweepError: no problem got a winner; the message tells why, problem by problem.
        UnknownStrategyError: the options name a strategy that cannot be tuned.
        StoreError: the store failed.
    """
    options = options or SweepOptions()
    for name in options.strategies or ():
        strategies.require_tunable(name)
    if isinstance(where, torch.device):
        where = [LocalPlace(where, isolate=options.isolate)]
    with Claims(store) as claims:
        one = _Sweep(problems, store, claims, options, events, should_stop, make_bench, spent_s)
        report = one.run(where)
    if report.problems and not report.interrupted and not report.winners:
        reasons = "\n".join(f"{r.problem}: {r.error}" for r in report.problems)
        raise SweepError(f"no config could be tuned.\n{reasons}")
    return report


class _Sweep:
    """One call of ``sweep``: what its places share."""

    def __init__(
        self,
        problems: Sequence[Problem],
        store: Store,
        claims: Claims,
        options: SweepOptions,
        events: SweepEvents | None,
        should_stop: Callable[[], bool] | None,
        make_bench: BenchFactory,
        spent_s: float,
    ) -> None:
        self._problems = problems
        self._store = store
        self._claims = claims
        self._options = options
        self._events = events or SweepEvents()
        self._should_stop = should_stop or (lambda: False)
        self._make_bench = make_bench
        self._spent_s = spent_s
        self._started_at = store.now()
        self._agendas: dict[Device, Agenda] = {}
        self._lock = threading.Lock()
        self._failed: list[BaseException] = []  # what ends the whole sweep
        self._interrupted = threading.Event()
        self._partial: list[ProblemReport] = []  # of problems that were interrupted
        self._losses: dict[str, str] = {}  # the last one of each place

    def run(self, places: Sequence[Place]) -> SweepReport:
        if len(places) == 1:
            self._serve(places[0], self._events)
        else:
            self._serve_all(places)
        if self._failed:
            raise self._failed[0]
        agendas = self._agendas.values()
        interrupted = self._interrupted.is_set()
        reports = [
            task.report or ProblemReport(task.problem, error=self._nobody_left())
            for agenda in agendas
            for task in agenda.tasks
            if task.report is not None or not interrupted
        ]
        if not self._agendas and not interrupted:
            reports = [ProblemReport(p, error=self._nobody_left()) for p in self._problems]
        return SweepReport((*reports, *self._partial), interrupted)

    def _serve_all(self, places: Sequence[Place]) -> None:
        threads = [
            threading.Thread(
                target=self._serve, args=(place, self._events.at(place.name)), name=place.name
            )
            for place in places
        ]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        except KeyboardInterrupt as error:
            self._failed.append(error)  # which stops the threads
            for thread in threads:
                thread.join()

    def _serve(self, place: Place, events: SweepEvents) -> None:
        """Sweep problem after problem on one place, until all are done or it fails too often."""
        strikes, spent_s = 0, self._spent_s
        try:
            while strikes < STRIKES:
                try:
                    place.open(self._stopped_or_done)
                    agenda = self._agenda(place)
                    while (turn := agenda.take()) is not None:
                        self._do(turn, agenda, place, events, spent_s)
                        strikes, spent_s = 0, 0.0
                    return
                except PlaceLostError as error:
                    strikes += 1
                    self._losses[place.name] = str(error)
                    events.on_place_lost(place.name, str(error), dropped=strikes == STRIKES)
                finally:
                    place.close()
        except StoppedError:
            if self._should_stop():
                self._interrupted.set()
        except BaseException as error:  # noqa: BLE001 - raised again by run
            self._failed.append(error)

    def _do(
        self, turn: Turn, agenda: Agenda, place: Place, events: SweepEvents, spent_s: float
    ) -> None:
        """Sweep one problem, or take over what another process has just done."""
        work = self._describe(turn.task.problem, place)
        lease = turn.lease
        if lease.finished == work and lease.finished_at and lease.finished_at > self._started_at:
            report = self._taken_over(turn.task.problem, place)
            if report.winners:
                events.on_start(turn.task.problem, 0)
                events.on_winners(report.winners)
                agenda.finish(turn, report, finished=work)
                return
        tuning = ProblemSweep(
            turn.task.problem,
            self._store,
            place,
            self._options,
            events,
            lambda: turn.claim.lost or self._stopped(),
            self._make_bench,
            spent_s=spent_s,
        )
        try:
            report = tuning.run()
        except StoppedError:
            agenda.give_back(turn)
            if self._stopped():
                self._partial.append(tuning.report())
                raise
            return
        except BaseException as error:
            agenda.give_back(turn, str(error))
            raise
        if report.error and not works(place):
            agenda.give_back(turn, report.error)
            raise PlaceLostError(report.error)
        agenda.finish(turn, report, finished=work if report.winners else None)

    def _taken_over(self, problem: Problem, place: Place) -> ProblemReport:
        device, record = device_record(place.device), problem_record(problem)
        known = self._store.measured_configs(device, record, problem.tokens, place.toolchain)
        winners = tuple(self._store.winners(device=device, problem=record))
        first = winners[0] if winners else None
        return ProblemReport(
            problem,
            place.device,
            winners,
            resumed=len(known),
            default_ms=first.default_ms if first else None,
            eager_ms=first.eager_ms if first else None,
        )

    def _describe(self, problem: Problem, place: Place) -> str:
        """What a sweep of a problem does: equal text, equal work."""
        options = asdict(replace(self._options, isolate=True))
        toolchain = asdict(place.toolchain)
        return json.dumps([problem.tokens, options, toolchain], sort_keys=True)

    def _agenda(self, place: Place) -> Agenda:
        """The problems of this kind of device; all of them when its first place has opened."""
        with self._lock:
            if place.device not in self._agendas:
                self._agendas[place.device] = Agenda(
                    self._problems,
                    device_record(place.device),
                    self._claims,
                    self._stopped,
                    self._events.on_wait,
                )
            return self._agendas[place.device]

    def _stopped(self) -> bool:
        return bool(self._failed) or self._should_stop()

    def _stopped_or_done(self) -> bool:
        agendas = list(self._agendas.values())
        return self._stopped() or (bool(agendas) and all(agenda.done for agenda in agendas))

    def _nobody_left(self) -> str:
        losses = "; ".join(f"{name}: {reason}" for name, reason in sorted(self._losses.items()))
        return f"nothing is left to measure it on: {losses}"
