"""The sweep of one problem: measure its configs, race the best, store the winners."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from flce_tune.dispatch.rules import Query, usable_front
from flce_tune.dispatch.snapshot import Snapshot
from flce_tune.errors import SweepError
from flce_tune.kernels import strategies
from flce_tune.kernels.config import Config
from flce_tune.kernels.problem import Problem
from flce_tune.sweep.candidates import Search
from flce_tune.sweep.events import ProblemReport, Stage, SweepEvents, SweepOptions
from flce_tune.sweep.failures import CandidateError
from flce_tune.sweep.interval import FEWEST
from flce_tune.sweep.journal import Journal
from flce_tune.sweep.measure import BenchFactory
from flce_tune.sweep.places import Place
from flce_tune.sweep.precompile import Precompiler
from flce_tune.sweep.race import by_promise, front, shortlist
from flce_tune.sweep.schedule import Clock, Schedule, effort_of
from flce_tune.sweep.trials import Trials
from flce_tune.sweep.worker import Method, StoppedError
from flce_tune.tuning_db.records import Measurement, Status, Winner, canonical_config
from flce_tune.tuning_db.store import Store

PERMANENT = (Status.COMPILE_ERROR, Status.OUT_OF_RESOURCES)  # wherever and whenever it is tried
SECOND_CHANCES = 40  # configs that run again, at most
LEAST_ROUNDS = 2  # of the final, however late it is
FEWEST_FINALISTS = 3


class ProblemSweep:
    """The sweep of one problem. Stores as it goes; ``report`` tells how far it came."""

    def __init__(
        self,
        problem: Problem,
        store: Store,
        place: Place,
        options: SweepOptions,
        events: SweepEvents,
        should_stop: Callable[[], bool] | None,
        make_bench: BenchFactory,
        *,
        spent_s: float = 0.0,  # of the time limit, before this began
        clock: Clock = time.monotonic,
    ) -> None:
        self._problem = problem
        self._store = store
        self._place = place
        self._device = place.device
        self._options = options
        self._effort = effort_of(options)
        self._schedule = Schedule(options, spent_s=spent_s, clock=clock)
        self._clock = clock
        self._events = events
        self._should_stop = should_stop or (lambda: False)
        self._make_bench = make_bench
        self._runner = place.runner(make_bench, problem, options.seed, self._should_stop)
        self._journal = Journal(store, place, problem)
        self._trials = Trials(self._call, self._journal.failed, clock)
        self._compiler: Precompiler | None = None
        self._uncompilable: set[Config] = set()
        self._stages: list[tuple[Stage, float]] = []  # and when they started
        self._progress = ProblemReport(problem, place.device)
        self._started = clock()

    def run(self) -> ProblemReport:
        """Measure, race, store the winners.

        Raises:
            StoppedError: ``should_stop`` said so.
            PlaceLostError: the place is gone.
        """
        try:
            self._runner.prepare()
            default = strategies.default(self._problem, self._device)
            incumbents, near = self._incumbents(), self._near()
            always = [default, *incumbents, *near]
            search = Search(self._problem, self._device, self._options, always, near)
            self._events.on_start(self._problem, search.budget)
            self._compiler = self._compile(search)
            self._stage("measure", search.budget)
            for batch in search.batches(self._trials.median):
                if not self._measure(self._resume(batch), search.budget):
                    self._leave_out(search.budget)
                    break
            self._race([default, *incumbents])
            if self._compiler is not None:
                self._compiler.close()  # the final has the device for itself
            self._final(default, incumbents)
        except SweepError as error:
            self._progress = replace(self._progress, error=str(error))
        finally:
            if self._compiler is not None:
                self._compiler.close()
            self._runner.close()
        return self.report()

    def report(self) -> ProblemReport:
        """Tell what has been done so far."""
        now = self._clock()
        ends = [*(start for _, start in self._stages[1:]), now]
        return replace(
            self._progress,
            failures=dict(self._journal.failures),
            seconds=now - self._started,
            stages={s: end - start for (s, start), end in zip(self._stages, ends, strict=True)},
        )

    def _stage(self, stage: Stage, total: int) -> None:
        self._stages.append((stage, self._clock()))
        self._events.on_stage(stage, total)

    def _incumbents(self) -> list[Config]:
        """The stored winners that can run here, fastest first."""
        return [
            config
            for config in self._journal.winning()
            if strategies.reject(config, self._problem, self._device) is None
        ]

    def _near(self) -> list[Config]:
        """The front that the dispatcher would start from, stored or shipped; it may be empty."""
        query = Query(self._problem, self._device, None, {}, lambda _: "")
        measured = Snapshot.from_winners(self._store.winners(), "")
        return usable_front(measured, Snapshot.from_pretuned(), query)

    def _resume(self, configs: Sequence[Config]) -> list[Config]:
        """Take over what was measured before; return the rest."""
        known = self._journal.known()
        todo = []
        for config in configs:
            earlier = known.get(canonical_config(config.to_dict()))
            if earlier is None:
                todo.append(config)
            elif earlier.status is Status.OK:
                self._trials.take_over(config, earlier.samples_ms, earlier.workspace_bytes or 0)
        resumed = self._progress.resumed + len(configs) - len(todo)
        self._progress = replace(self._progress, resumed=resumed)
        return todo

    def _compile(self, search: Search) -> Precompiler | None:
        """Start to compile all tiles on a GPU that are not known from before."""
        has_compiler = self._device.kind == "cuda" and self._place.toolchain.triton
        if not (has_compiler and self._options.isolate):
            return None
        known = self._journal.known()
        todo = [c for c in search.tiled() if canonical_config(c.to_dict()) not in known]
        compiler = Precompiler(
            todo,
            self._problem,
            self._place,
            self._make_bench,
            timeout_s=self._options.timeout_s,
            urgent=sum(config in search.always for config in todo),
        )
        if compiler.count:
            self._stage("compile", compiler.count)
        return compiler

    def _measure(self, todo: Sequence[Config], total: int) -> bool:
        """Check and time each config once; False: there was no time for all of them.

        What has been compiled goes first. However late it is, something is measured.
        """
        for config in self._ready(todo, "measure"):
            if self._schedule.over("measure") and self._trials.racers:
                return False
            self._store_uncompilable(total)
            if config not in self._uncompilable:
                self._tell(self._try(config), total)
        return True

    def _ready(self, configs: Sequence[Config], stage: Stage) -> Iterable[Config]:
        """The configs in their order, but those that need no compiler any more first."""
        if self._compiler is None:
            return configs
        return self._compiler.ready_first(
            configs,
            ragged=stage == "race",
            hurry=lambda: self._schedule.over(stage),
            should_stop=self._should_stop,
        )

    def _store_uncompilable(self, total: int) -> None:
        failures = self._compiler.failures() if self._compiler is not None else {}
        for config, error in failures.items():
            if error.status in PERMANENT and config not in self._uncompilable:
                self._uncompilable.add(config)
                self._tell(self._journal.failed(config, error), total)

    def _leave_out(self, budget: int) -> None:
        done = self._progress.measured + self._progress.resumed
        self._progress = replace(self._progress, left_out=max(1, budget - done))

    def _try(self, config: Config) -> Measurement:
        try:
            racer = self._trials.run(config)
        except CandidateError as error:
            return self._journal.failed(config, error)
        twin = self._trials.twin(config)
        message = f"not timed: the same binaries as {twin}" if twin else ""
        return self._journal.timed(racer, self._trials.checked[config], message)

    def _race(self, always: Sequence[Config]) -> None:
        """Run the best third again."""
        racers = self._trials.racers
        third = -(-len(racers) // 3)
        chosen = shortlist(
            racers.values(),
            max(min(third, SECOND_CHANCES), self._effort.finalists),
            [config for config in always if config in racers],
        )
        self._stage("race", len(chosen))
        checked = [r.key for r in by_promise(chosen) if r.key in self._trials.checked]

        def late(rounds: int = 0) -> bool:
            return self._schedule.over("race")

        passed = self._trials.passing(self._ready(checked, "race"), late)
        self._trials.again(passed, self._effort.second_runs, late)

    def _final(self, default: Config, incumbents: Sequence[Config]) -> None:
        """Race the finalists against the incumbents and the default, and store the front."""
        if self._compiler is not None and default in self._trials.checked:
            self._trials.measure_cost(default)
        chosen = self._finalists([default, *incumbents])
        self._stage("final", len(chosen))
        # What an earlier process measured is checked again here before it can win.
        finalists = self._trials.passing(
            [key for key in chosen if key in self._trials.checked or self._retry(key)]
        )
        started = self._clock()

        def enough(rounds: int) -> bool:
            if rounds < LEAST_ROUNDS:
                return False
            spent = self._clock() - started
            if self._schedule.left("final") < spent / rounds:
                return True
            return rounds >= FEWEST and spent >= self._effort.final_s

        results = self._trials.in_turns(finalists, self._effort.rounds, enough)
        racers = [replace(self._trials.racers[config], samples=s) for config, s in results.items()]
        if not racers:
            raise SweepError(self._journal.all_failed())
        stored = {r.key: self._journal.timed(r, self._trials.checked[r.key]) for r in racers}
        default_ms = stored[default].median_ms if default in stored else None
        eager_ms = self._trials.plain_ms(lambda: self._schedule.over("final"))
        winners = tuple(
            sorted(
                (
                    Winner(stored[racer.key], default_ms=default_ms, eager_ms=eager_ms)
                    for racer in front(racers, incumbents, default)
                ),
                key=lambda winner: winner.measurement.median_ms or 0.0,
            )
        )
        self._journal.set_winners(winners)
        self._progress = replace(
            self._progress, winners=winners, default_ms=default_ms, eager_ms=eager_ms
        )
        self._events.on_winners(winners)

    def _retry(self, config: Config) -> bool:
        """Check what was measured earlier; the row of then stays its only one."""
        try:
            self._trials.run(config)
        except CandidateError as error:
            self._trials.racers.pop(config, None)
            self._journal.failed(config, error)
            return False
        return True

    def _finalists(self, always: Sequence[Config]) -> list[Config]:
        """As many as there is time for, fastest first."""
        racers = self._trials.racers
        always = [config for config in always if config in racers]
        known = list(racers.values())
        if self._schedule.over("race") and (passed := self._trials.passed):
            known = [r for r in known if r.key in passed or r.key in always]
        for keep in range(self._effort.finalists, FEWEST_FINALISTS - 1, -1):
            chosen = shortlist(known, keep, always)
            round_s = sum(racer.median for racer in chosen) / 1e3 * self._trials.cost
            if FEWEST * round_s <= self._schedule.left("final"):
                break
        return [racer.key for racer in chosen]

    def _call(self, method: Method, *args: object) -> Any:
        if self._should_stop():
            raise StoppedError
        return self._runner.call(method, *args, timeout_s=self._options.timeout_s)

    def _tell(self, stored: Measurement, total: int) -> None:
        self._progress = replace(self._progress, measured=self._progress.measured + 1)
        done = self._progress.measured + self._progress.resumed
        self._events.on_measurement(stored, done, max(done, total))
