"""What a fallback rule of the dispatcher costs, from what is stored.

Each problem that was swept is taken for one that was not: a rule chooses among the winners of the
others, and what it chose is looked up among this problem's own measurements. Only configs that its
sweep happened to measure have an answer; many of those ran once, so a cost of a few percent is
noise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from flce_tune.dispatch.choice import Rule
from flce_tune.dispatch.convert import device_of, problem_of
from flce_tune.dispatch.rules import Query, resolve
from flce_tune.dispatch.snapshot import Snapshot
from flce_tune.kernels.config import Config
from flce_tune.sweep.results import gather
from flce_tune.tuning_db.records import (
    DeviceRecord,
    Measurement,
    ProblemRecord,
    Winner,
    canonical_config,
)


@dataclass(frozen=True, slots=True)
class Regret:
    """What one rule would have chosen for one problem."""

    device: DeviceRecord
    problem: ProblemRecord
    rule: Rule
    config: Config
    ms: float | None  # on this problem; None: its sweep did not measure that config
    best_ms: float  # of the problem's fastest winner

    @property
    def cost(self) -> float | None:
        """How much longer it takes than the best: 0.05 for 5 %."""
        return None if self.ms is None else self.ms / self.best_ms - 1


Eligible = Callable[[Measurement, Measurement], bool]  # may a winner serve, seen from the problem's

RULES: Mapping[Rule, Eligible] = {
    "nearest tokens": lambda a, b: a.device == b.device and _shape(a) == _shape(b),
    "nearest shape": lambda a, b: a.device == b.device and _shape(a) != _shape(b),
    "same architecture": lambda a, b: a.device != b.device,
    "default": lambda a, b: False,
}


def regrets(measurements: Iterable[Measurement], winners: Sequence[Winner]) -> list[Regret]:
    """Ask every rule about every problem that has winners; a rule without a choice is left out."""
    found = []
    for results in gather(measurements, winners):
        if not results.winners:
            continue
        own = results.winners[0].measurement
        times = {canonical_config(m.config): m.median_ms for m in results.timed}
        times |= {
            canonical_config(w.measurement.config): w.measurement.median_ms for w in results.winners
        }
        for rule, eligible in RULES.items():
            others = [
                w
                for w in winners
                if (w.measurement.device, w.measurement.problem) != (own.device, own.problem)
                and eligible(w.measurement, own)
            ]
            config = _choice(rule, others, own)
            if config is not None and own.median_ms is not None:
                ms = times.get(canonical_config(config.to_dict()))
                found.append(Regret(own.device, own.problem, rule, config, ms, own.median_ms))
    return found


def _choice(rule: Rule, winners: Sequence[Winner], own: Measurement) -> Config | None:
    try:
        problem, device = problem_of(own.problem, own.tokens), device_of(own.device)
    except ValueError:
        return None
    query = Query(problem, device, None, {}, lambda _: "")
    answer = resolve(Snapshot.from_winners(winners, ""), Snapshot.empty(), query).choice
    return answer.config if answer.rule == rule else None


def _shape(measurement: Measurement) -> tuple[int, int]:
    return measurement.problem.hidden, measurement.problem.vocab
