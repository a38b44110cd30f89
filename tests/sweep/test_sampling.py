import itertools
import random
import statistics

import pytest

from flce_tune.kernels.config import Config, Tile
from flce_tune.sweep.sampling import sampled

pytest.importorskip("optuna")

TILES = (None, *(Tile(64, 64, 64, num_stages=stages) for stages in range(1, 6)))
GRID = [
    *(
        Config("chunked", chunk=chunk, logits=logits, dx=dx)
        for chunk, logits, dx in itertools.product((256, 512, 1024, 2048), TILES, TILES)
    ),
    *(Config("full", logits=logits, dx=dx) for logits, dx in itertools.product(TILES, TILES)),
]


def ms(config):
    """The best is chunked, chunk 1024, logits tile 4, dx tile 1."""
    return (
        50
        + (abs(config.chunk - 1024) / 100 if config.chunk else 4)
        + abs(TILES.index(config.logits) - 4)
        + abs(TILES.index(config.dx) - 1)
    )


def test_every_config_once_and_then_the_end():
    few = GRID[::15]
    assert sorted(map(str, sampled(few, [], ms, seed=0))) == sorted(map(str, few))


def test_what_is_known_is_learnt_from_and_not_proposed():
    means = []
    for seed in range(3):
        known = random.Random(seed).sample(GRID, 40)
        first = list(itertools.islice(sampled(GRID, known, ms, seed), 15))
        assert not set(first) & set(known)
        means.append(statistics.mean(map(ms, first)))
    assert statistics.mean(means) < statistics.mean(map(ms, GRID)) - 1


def test_the_best_is_found_among_failures():
    def fragile(config):
        return None if config.strategy == "full" or config.dx is None else ms(config)

    proposed = itertools.islice(sampled(GRID, [], fragile, seed=0), 45)
    assert min(fragile(config) or 1e9 for config in proposed) <= min(map(ms, GRID)) + 1


@pytest.mark.parametrize("seed", [0, 1])
def test_the_seed_decides(seed):
    one, again, other = (
        list(itertools.islice(sampled(GRID, [], ms, seed=s), 20)) for s in (seed, seed, seed + 1)
    )
    assert one == again != other


def test_it_does_better_than_chance():
    best = min(map(ms, GRID))

    def regret(configs):
        return min(map(ms, configs)) / best - 1

    tpe = [regret(itertools.islice(sampled(GRID, [], ms, seed=s), 36)) for s in range(5)]
    chance = [regret(random.Random(s).sample(GRID, 36)) for s in range(50)]
    assert statistics.mean(tpe) < statistics.mean(chance) / 2
