"""Samples a space that the budget does not cover: Optuna's TPE, asked for a config, told its time.

A config is a path: its strategy with its accumulator, then only the fields that vary there. A size
is its rank among the proposed ones, under a name of the strategy's own: a chunk means something
else to each. A tile is a label, under one name for all: what is learnt about it counts for every
strategy. Each field is modelled on its own. (Where fields that a strategy has no use for are drawn
as well, to make the space flat, what chance puts there is learnt, too.) Time alone is optimised:
the workspace is known beforehand, and small ones come from the walk.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from flce_tune.kernels.config import Config

if TYPE_CHECKING:
    import optuna

STARTUP = 8  # random configs before there is anything to learn from
FAILED = 1e12  # ms; only ranks count
SIZES = ("chunk", "slab")
FIELDS = (*SIZES, "logits", "dx", "dw")

TimeOf = Callable[[Config], float | None]  # ms of a measured config, None if it failed
Kind = tuple[str, str]  # strategy and accumulator


def available() -> bool:
    """Whether Optuna is installed."""
    try:
        import optuna  # noqa: F401
    except ImportError:
        return False
    return True


def sampled(
    grid: Sequence[Config], known: Collection[Config], time_of: TimeOf, seed: int
) -> Iterator[Config]:
    """Propose configs of ``grid``, none twice and none of ``known``, until there is none left.

    ``time_of`` is asked about each proposal before the next one, and about ``known`` at the start.
    The same answers and the same seed give the same proposals.
    """
    space, study = _Space(grid), _study(seed)
    shuffled = random.Random(seed).sample(grid, len(grid))
    left: dict[Kind, dict[Config, None]] = {kind: {} for kind in space.kinds}
    for config in shuffled:
        left[kind_of(config)][config] = None
    for config in known:
        if config in left.get(kind_of(config), ()):
            del left[kind_of(config)][config]
            study.add_trial(space.trial(config, time_of(config)))
    while any(left.values()):
        kind, wanted = _asked(study, space)
        # What is asked for is known already, or cannot run: the most similar one that is left.
        there = left[kind] or next(configs for configs in left.values() if configs)
        config = min(there, key=lambda config: space.distance(config, kind, wanted))
        del there[config]
        yield config
        study.add_trial(space.trial(config, time_of(config)))


class _Space:
    """Between configs and Optuna's parameters."""

    def __init__(self, grid: Sequence[Config]) -> None:
        self.kinds = sorted(set(map(kind_of, grid)))
        self._values: dict[str, list[Any]] = {}  # by parameter
        self.parameters: dict[Kind, dict[str, str]] = {}  # by field, of those that vary
        for kind in self.kinds:
            configs = [config for config in grid if kind_of(config) == kind]
            varying = [f for f in FIELDS if len({getattr(c, f) for c in configs}) > 1]
            self.parameters[kind] = {f: _parameter(kind, f) for f in varying}
        for config in grid:
            for field, name in self.parameters[kind_of(config)].items():
                values = self._values.setdefault(name, [])
                if getattr(config, field) not in values:
                    values.append(getattr(config, field))
        for values in self._values.values():
            if all(value is None or isinstance(value, int) for value in values):
                values.sort(key=lambda size: math.inf if size is None else size)
        self._ranks = {
            name: {value: rank for rank, value in enumerate(values)}
            for name, values in self._values.items()
        }

    def distributions(self, kind: Kind) -> dict[str, Any]:
        """What a config of this kind is drawn from, but the kind itself."""
        from optuna.distributions import CategoricalDistribution, IntDistribution

        return {
            name: IntDistribution(0, len(self._values[name]) - 1)
            if field in SIZES
            else CategoricalDistribution(range(len(self._values[name])))
            for field, name in self.parameters[kind].items()
        }

    def all_kinds(self) -> Any:
        """What a kind is drawn from."""
        from optuna.distributions import CategoricalDistribution

        return CategoricalDistribution(range(len(self.kinds)))

    def count(self, parameter: str) -> int:
        """How many values a parameter has."""
        return len(self._values[parameter])

    def ranks(self, config: Config) -> dict[str, int]:
        """The parameters of a config, but its kind."""
        return {
            name: self._ranks[name][getattr(config, field)]
            for field, name in self.parameters[kind_of(config)].items()
        }

    def distance(self, config: Config, kind: Kind, wanted: Mapping[str, int]) -> float:
        """How unlike a config is to what was asked for; 0 for one of another kind, too."""
        if kind_of(config) != kind:
            return 0.0
        total = 0.0
        for field, name in self.parameters[kind].items():
            apart = abs(self._ranks[name][getattr(config, field)] - wanted[name])
            total += apart / len(self._values[name]) if field in SIZES else apart > 0
        return total

    def trial(self, config: Config, ms: float | None) -> optuna.trial.FrozenTrial:
        """What came of a config; None: it failed."""
        from optuna.trial import create_trial

        kind = kind_of(config)
        return create_trial(
            value=FAILED if ms is None else ms,
            params={"kind": self.kinds.index(kind), **self.ranks(config)},
            distributions={"kind": self.all_kinds(), **self.distributions(kind)},
        )


def kind_of(config: Config) -> Kind:
    """What is walked, and modelled, by itself."""
    return config.strategy, config.accumulator


def _parameter(kind: Kind, field: str) -> str:
    return f"{field} of {kind[0]}" if field in SIZES else field


def _asked(study: optuna.Study, space: _Space) -> tuple[Kind, dict[str, int]]:
    """The kind and the ranks that the sampler asks for."""
    from optuna.trial import TrialState

    trial = study.ask()
    kind = space.kinds[trial.suggest_categorical("kind", range(len(space.kinds)))]
    ranks = {}
    for field, name in space.parameters[kind].items():
        choices = range(space.count(name))
        ranks[name] = (
            trial.suggest_int(name, 0, choices[-1])
            if field in SIZES
            else trial.suggest_categorical(name, choices)
        )
    study.tell(trial, state=TrialState.FAIL)  # a config is added once its time is known
    return kind, ranks


def _study(seed: int) -> optuna.Study:
    import optuna

    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)  # it announces each study
    try:
        sampler = optuna.samplers.TPESampler(
            seed=seed, n_startup_trials=STARTUP, multivariate=False
        )
        return optuna.create_study(sampler=sampler)
    finally:
        optuna.logging.set_verbosity(verbosity)
