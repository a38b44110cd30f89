"""Samples a space that the budget does not cover: Optuna's TPE, asked for a config, told its time.

A config is a point of a flat space: its strategy with its accumulator, each size by its rank among
the proposed ones, each tile as a label. Fields that a strategy has no use for are drawn as well:
what is learnt about a tile counts for every strategy. Time alone is optimised: the workspace is
known beforehand, and small ones come from the walk.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from flce_tune.kernels.config import Config

if TYPE_CHECKING:
    import optuna

STARTUP = 8  # random configs before there is anything to learn from
VARIATIONS = 30  # of what is asked for, where that is known already or cannot run
FAILED = 1e12  # ms; only ranks count
SIZES = ("chunk", "slab")
TILES = ("logits", "dx", "dw")

TimeOf = Callable[[Config], float | None]  # ms of a measured config, None if it failed


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
    space = _Space(grid, seed)
    study = _study(seed)
    seen = set(known)
    for config in known:
        if config in space.grid:
            study.add_trial(space.trial(space.parameters(config), time_of(config)))
    shuffled = random.Random(seed).sample(grid, len(grid))
    left = dict.fromkeys(config for config in shuffled if config not in seen)
    while left:
        parameters = _asked(study, space, seen) or space.parameters(next(iter(left)))
        config = space.config(parameters)
        del left[config]
        seen.add(config)
        yield config
        study.add_trial(space.trial(parameters, time_of(config)))


class _Space:
    """Between configs and Optuna's parameters."""

    def __init__(self, grid: Sequence[Config], seed: int) -> None:
        from optuna.distributions import CategoricalDistribution, IntDistribution

        self._random = random.Random(seed)
        self.grid = frozenset(grid)
        self._kinds = sorted({(c.strategy, c.accumulator) for c in grid})
        self._fields = {
            kind: [
                name
                for name in (*SIZES, *TILES)
                if any(getattr(c, name) for c in grid if (c.strategy, c.accumulator) == kind)
            ]
            for kind in self._kinds
        }
        self._values: dict[str, list[Any]] = {
            name: sorted({getattr(c, name) for c in grid} - {None}) for name in SIZES
        }
        for name in TILES:
            self._values[name] = list(dict.fromkeys(getattr(c, name) for c in grid))
        self.distributions: dict[str, Any] = {
            "kind": CategoricalDistribution(range(len(self._kinds)))
        }
        self._sizes = {"kind": len(self._kinds)}
        self._sizes |= {name: len(values) for name, values in self._values.items()}
        for name, values in self._values.items():
            if len(values) > 1:
                ranks = range(len(values))
                self.distributions[name] = (
                    IntDistribution(0, ranks[-1])
                    if name in SIZES
                    else CategoricalDistribution(ranks)
                )

    def config(self, parameters: dict[str, int]) -> Config:
        """The config that parameters mean; it may be none of the grid's."""
        kind = self._kinds[parameters["kind"]]
        strategy, accumulator = kind
        chosen = {name: self._values[name][parameters.get(name, 0)] for name in self._fields[kind]}
        return Config(strategy, accumulator=accumulator, **chosen)

    def parameters(self, config: Config) -> dict[str, int]:
        """Parameters that mean a config of the grid; what it has no use for is left to chance."""
        kind = config.strategy, config.accumulator
        parameters = {"kind": self._kinds.index(kind)}
        for name in [name for name in self.distributions if name != "kind"]:
            values = self._values[name]
            used = name in self._fields[kind]
            parameters[name] = (
                values.index(getattr(config, name)) if used else self._random.randrange(len(values))
            )
        return parameters

    def around(self, parameters: dict[str, int]) -> Iterator[dict[str, int]]:
        """The parameters, then with more and more of them drawn anew."""
        yield parameters
        names = list(self.distributions)
        for number in range(VARIATIONS):
            drawn = self._random.sample(names, 1 + number * len(names) // VARIATIONS)
            yield parameters | {name: self._random.randrange(self._sizes[name]) for name in drawn}

    def trial(self, parameters: dict[str, int], ms: float | None) -> optuna.trial.FrozenTrial:
        """What came of a config; None: it failed."""
        from optuna.trial import create_trial

        return create_trial(
            value=FAILED if ms is None else ms,
            params=parameters,
            distributions=self.distributions,
        )


def _asked(study: optuna.Study, space: _Space, seen: Collection[Config]) -> dict[str, int] | None:
    """Parameters of a new config, what the sampler asks for or near it; None if there is none."""
    from optuna.trial import TrialState

    trial = study.ask(space.distributions)
    study.tell(trial, state=TrialState.FAIL)  # a config is added once its time is known
    for parameters in space.around(trial.params):
        config = space.config(parameters)
        if config in space.grid and config not in seen:
            return parameters
    return None


def _study(seed: int) -> optuna.Study:
    import optuna

    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)  # it announces each study
    try:
        sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=STARTUP)
        return optuna.create_study(sampler=sampler)
    finally:
        optuna.logging.set_verbosity(verbosity)
