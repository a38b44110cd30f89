"""Which configs a sweep measures: the whole space, or a guided walk through a large one.

A space is nearly separable: which tile suits one GEMM hardly depends on the tiles of the others.
So a large space is walked one field at a time, from the analytic default: measure all values of a
field with the others held fixed, keep the best, go on to the next field, until a whole round of
fields brings nothing. Strategies and accumulators are walked separately, in turns.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields

from flce_tune.kernels import strategies
from flce_tune.kernels.config import Config
from flce_tune.kernels.problem import Device, Problem
from flce_tune.sweep.events import SweepOptions

EXHAUSTIVE = 64  # configs: a space this small is measured whole
WALK_BUDGET = 160  # configs, of a larger one
QUICK_BUDGET = 40
GAIN = 0.995  # a step of the walk must be this much faster

TimeOf = Callable[[Config], float | None]  # ms of a measured config, None if it failed
_FIELDS = tuple(f.name for f in fields(Config) if f.name not in ("strategy", "accumulator"))


class Search:
    """Proposes the configs of one problem, batch after batch."""

    def __init__(
        self,
        problem: Problem,
        device: Device,
        options: SweepOptions,
        always: Sequence[Config],
    ) -> None:
        """Enumerate the space; ``always`` is measured whatever the budget.

        Raises:
            UnknownStrategyError: ``options`` name a strategy that nobody registered.
        """
        names = options.strategies or strategies.names()
        self.space = [c for n in names for c in strategies.space(problem, device, strategy=n)]
        self._always = list(dict.fromkeys(always))
        self._starts = {n: strategies.get(n).default(problem, device) for n in names}
        self._seed = options.seed
        budget = options.budget or (QUICK_BUDGET if options.quick else None)
        size = len({*self.space, *self._always})
        if budget is None:
            budget = size if size <= EXHAUSTIVE else WALK_BUDGET
        self.budget = max(len(self._always), min(budget, size))
        self._fill = options.budget is not None or size <= self.budget

    def batches(self, time_of: TimeOf) -> Iterator[list[Config]]:
        """Yield configs to measure, never one twice; ``time_of`` is asked about earlier batches."""
        seen = dict.fromkeys(self._always)
        yield list(seen)
        sources = [self._fill_up()] if self.budget >= len(self.space) else self._sources(time_of)
        for batch in itertools.chain.from_iterable(sources):
            fresh = [config for config in dict.fromkeys(batch) if config not in seen]
            fresh = fresh[: self.budget - len(seen)]
            seen |= dict.fromkeys(fresh)
            if fresh:
                yield fresh
            if len(seen) >= self.budget:
                return

    def _sources(self, time_of: TimeOf) -> list[Iterator[list[Config]]]:
        walks = [
            walk(group, self._starts[group[0].strategy], time_of) for group in groups(self.space)
        ]
        return [_in_turns(walks), *([self._fill_up()] if self._fill else [])]

    def _fill_up(self) -> Iterator[list[Config]]:
        """The whole space, shuffled."""
        yield random.Random(self._seed).sample(self.space, len(self.space))


def groups(space: Sequence[Config]) -> list[list[Config]]:
    """Split a space by strategy and accumulator."""
    split: dict[tuple[str, str], list[Config]] = {}
    for config in space:
        split.setdefault((config.strategy, config.accumulator), []).append(config)
    return list(split.values())


def walk(space: Sequence[Config], start: Config, time_of: TimeOf) -> Iterator[list[Config]]:
    """Descend one field at a time from the config of the space that resembles ``start`` most."""

    def ms(config: Config) -> float:
        time = time_of(config)
        return math.inf if time is None else time

    current = min(space, key=lambda config: distance(config, start))
    yield [current]
    varying = [name for name in _FIELDS if len({getattr(c, name) for c in space}) > 1]
    idle = 0
    for name in itertools.cycle(varying):
        line = [c for c in space if differing(c, current) <= {name}]
        yield line
        best = min(line, key=ms)
        if ms(best) < GAIN * ms(current):
            current, idle = best, 0
        else:
            idle += 1
        if idle >= len(varying):
            return


def covering(configs: Sequence[Config]) -> list[Config]:
    """Pick few configs that hold every tile of every strategy and accumulator between them."""
    seen: set[tuple[object, ...]] = set()
    chosen = []
    for config in sorted(configs, key=lambda c: -sum(t is not None for t in _tiles(c))):
        kernels = {
            (config.strategy, config.accumulator, place, tile)
            for place, tile in enumerate(_tiles(config))
        }
        if not kernels <= seen:
            seen |= kernels
            chosen.append(config)
    return chosen


def differing(a: Config, b: Config) -> set[str]:
    """The fields in which two configs differ, but strategy and accumulator."""
    return {name for name in _FIELDS if getattr(a, name) != getattr(b, name)}


def distance(a: Config, b: Config) -> float:
    """How unlike two configs are: a field each, and less for sizes that are near each other."""
    total = 0.0
    for name in differing(a, b):
        x, y = getattr(a, name), getattr(b, name)
        both_sizes = isinstance(x, int) and isinstance(y, int)
        total += min(abs(math.log2(x / y)) / 16, 1.0) if both_sizes else 1.0
    return total


def _tiles(config: Config) -> tuple[object, ...]:
    return config.logits, config.dx, config.dw


def _in_turns(walks: Sequence[Iterator[list[Config]]]) -> Iterator[list[Config]]:
    """A batch of each walk after the other, until all have ended."""
    alive = list(walks)
    while alive:
        for one in list(alive):
            batch = next(one, None)
            if batch is None:
                alive.remove(one)
            else:
                yield batch
