"""What a bench has said of the configs of one problem so far: checks, samples, failures."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from flce_tune.kernels.config import Config
from flce_tune.sweep.failures import CandidateError
from flce_tune.sweep.measure import Trial
from flce_tune.sweep.race import Enough, Racer, interleave, never
from flce_tune.sweep.worker import Method
from flce_tune.tuning_db.records import Status

PLAIN_RUNS = 3
FIRST_COST = 1.25  # of a run until one was timed; see Trials.cost
SCALE_S = 0.8  # for which a comparison of clocks holds; a compilation takes longer


class Call(Protocol):
    """Calls a method of the bench; raises CandidateError where the config fails."""

    def __call__(self, method: Method, *args: object) -> Any:
        """Call it."""


class Trials:
    """The configs that ran, with their samples on one scale.

    Clocks fall as a GPU warms up: a config tried after a pause seems faster than it is. The first
    config that ran, the reference, runs again now and then and tells by how much; all samples
    count as they would have when it was first timed.
    """

    def __init__(
        self,
        call: Call,
        on_failure: Callable[[Config, CandidateError], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``on_failure`` hears of configs that ran once and failed later; they leave ``racers``."""
        self.racers: dict[Config, Racer[Config]] = {}
        self.checked: dict[Config, Trial] = {}  # by this process; the others come from the store
        self.passed: set[Config] = set()  # also checked on the ragged neighbour
        self._twins: dict[Config, Config] = {}  # who has the same binaries and races for both
        self._scale, self._scaled_at = 1.0, -math.inf
        self._timed_ms = self._spent_s = 0.0
        self._call = call
        self._on_failure = on_failure
        self._clock = clock

    @property
    def cost(self) -> float:
        """How many times a sample it takes to get it: cold caches and calls take time, too."""
        return max(1.0, self._spent_s * 1e3 / self._timed_ms) if self._timed_ms else FIRST_COST

    def measure_cost(self, config: Config) -> None:
        """Forget the cost of earlier samples, which compilers beside them may have raised."""
        for _ in range(2):  # the first also finds its memory and kernels again
            self._timed_ms = self._spent_s = 0.0
            self._sample(config)

    def median(self, config: Config) -> float | None:
        """The median of a config's samples, or of its twin's; None if it did not run."""
        racer = self.racers.get(self._twins.get(config, config))
        return None if racer is None else racer.median

    def take_over(self, config: Config, samples: Sequence[float], workspace: int) -> None:
        """Believe what was measured earlier, until the config is to win."""
        self.racers[config] = Racer(config, tuple(samples), workspace)

    def run(self, config: Config) -> Racer[Config]:
        """Check and time a config; returns its sample as it is.

        A config with the binaries of another one gets that one's sample and does not race.

        Raises:
            CandidateError: it failed.
        """
        trial: Trial = self._call("trial", config)
        self.checked[config] = trial
        racer = Racer(config, (trial.sample_ms,), trial.workspace_bytes)
        if trial.same_as in self.racers and config not in self.racers:
            self._twins[config] = trial.same_as
        else:
            self.racers[config] = replace(racer, samples=self._scaled(config, racer.samples))
        return racer

    def twin(self, config: Config) -> Config | None:
        """Who has the same binaries and races for this one."""
        return self._twins.get(config)

    def passing(
        self, configs: Iterable[Config], enough: Callable[[], bool] = lambda: False
    ) -> list[Config]:
        """Those that are right on the ragged neighbour, too.

        Where the neighbour's tensors do not fit beside the problem's, nothing is held against the
        config. Once there are ``enough``, nobody else is checked, and nobody unchecked passes.
        """
        asked = []
        for config in configs:
            asked.append(config)
            if config in self.passed or enough():
                continue
            try:
                self._call("check_ragged", config)
            except CandidateError as error:
                if error.status is not Status.OUT_OF_MEMORY:
                    self._drop(config, error)
                    continue
            self.passed.add(config)
        return [config for config in asked if config in self.passed]

    def again(self, configs: Sequence[Config], runs: int, enough: Enough = never) -> None:
        """Time configs in turns and add to their samples."""
        fresh = {
            c: samples for c, samples in self.in_turns(configs, runs, enough).items() if samples
        }
        reference = next(iter(self.racers), None)
        scale = 1.0
        if reference in fresh:
            scale = self.racers[reference].samples[0] / statistics.median(fresh[reference])
        for config, samples in fresh.items():
            racer = self.racers[config]
            scaled = tuple(sample * scale for sample in samples)
            self.racers[config] = replace(racer, samples=racer.samples + scaled)

    def in_turns(
        self, configs: Sequence[Config], rounds: int, enough: Enough = never
    ) -> dict[Config, tuple[float, ...]]:
        """Time configs in turns; the samples of those that did not fail, as they are."""
        return interleave(configs, rounds, self._sample, enough)

    def plain_ms(self, enough: Callable[[], bool] = lambda: False) -> float | None:
        """Time plain PyTorch, once if that is ``enough``; None where it does not fit."""
        try:
            self._call("time_plain")  # a warm-up
            samples: list[float] = [self._call("time_plain")]
            while len(samples) < PLAIN_RUNS and not enough():
                samples.append(self._call("time_plain"))
        except CandidateError:
            return None
        return statistics.median(samples)

    def _scaled(self, config: Config, samples: tuple[float, ...]) -> tuple[float, ...]:
        reference = next(iter(self.racers.values()), None)
        if reference is None or reference.key == config:
            return samples
        if self._clock() - self._scaled_at > SCALE_S:
            now = self._sample(reference.key)
            self._scale = 1.0 if now is None else reference.samples[0] / now
            self._scaled_at = self._clock()
        return tuple(sample * self._scale for sample in samples)

    def _sample(self, config: Config) -> float | None:
        started = self._clock()
        try:
            sample: float = self._call("time", config)
        except CandidateError as error:
            self._drop(config, error)
            return None
        self._timed_ms += sample
        self._spent_s += self._clock() - started
        return sample

    def _drop(self, config: Config, error: CandidateError) -> None:
        self.racers.pop(config, None)
        self._on_failure(config, error)
