"""Who wins: statistics of timings, ties, shortlists and the front of time and workspace.

Pure functions; no torch, no clock. Times are milliseconds, workspaces are bytes.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from flce_tune.sweep.interval import median_interval

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")

Enough = Callable[[int], bool]  # whether so many rounds are

ALIKE_TIME = 0.005  # medians closer than this, relative, are a tie whatever the samples say
ALIKE_WORKSPACE = 0.02  # likewise for workspaces
TOO_SLOW = 2.0  # times the best median: not worth another run


def never(done: int) -> bool:
    """No number of rounds is enough."""
    return False


@dataclass(frozen=True, slots=True)
class Racer(Generic[K]):
    """One candidate with its samples so far."""

    key: K
    samples: tuple[float, ...]
    workspace: int

    @property
    def median(self) -> float:
        """The median of the samples."""
        return statistics.median(self.samples)


def half_iqr(samples: Sequence[float]) -> float:
    """Half the interquartile range; 0 for a single sample."""
    if len(samples) < 2:
        return 0.0
    lower, _, upper = statistics.quantiles(samples, n=4, method="inclusive")
    return (upper - lower) / 2


def standard_error(samples: Sequence[float]) -> float:
    """Estimate the standard error of the median, robustly, from the interquartile range."""
    sigma = half_iqr(samples) / 0.6745
    return 1.2533 * sigma / math.sqrt(len(samples))


def is_tie(a: Racer[K], b: Racer[K]) -> bool:
    """Whether the two differ by no more than the noise.

    Samples of equal number were taken in the same rounds, so they are compared round by round:
    what slows the whole machine for a while then counts for neither. They tie unless the
    confidence interval of the median difference keeps clear of zero.
    """
    alike = ALIKE_TIME * min(a.median, b.median)
    if len(a.samples) == len(b.samples):
        differences = [x - y for x, y in zip(a.samples, b.samples, strict=True)]
        difference, noise = statistics.median(differences), standard_error(differences)
        if interval := median_interval(differences):
            return interval[0] <= 0 <= interval[1] or abs(difference) <= alike
    else:
        difference = a.median - b.median
        noise = math.hypot(standard_error(a.samples), standard_error(b.samples))
    return abs(difference) <= max(2 * noise, alike)


def shortlist(racers: Iterable[Racer[K]], keep: int, always: Collection[K] = ()) -> list[Racer[K]]:
    """Choose who runs again, fastest first: ``keep`` at and near the front, and all of ``always``.

    Two thirds of the places go to the front of time and workspace, thinned where it is longer.
    The others go to whoever is least behind the fastest that needs no more workspace: whichever
    member of the front only seemed fast has its rivals beside it. Nobody far behind the best runs
    again, unless in ``always``.
    """
    ranked = sorted(racers, key=lambda racer: racer.median)
    if not ranked:
        return []
    limit = TOO_SLOW * ranked[0].median
    near = [racer for racer in ranked if racer.median <= limit]
    chosen = {racer.key for racer in thin(front(near), keep - keep // 3)}
    for racer in sorted(near, key=lambda racer: _behind(racer, near)):
        if len(chosen) >= keep:
            break
        chosen.add(racer.key)
    chosen.update(always)
    return [racer for racer in ranked if racer.key in chosen]


def by_promise(racers: Sequence[Racer[K]]) -> list[Racer[K]]:
    """The front of time and workspace, fastest first, then the others, fastest first."""
    first = front(racers)
    members = {racer.key for racer in first}
    others = sorted(racers, key=lambda racer: racer.median)
    return [*first, *(racer for racer in others if racer.key not in members)]


def _behind(racer: Racer[K], others: Iterable[Racer[K]]) -> float:
    """How many times the best time within its own workspace a racer takes; 1 on the front."""
    allowed = racer.workspace * (1 + ALIKE_WORKSPACE)
    return racer.median / min(other.median for other in others if other.workspace <= allowed)


def thin(ordered: Sequence[T], keep: int) -> list[T]:
    """Pick at most ``keep``, evenly, with both ends."""
    if len(ordered) <= keep:
        return list(ordered)
    if keep == 1:
        return [ordered[0]]
    step = (len(ordered) - 1) / (keep - 1)
    return [ordered[round(i * step)] for i in range(keep)]


def front(
    racers: Iterable[Racer[K]], incumbents: Collection[K] = (), default: K | None = None
) -> list[Racer[K]]:
    """Find the Pareto front of median time and workspace, the fastest first.

    Each member needs clearly less workspace than the one before it. The fastest takes its place
    unless somebody ties with it who needs no more workspace: then an incumbent does, or else the
    default, for noise alone replaces no winner; or whoever is as fast in all but name and smaller.
    """
    left = list(racers)
    members: list[Racer[K]] = []
    while left:
        member = _best(left, incumbents, default)
        members.append(member)
        left = [
            racer for racer in left if racer.workspace < member.workspace * (1 - ALIKE_WORKSPACE)
        ]
    return members


def _best(racers: Collection[Racer[K]], incumbents: Collection[K], default: K | None) -> Racer[K]:
    fastest = min(racers, key=lambda racer: (racer.median, racer.workspace))
    tied = [
        racer
        for racer in racers
        if is_tie(racer, fastest) and racer.workspace <= fastest.workspace * (1 + ALIKE_WORKSPACE)
    ]
    known = [racer for racer in tied if racer.key in incumbents]
    known = known or [racer for racer in tied if racer.key == default]
    if known:
        return min(known, key=lambda racer: racer.median)
    alike = [r for r in tied if r.median <= fastest.median * (1 + ALIKE_TIME)]
    smallest = min(racer.workspace for racer in alike)
    smallest_alike = [r for r in alike if r.workspace <= smallest * (1 + ALIKE_WORKSPACE)]
    return min(smallest_alike, key=lambda racer: racer.median)


def interleave(
    keys: Sequence[K],
    rounds: int,
    run: Callable[[K], float | None],
    enough: Enough = never,
) -> dict[K, tuple[float, ...]]:
    """Run all keys once a round, so that drifting clocks touch all alike.

    Every other round goes backwards: nobody always runs after the same neighbour. A key whose
    ``run`` returns None has failed and leaves the race. ``enough`` is asked before each round, with
    the number of those that are done.
    """
    samples: Mapping[K, list[float]] = {key: [] for key in keys}
    alive = list(keys)
    for number in range(rounds):
        if enough(number):
            break
        for key in list(alive) if number % 2 == 0 else list(reversed(alive)):
            sample = run(key)
            if sample is None:
                alive.remove(key)
            else:
                samples[key].append(sample)
    return {key: tuple(samples[key]) for key in alive}
