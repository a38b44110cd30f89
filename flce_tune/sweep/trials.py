"""What a bench has said of the configs of one problem so far: checks, samples, failures."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from flce_tune.kernels.config import Config
from flce_tune.sweep.failures import CandidateError
from flce_tune.sweep.measure import Trial
from flce_tune.sweep.race import Racer, interleave
from flce_tune.sweep.worker import Method
from flce_tune.tuning_db.records import Status

PLAIN_RUNS = 3
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

    def __init__(self, call: Call, on_failure: Callable[[Config, CandidateError], None]) -> None:
        """``on_failure`` hears of configs that ran once and failed later; they leave ``racers``."""
        self.racers: dict[Config, Racer[Config]] = {}
        self.checked: dict[Config, Trial] = {}  # by this process; the others come from the store
        self._passed: set[Config] = set()  # also checked on the ragged neighbour
        self._twins: dict[Config, Config] = {}  # who has the same binaries and races for both
        self._scale, self._scaled_at = 1.0, -math.inf
        self._call = call
        self._on_failure = on_failure

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

    def passing(self, configs: Sequence[Config]) -> list[Config]:
        """Those that are right on the ragged neighbour, too.

        Where the neighbour's tensors do not fit beside the problem's, nothing is held against the
        config.
        """
        for config in configs:
            if config in self._passed:
                continue
            try:
                self._call("check_ragged", config)
            except CandidateError as error:
                if error.status is not Status.OUT_OF_MEMORY:
                    self._drop(config, error)
                    continue
            self._passed.add(config)
        return [config for config in configs if config in self._passed]

    def again(self, configs: Sequence[Config], runs: int) -> None:
        """Time configs in turns and add to their samples."""
        fresh = self.in_turns(configs, runs)
        reference = next(iter(self.racers), None)
        scale = 1.0
        if reference in fresh:
            scale = self.racers[reference].samples[0] / statistics.median(fresh[reference])
        for config, samples in fresh.items():
            racer = self.racers[config]
            scaled = tuple(sample * scale for sample in samples)
            self.racers[config] = replace(racer, samples=racer.samples + scaled)

    def in_turns(self, configs: Sequence[Config], rounds: int) -> dict[Config, tuple[float, ...]]:
        """Time configs in turns; the samples of those that did not fail, as they are."""
        return interleave(configs, rounds, self._sample)

    def plain_ms(self) -> float | None:
        """Time plain PyTorch; None where it does not fit."""
        try:
            self._call("time_plain")  # a warm-up
            samples: list[float] = [self._call("time_plain") for _ in range(PLAIN_RUNS)]
        except CandidateError:
            return None
        return statistics.median(samples)

    def _scaled(self, config: Config, samples: tuple[float, ...]) -> tuple[float, ...]:
        reference = next(iter(self.racers.values()), None)
        if reference is None or reference.key == config:
            return samples
        if time.monotonic() - self._scaled_at > SCALE_S:
            now = self._sample(reference.key)
            self._scale = 1.0 if now is None else reference.samples[0] / now
            self._scaled_at = time.monotonic()
        return tuple(sample * self._scale for sample in samples)

    def _sample(self, config: Config) -> float | None:
        try:
            sample: float = self._call("time", config)
        except CandidateError as error:
            self._drop(config, error)
            return None
        return sample

    def _drop(self, config: Config, error: CandidateError) -> None:
        self.racers.pop(config, None)
        self._on_failure(config, error)
