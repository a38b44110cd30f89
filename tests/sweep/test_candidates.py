import itertools

import pytest
import torch

from flce_tune.kernels.config import Config, Tile
from flce_tune.kernels.problem import Device, Problem, describe_device
from flce_tune.sweep.candidates import Search, covering, differing, walk
from flce_tune.sweep.events import SweepOptions

CPU = describe_device(torch.device("cpu"))
H200 = Device("cuda", "NVIDIA H200", (9, 0), 132, 232448, 150 << 30)
SMALL = Problem(tokens=1024, hidden=64, vocab=3000, dtype="float32")
LARGE = Problem(tokens=16384, hidden=4096, vocab=128256)
TILES = (None, Tile(64, 64, 64), Tile(128, 128, 64), Tile(128, 256, 64))
GRID = [
    Config("chunked", chunk=chunk, logits=logits, dx=dx)
    for chunk, logits, dx in itertools.product((256, 512, 1024, 2048), TILES, TILES)
]


def separable(config):
    """Milliseconds of the grid's configs: the best is chunk 1024, logits tile 3, dx tile 1."""
    return (
        abs(config.chunk - 1024) / 100
        + abs(TILES.index(config.logits) - 3)
        + abs(TILES.index(config.dx) - 1)
        + 50
    )


def run(search, time_of=lambda config: 1.0):
    return list(itertools.chain.from_iterable(search.batches(time_of)))


def test_a_small_space_is_measured_whole_and_once():
    search = Search(SMALL, CPU, SweepOptions(), [Config("full")])
    measured = run(search)
    assert measured[0] == Config("full")
    assert sorted(map(str, measured)) == sorted({str(c) for c in [*search.space, Config("full")]})


def test_the_walk_finds_the_best_of_a_separable_space():
    measured = list(itertools.chain.from_iterable(walk(GRID, GRID[0], separable)))
    assert min(measured, key=separable) == min(GRID, key=separable)
    assert len(set(measured)) < len(GRID) / 2


def test_the_walk_avoids_what_fails():
    def failing(config):
        return None if config.logits == TILES[3] else separable(config)

    measured = list(itertools.chain.from_iterable(walk(GRID, GRID[0], failing)))
    working = [config for config in GRID if failing(config) is not None]
    assert min(measured, key=lambda c: failing(c) or 1e9) == min(working, key=failing)


def test_the_walk_starts_next_to_the_default():
    start = Config("chunked", chunk=1100, logits=TILES[2])
    (first,) = next(walk(GRID, start, separable))
    assert differing(first, start) == {"chunk"}
    assert first.chunk == 1024


@pytest.mark.parametrize("options", [SweepOptions(), SweepOptions(quick=True)])
def test_a_large_space_is_walked_within_its_budget(options):
    always = [Config("chunked", chunk=3968)]
    search = Search(LARGE, H200, options, always)
    measured = run(search)
    assert len(search.space) > 1000
    assert measured[0] == always[0]
    assert len(measured) == len(set(measured)) <= search.budget
    assert {c.strategy for c in measured} == {c.strategy for c in search.space}


def test_a_budget_is_spent_to_the_last_config_and_seeded():
    def measured(seed):
        options = SweepOptions(budget=200, seed=seed)
        return run(Search(LARGE, H200, options, []))

    assert len(set(measured(0))) == 200
    assert measured(0) == measured(0)
    assert measured(0) != measured(1)


def test_the_default_and_the_incumbents_are_measured_whatever_the_budget():
    always = [Config("chunked", chunk=128 * i) for i in range(1, 6)]
    assert run(Search(LARGE, H200, SweepOptions(budget=2), always)) == always


def test_only_the_strategies_asked_for_are_searched():
    search = Search(LARGE, H200, SweepOptions(strategies=("full",)), [])
    assert {c.strategy for c in run(search)} == {"full"}


def test_few_configs_cover_all_tiles():
    cover = covering(GRID)
    for place in ("logits", "dx"):
        assert {getattr(c, place) for c in cover} == set(TILES)
    assert len(cover) <= 2 * len(TILES)
