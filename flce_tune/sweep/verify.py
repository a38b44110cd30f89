"""Verification: measures known winners again, and keeps those that still win.

A short sweep of nothing but the default config and the winners: the same check, the same
interleaved final, the same rules of who wins. The winners are the incumbents, so that a tie, which
is all that noise brings, demotes nobody.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from flce_tune.dispatch.convert import config_of, problem_of
from flce_tune.errors import InvalidConfigError, SweepError
from flce_tune.kernels import strategies
from flce_tune.kernels.config import Config
from flce_tune.sweep.events import ProblemReport, SweepEvents, SweepOptions
from flce_tune.sweep.measure import BenchFactory, OpBench
from flce_tune.sweep.places import LocalPlace
from flce_tune.sweep.tuning import ProblemSweep
from flce_tune.sweep.worker import StoppedError
from flce_tune.tuning_db.records import Measurement, ProblemRecord, Status, Winner
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
    the stored front of that problem stays. A list shorter than ``fronts`` was interrupted.

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
    place = LocalPlace(device, isolate=options.isolate)
    done = []
    for front in fronts:
        record, tokens = front[0].measurement.problem, front[0].measurement.tokens
        try:
            problem = problem_of(record, tokens)
        except ValueError as error:
            done.append(Verification(record, None, (), f"this version cannot measure it: {error}"))
            continue
        again = _Again(
            problem, store, place, options, events or SweepEvents(), should_stop, make_bench
        )
        try:
            report = again.run_again(front)
        except StoppedError:
            break
        verdicts = () if report.error else tuple(again.verdict(winner) for winner in front)
        done.append(Verification(record, report, verdicts, report.error))
    return done


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
        self._outcomes: dict[Config, Measurement] = {}
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
        outcome = self._outcomes[config]
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

    def _record(self, config: Config, status: Status, **outcome: Any) -> Measurement:
        measurement = super()._record(config, status, **outcome)
        self._outcomes[config] = measurement
        return measurement


def _config(winner: Winner) -> Config | None:
    try:
        return config_of(winner.measurement)
    except InvalidConfigError:
        return None
