"""The sweep of one problem: measure its configs, race the best, store the winners."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from flce_tune.dispatch.convert import config_of, device_record, problem_record
from flce_tune.dispatch.rules import Query, usable_front
from flce_tune.dispatch.snapshot import Snapshot
from flce_tune.errors import InvalidConfigError, SweepError
from flce_tune.kernels import strategies
from flce_tune.kernels.config import Config
from flce_tune.kernels.problem import Problem
from flce_tune.sweep.candidates import Search, covering
from flce_tune.sweep.events import ProblemReport, Stage, SweepEvents, SweepOptions
from flce_tune.sweep.failures import CandidateError
from flce_tune.sweep.interval import FEWEST
from flce_tune.sweep.measure import BenchFactory
from flce_tune.sweep.places import Place
from flce_tune.sweep.precompile import precompile
from flce_tune.sweep.race import Racer, front, half_iqr, shortlist
from flce_tune.sweep.trials import Trials
from flce_tune.sweep.worker import Method, StoppedError
from flce_tune.tuning_db.records import Measurement, Status, Winner, canonical_config
from flce_tune.tuning_db.store import Store

PERMANENT = (Status.COMPILE_ERROR, Status.OUT_OF_RESOURCES)  # wherever and whenever it is tried


@dataclass(frozen=True, slots=True)
class Effort:
    """How long the last two stages may be."""

    second_runs: int  # more runs of the best third
    finalists: int
    rounds: int  # of the final, at most
    final_s: float  # about how long the final may take


FULL = Effort(second_runs=2, finalists=16, rounds=15, final_s=20.0)
QUICK = Effort(second_runs=1, finalists=8, rounds=9, final_s=6.0)
SECOND_CHANCES = 40  # configs that run again, at most


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
    ) -> None:
        self._problem = problem
        self._store = store
        self._place = place
        self._device = place.device
        self._options = options
        self._effort = QUICK if options.quick else FULL
        self._events = events
        self._should_stop = should_stop or (lambda: False)
        self._make_bench = make_bench
        self._runner = place.runner(make_bench, problem, options.seed, self._should_stop)
        self._device_record = device_record(self._device)
        self._problem_record = problem_record(problem)
        self._toolchain = place.toolchain
        self._trials = Trials(self._call, self._store_failure)
        self._stages: list[tuple[Stage, float]] = []  # and when they started
        self._progress = ProblemReport(problem, place.device)
        self._failures: Counter[Status] = Counter()
        self._started = time.monotonic()

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
            self._compile(search)
            self._stage("measure", search.budget)
            for batch in search.batches(self._trials.median):
                self._measure(self._resume(batch), search.budget)
            self._race([default, *incumbents])
            self._final(default, incumbents)
        except SweepError as error:
            self._progress = replace(self._progress, error=str(error))
        finally:
            self._runner.close()
        return self.report()

    def report(self) -> ProblemReport:
        """Tell what has been done so far."""
        now = time.monotonic()
        ends = [*(start for _, start in self._stages[1:]), now]
        return replace(
            self._progress,
            failures=dict(self._failures),
            seconds=now - self._started,
            stages={s: end - start for (s, start), end in zip(self._stages, ends, strict=True)},
        )

    def _stage(self, stage: Stage, total: int) -> None:
        self._stages.append((stage, time.monotonic()))
        self._events.on_stage(stage, total)

    def _incumbents(self) -> list[Config]:
        """The stored winners that can run here, fastest first."""
        configs = []
        for winner in self._store.winners(device=self._device_record, problem=self._problem_record):
            try:
                config = config_of(winner.measurement)
            except InvalidConfigError:
                continue
            if strategies.reject(config, self._problem, self._device) is None:
                configs.append(config)
        return configs

    def _near(self) -> list[Config]:
        """The front that the dispatcher would start from, stored or shipped; it may be empty."""
        query = Query(self._problem, self._device, None, {}, lambda _: "")
        measured = Snapshot.from_winners(self._store.winners(), "")
        return usable_front(measured, Snapshot.from_pretuned(), query)

    def _resume(self, configs: Sequence[Config]) -> list[Config]:
        """Take over what was measured before; return the rest."""
        known = self._known()
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

    def _known(self) -> dict[str, Measurement]:
        """What this toolchain measured here before, by canonical config."""
        return self._store.measured_configs(
            self._device_record, self._problem_record, self._problem.tokens, self._toolchain
        )

    def _compile(self, search: Search) -> None:
        """Compile all tiles ahead on a GPU, and store which configs cannot be compiled."""
        if self._device.kind != "cuda" or not self._options.isolate:
            return
        known = self._known()
        cover = covering(search.space, search.valid)
        tiled = [config for config in cover if config.logits or config.dx or config.dw]
        todo = [c for c in tiled if canonical_config(c.to_dict()) not in known]
        if not todo:
            return
        self._stage("compile", len(todo))
        failures = precompile(
            todo,
            self._problem,
            self._place,
            self._make_bench,
            timeout_s=self._options.timeout_s,
            should_stop=self._should_stop,
        )
        for config, error in failures.items():
            if error.status in PERMANENT:
                self._store_measured(self._failed(config, error), search.budget)

    def _measure(self, todo: Sequence[Config], total: int) -> None:
        """Check and time each config once."""
        for config in todo:
            self._store_measured(self._try(config), total)

    def _try(self, config: Config) -> Measurement:
        try:
            racer = self._trials.run(config)
        except CandidateError as error:
            return self._failed(config, error)
        twin = self._trials.twin(config)
        return self._timed(racer, f"not timed: the same binaries as {twin}" if twin else "")

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
        checked = [racer.key for racer in chosen if racer.key in self._trials.checked]
        self._trials.again(self._trials.passing(checked), self._effort.second_runs)

    def _final(self, default: Config, incumbents: Sequence[Config]) -> None:
        """Race the finalists against the incumbents and the default, and store the front."""
        known = self._trials.racers
        chosen = shortlist(
            known.values(),
            self._effort.finalists,
            [config for config in (default, *incumbents) if config in known],
        )
        self._stage("final", len(chosen))
        # What an earlier process measured is checked again here before it can win.
        finalists = self._trials.passing(
            [r.key for r in chosen if r.key in self._trials.checked or self._retry(r.key)]
        )
        results = self._trials.in_turns(finalists, self._rounds(finalists))
        racers = [replace(known[config], samples=s) for config, s in results.items()]
        if not racers:
            raise SweepError(self._all_failed())
        stored = {r.key: self._store.add_measurement(self._timed(r)) for r in racers}
        default_ms = stored[default].median_ms if default in stored else None
        eager_ms = self._trials.plain_ms()
        winners = tuple(
            sorted(
                (
                    Winner(stored[racer.key], default_ms=default_ms, eager_ms=eager_ms)
                    for racer in front(racers, incumbents, default)
                ),
                key=lambda winner: winner.measurement.median_ms or 0.0,
            )
        )
        self._store.set_winners(self._device_record, self._problem_record, winners)
        self._progress = replace(
            self._progress, winners=winners, default_ms=default_ms, eager_ms=eager_ms
        )
        self._events.on_winners(winners)

    def _retry(self, config: Config) -> bool:
        measurement = self._try(config)
        if measurement.status is not Status.OK:
            self._trials.racers.pop(config, None)
            self._store.add_measurement(measurement)
            return False
        return True

    def _rounds(self, finalists: Sequence[Config]) -> int:
        round_s = sum(self._trials.racers[config].median for config in finalists) / 1e3
        affordable = int(self._effort.final_s / round_s) if round_s else self._effort.rounds
        return max(FEWEST, min(self._effort.rounds, affordable))

    def _store_failure(self, config: Config, error: CandidateError) -> None:
        self._store.add_measurement(self._failed(config, error))

    def _call(self, method: Method, *args: object) -> Any:
        if self._should_stop():
            raise StoppedError
        return self._runner.call(method, *args, timeout_s=self._options.timeout_s)

    def _timed(self, racer: Racer[Config], message: str = "") -> Measurement:
        trial = self._trials.checked[racer.key]
        return self._record(
            racer.key,
            Status.OK,
            samples_ms=racer.samples,
            median_ms=racer.median,
            spread_ms=half_iqr(racer.samples),
            workspace_bytes=racer.workspace,
            errors=trial.errors,
            clocks_mhz=trial.clocks_mhz,
            registers=trial.registers,
            spills=trial.spills,
            shared_memory=trial.shared_memory,
            message=message,
        )

    def _failed(self, config: Config, error: CandidateError) -> Measurement:
        self._failures[error.status] += 1
        return self._record(config, error.status, errors=error.errors, message=error.message)

    def _record(self, config: Config, status: Status, **outcome: Any) -> Measurement:
        return Measurement(
            device=self._device_record,
            toolchain=self._toolchain,
            problem=self._problem_record,
            tokens=self._problem.tokens,
            config=config.to_dict(),
            status=status,
            **outcome,
        )

    def _store_measured(self, measurement: Measurement, total: int) -> None:
        stored = self._store.add_measurement(measurement)
        self._progress = replace(self._progress, measured=self._progress.measured + 1)
        done = self._progress.measured + self._progress.resumed
        self._events.on_measurement(stored, done, max(done, total))

    def _all_failed(self) -> str:
        counts = ", ".join(f"{count} {s.value}" for s, count in self._failures.most_common())
        return (
            f"none of the configs ran ({counts or 'there were none'}); "
            "'flce-tune show --failed' lists their messages"
        )
