"""Which configs a sweep measures: the whole space, or a guided walk from it.

Where GEMMs have tiles, the strategies propose each tile once, and the combinations are left to
the walk: the GEMMs run one after the other, so which tile suits one hardly depends on the others.
The walk starts at the analytic default and changes one field at a time: it measures all proposed
values of a field with the others held fixed, keeps the best, goes on to the next field, until a
whole round of fields brings nothing. Strategies and accumulators are walked separately, in turns;
one that stays far behind others that need no more workspace is left alone. Of a budget that was
asked for, what the walk leaves is spent on combinations that ``sampling`` chooses.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from flce_tune.kernels import strategies
from flce_tune.kernels.config import Config
from flce_tune.kernels.problem import Device, Problem
from flce_tune.sweep import sampling
from flce_tune.sweep.events import SweepOptions
from flce_tune.sweep.race import thin
from flce_tune.sweep.sampling import SIZES, Kind, kind_of

WALK_BUDGET = 200  # configs
QUICK_BUDGET = 60
QUICK_TILES = 3  # of each GEMM; strategies propose the best known first
QUICK_SIZES = 4  # chunks, and slabs
REVISITED = 3  # values of a field that are measured again after other fields have changed
GAIN = 0.995  # a step of the walk must be this much faster
HOPELESS = 4.0  # times the best walk's best: tiles do not make up for that
BEATEN = 2.0  # times the best of walks whose best needs no more workspace
QUICK_BEATEN = 1.5

TimeOf = Callable[[Config], float | None]  # ms of a measured config, None if it failed
TILED = ("logits", "dx", "dw")
_FIELDS = tuple(f.name for f in fields(Config) if f.name not in ("strategy", "accumulator"))


class Search:
    """Proposes the configs of one problem, batch after batch."""

    def __init__(
        self,
        problem: Problem,
        device: Device,
        options: SweepOptions,
        always: Sequence[Config],
        near: Sequence[Config] = (),
    ) -> None:
        """Enumerate the space; ``always`` is measured whatever the budget.

        A walk starts at the first config of its strategy in ``near``, or else at its default.

        Raises:
            UnknownStrategyError: ``options`` name a strategy that nobody registered.
        """
        names = options.strategies or strategies.names()
        self.space = [c for n in names for c in strategies.space(problem, device, strategy=n)]
        if options.quick:
            self.space = lean(self.space)
        self.always = list(dict.fromkeys(always))
        self._starts = {n: strategies.get(n).default(problem, device) for n in names}
        self._starts |= {config.strategy: config for config in reversed(near)}
        self.valid = lambda config: strategies.reject(config, problem, device) is None
        self._seed = options.seed
        self._whole = not any(tile for config in self.space for tile in _tiles(config))
        size = len({*self.space, *self.always})
        budget = options.budget or (QUICK_BUDGET if options.quick else None)
        if self._whole:
            budget = min(budget or size, size)
        self._fill = options.budget is not None or self._whole
        self.budget = max(len(self.always), budget or WALK_BUDGET)
        self._beaten = QUICK_BEATEN if options.quick else BEATEN
        self._workspace = lambda config: strategies.workspace(config, problem)

    def tiled(self) -> list[Config]:
        """Configs that hold every tile there is between them, in the order they are needed."""
        cover = covering(self.space, self.valid)
        wanted = dict.fromkeys([*self.always, *self._first(), *cover])
        return [config for config in wanted if any(_tiles(config))]

    def batches(self, time_of: TimeOf) -> Iterator[list[Config]]:
        """Yield configs to measure, never one twice; ``time_of`` is asked about earlier batches."""
        seen = dict.fromkeys(self.always)
        yield list(seen)
        sources = self._sources(time_of, seen)
        for batch in itertools.chain.from_iterable(sources):
            fresh = [config for config in dict.fromkeys(batch) if config not in seen]
            fresh = fresh[: self.budget - len(seen)]
            seen |= dict.fromkeys(fresh)
            if fresh:
                yield fresh
            if len(seen) >= self.budget:
                return

    def _first(self) -> list[Config]:
        """Where each strategy, with each accumulator, starts."""
        return [nearest(group, self._starts[group[0].strategy]) for group in groups(self.space)]

    def _sources(self, time_of: TimeOf, seen: Collection[Config]) -> list[Iterator[list[Config]]]:
        if self._whole:
            return [iter([self._first()]), self._fill_up(time_of, seen)]
        walks = {
            kind_of(configs[0]): walk(
                configs, self._starts[configs[0].strategy], time_of, self.valid
            )
            for configs in groups(self.space)
        }
        given_up: set[Kind] = set()
        walking = in_turns(walks, time_of, given_up, self._workspace, self._beaten)
        return [walking, self._fill_up(time_of, seen, given_up)] if self._fill else [walking]

    def _fill_up(
        self, time_of: TimeOf, seen: Collection[Config], without: Collection[Kind] = ()
    ) -> Iterator[list[Config]]:
        """The whole space if the budget covers it, else a sample of all combinations.

        Of groups that were given up, nothing. ``seen`` is read when this is first advanced.
        """
        space = self.space if self._whole else combinations(self.space, self.valid)
        space = [config for config in space if kind_of(config) not in without]
        if len({*space, *seen}) > self.budget:
            if sampling.available():
                yield from ([c] for c in sampling.sampled(space, seen, time_of, self._seed))
                return
            warnings.warn(
                "flce-tune: the budget does not cover the space, and Optuna, which would choose "
                "what to measure, is not installed: pip install 'flce-tune[search]'. "
                "Chance chooses instead.",
                stacklevel=2,
            )
        yield random.Random(self._seed).sample(space, len(space))


def lean(space: Sequence[Config]) -> list[Config]:
    """What a quick sweep looks at: few tiles, few sizes of those that have tiles.

    Of accumulators in tiles the smaller one, whichever tiles: not all can keep both.
    """
    tiles = {
        name: [*dict.fromkeys(tile for c in space if (tile := getattr(c, name)))][:QUICK_TILES]
        for name in TILED
    }
    sizes = {
        (group[0].strategy, name): _few_sizes([getattr(c, name) for c in group])
        for group in groups(space)
        if any(tile for config in group for tile in _tiles(config))
        for name in SIZES
    }

    def kept(config: Config) -> bool:
        few = all(getattr(config, n) is None or getattr(config, n) in t for n, t in tiles.items())
        few = few and all(
            getattr(config, n) in sizes.get((config.strategy, n), [getattr(config, n)])
            for n in SIZES
        )
        smaller = any(_tiles(config)) and cut(config) in smaller_cuts
        return few and not (config.accumulator == "fp32" and smaller)

    def cut(config: Config) -> tuple[object, ...]:
        tiled = (tile is not None for tile in _tiles(config))
        return config.strategy, config.chunk, config.slab, *tiled

    smaller_cuts = {cut(config) for config in space if config.accumulator == "split24"}
    return [config for config in space if kept(config)]


def _few_sizes(sizes: Sequence[int | None]) -> list[int | None]:
    """The size that most configs have, and others from the smallest to the largest."""
    distinct = sorted({size for size in sizes if size is not None})
    return [*thin(distinct, QUICK_SIZES - 1), statistics.mode(sizes)]


def combinations(space: Sequence[Config], valid: Callable[[Config], bool]) -> list[Config]:
    """Every valid combination of the values that each strategy and accumulator proposes."""
    combined = []
    for group in groups(space):
        values = [list(dict.fromkeys(getattr(c, name) for c in group)) for name in _FIELDS]
        combined += [
            config
            for chosen in itertools.product(*values)
            if valid(config := replace(group[0], **dict(zip(_FIELDS, chosen, strict=True))))
        ]
    return combined


def groups(space: Sequence[Config]) -> list[list[Config]]:
    """Split a space by strategy and accumulator."""
    split: dict[Kind, list[Config]] = {}
    for config in space:
        split.setdefault(kind_of(config), []).append(config)
    return list(split.values())


def walk(
    space: Sequence[Config],
    start: Config,
    time_of: TimeOf,
    valid: Callable[[Config], bool],
) -> Iterator[list[Config]]:
    """Descend one field at a time from the config of the space that resembles ``start`` most.

    Combines the values that the space holds for each field; only ``valid`` configs are yielded.
    """
    current = nearest(space, start)
    values = {name: list(dict.fromkeys(getattr(c, name) for c in space)) for name in _FIELDS}
    for name in SIZES:
        values[name].sort(key=lambda size: -(size or 0))  # the larger the faster, mostly
    varying = [name for name in _FIELDS if len(values[name]) > 1]
    measured = [current]
    yield [current]
    idle, visits = 0, 0
    while idle < len(varying):
        name = varying[visits % len(varying)]
        chosen = values[name]
        if visits >= len(varying):
            chosen = _best_values(name, measured, time_of)[:REVISITED]
        line = [c for v in chosen if valid(c := replace(current, **{name: v}))]
        yield line
        measured += line
        best = min([current, *line], key=lambda config: _ms(time_of, config))
        if _ms(time_of, best) < GAIN * _ms(time_of, current):
            current, idle = best, 0
        else:
            idle += 1
        visits += 1


def nearest(space: Sequence[Config], start: Config) -> Config:
    """The config of a space that resembles ``start`` most."""
    return min(space, key=lambda config: distance(config, start))


def _best_values(name: str, measured: Sequence[Config], time_of: TimeOf) -> list[Any]:
    """The values a field had in the measured configs, that of the fastest first."""
    ranked = sorted(measured, key=lambda config: _ms(time_of, config))
    return list(dict.fromkeys(getattr(config, name) for config in ranked))


def covering(space: Sequence[Config], valid: Callable[[Config], bool]) -> list[Config]:
    """Make few configs that hold every tile of every strategy and accumulator between them.

    Their tiles differ all at once, so that compilers that work on them side by side do not compile
    the same kernels. Where tiles do not go together, the configs of ``space`` stand in.
    """
    chosen = []
    for group in groups(space):
        tiles = {name: list(dict.fromkeys(getattr(c, name) for c in group)) for name in TILED}
        for number in range(max(map(len, tiles.values()))):
            together = {name: t[number % len(t)] for name, t in tiles.items()}
            base = next((c for c in group if valid(replace(c, **together))), None)
            if base is not None:
                chosen.append(replace(base, **together))
            else:
                chosen += [c for c in group if any(getattr(c, n) == t for n, t in together.items())]
    return list(dict.fromkeys(chosen))


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


def _ms(time_of: TimeOf, config: Config) -> float:
    time = time_of(config)
    return math.inf if time is None else time


def in_turns(
    walks: Mapping[Kind, Iterator[list[Config]]],
    time_of: TimeOf,
    given_up: set[Kind],
    workspace: Callable[[Config], int] = lambda config: 0,
    beaten: float = BEATEN,
) -> Iterator[list[Config]]:
    """The next batches of all walks together, the fastest walk's first, until none is left.

    A walk is given up when its best is HOPELESS times as slow as the best of all, or ``beaten``
    times as the best of a walk whose best needs no more workspace.
    """
    alive = dict(walks)
    best: dict[Kind, tuple[float, float]] = {}  # ms, bytes
    while alive:
        order = sorted(alive, key=lambda group: best.get(group, (math.inf, 0))[0])
        batches = {group: next(alive[group], None) for group in order}
        yield [config for batch in batches.values() for config in batch or ()]
        for group, batch in batches.items():
            if batch is None:
                del alive[group]
                continue
            first = min(batch, key=lambda config: _ms(time_of, config), default=None)
            if first is not None:
                known = best.get(group, (math.inf, math.inf))
                best[group] = min(known, (_ms(time_of, first), float(workspace(first))))
        for group in [group for group in alive if group in best]:
            ms, size = best[group]
            rivals = [other for other, needed in best.values() if needed <= size]
            fastest = min(other for other, _ in best.values())
            if ms > HOPELESS * fastest or ms > beaten * min(rivals):
                del alive[group]
                given_up.add(group)
