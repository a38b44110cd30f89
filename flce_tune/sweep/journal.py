"""What is stored about one problem on one device with one toolchain: read, and added to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from flce_tune.dispatch.convert import config_of, device_record, problem_record
from flce_tune.errors import InvalidConfigError
from flce_tune.kernels.config import Config
from flce_tune.kernels.problem import Problem
from flce_tune.sweep.failures import CandidateError
from flce_tune.sweep.measure import Trial
from flce_tune.sweep.places import Place
from flce_tune.sweep.race import Racer, half_iqr
from flce_tune.tuning_db.records import Measurement, Status, Winner
from flce_tune.tuning_db.store import Store


class Journal:
    """The rows of one problem."""

    def __init__(self, store: Store, place: Place, problem: Problem) -> None:
        self.failures: Counter[Status] = Counter()  # of the outcomes made here
        self.outcomes: dict[Config, Measurement] = {}  # the last one of each config, made here
        self._store = store
        self._device = device_record(place.device)
        self._problem = problem_record(problem)
        self._tokens = problem.tokens
        self._toolchain = place.toolchain

    def known(self) -> dict[str, Measurement]:
        """What this toolchain measured here before, by canonical config."""
        return self._store.measured_configs(
            self._device, self._problem, self._tokens, self._toolchain
        )

    def winning(self) -> list[Config]:
        """The stored winners that this version can read, fastest first."""
        configs = []
        for winner in self._store.winners(device=self._device, problem=self._problem):
            try:
                configs.append(config_of(winner.measurement))
            except InvalidConfigError:
                continue
        return configs

    def timed(self, racer: Racer[Config], trial: Trial, message: str = "") -> Measurement:
        """Add a config that ran, with all its samples."""
        return self._add(
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
            message="; ".join(filter(None, (message, _throttled(trial)))),
        )

    def failed(self, config: Config, error: CandidateError) -> Measurement:
        """Add a config that failed."""
        self.failures[error.status] += 1
        return self._add(config, error.status, errors=error.errors, message=error.message)

    def set_winners(self, winners: Sequence[Winner]) -> None:
        """Replace the winners."""
        self._store.set_winners(self._device, self._problem, winners)

    def all_failed(self) -> str:
        """Say that nothing ran, and how it failed."""
        counts = ", ".join(f"{count} {s.value}" for s, count in self.failures.most_common())
        return (
            f"none of the configs ran ({counts or 'there were none'}); "
            "'flce-tune show --failed' lists their messages"
        )

    def _add(self, config: Config, status: Status, **outcome: Any) -> Measurement:
        measurement = Measurement(
            device=self._device,
            toolchain=self._toolchain,
            problem=self._problem,
            tokens=self._tokens,
            config=config.to_dict(),
            status=status,
            **outcome,
        )
        self.outcomes[config] = self._store.add_measurement(measurement)
        return self.outcomes[config]


def _throttled(trial: Trial) -> str:
    return f"clocks lowered by {', '.join(trial.throttled)}" if trial.throttled else ""
