import itertools

import pytest
import torch

from flce_tune.kernels import strategies
from flce_tune.kernels.config import Config, Tile
from flce_tune.kernels.problem import Device, Problem, describe_device
from flce_tune.kernels.strategies.common import TILES as TILES_PROPOSED
from flce_tune.sweep.candidates import Search, combinations, covering, differing, in_turns, walk
from flce_tune.sweep.events import SweepOptions

CPU = describe_device(torch.device("cpu"))
H200 = Device("cuda", "NVIDIA H200", (9, 0), 132, 232448, 150 << 30)
SMALL = Problem(tokens=1024, hidden=64, vocab=3000, dtype="float32")
LARGE = Problem(tokens=16384, hidden=4096, vocab=128256)
TILES = (None, Tile(64, 64, 64), Tile(128, 128, 64), Tile(128, 256, 64))
STAR = [
    *(Config("chunked", chunk=chunk) for chunk in (256, 512, 1024, 2048)),
    *(Config("chunked", chunk=256, logits=tile) for tile in TILES[1:]),
    *(Config("chunked", chunk=256, dx=tile) for tile in TILES[1:]),
]
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


def walked(space, start, time_of, valid=lambda config: True):
    return list(itertools.chain.from_iterable(walk(space, start, time_of, valid)))


def test_the_walk_combines_what_the_space_proposes_one_by_one():
    measured = walked(STAR, STAR[0], separable)
    assert min(measured, key=separable) == min(GRID, key=separable)
    assert len(set(measured)) < len(GRID) / 2


def test_the_walk_avoids_what_fails():
    def failing(config):
        return None if config.logits == TILES[3] else separable(config)

    measured = walked(STAR, STAR[0], failing)
    working = [config for config in GRID if failing(config) is not None]
    assert min(measured, key=lambda c: failing(c) or 1e9) == min(working, key=failing)


def test_the_walk_keeps_to_valid_combinations():
    def valid(config):
        return not (config.logits and config.dx)

    measured = walked(STAR, STAR[0], separable, valid)
    assert all(map(valid, measured))
    assert min(measured, key=separable) == min(filter(valid, GRID), key=separable)


def test_the_walk_starts_next_to_the_default():
    start = Config("chunked", chunk=1100, logits=TILES[2])
    (first,) = next(walk(GRID, start, separable, lambda config: True))
    assert differing(first, start) == {"chunk"}
    assert first.chunk == 1024


@pytest.mark.parametrize("options", [SweepOptions(), SweepOptions(quick=True)])
def test_a_large_space_is_walked_within_its_budget(options):
    always = [Config("chunked", chunk=3968)]
    search = Search(LARGE, H200, options, always)
    measured = run(search)
    assert measured[0] == always[0]
    assert len(measured) == len(set(measured)) <= search.budget
    assert {c.strategy for c in measured} == {c.strategy for c in search.space}


@pytest.mark.parametrize(("problem", "device", "budget"), [(LARGE, H200, 90), (SMALL, CPU, 4)])
def test_a_budget_is_spent_to_the_last_config(problem, device, budget):
    measured = run(Search(problem, device, SweepOptions(budget=budget), []))
    assert len(set(measured)) == len(measured) == budget


def test_a_budget_begins_with_each_strategys_own_default():
    search = Search(SMALL, CPU, SweepOptions(budget=9), [Config("full")])
    names = strategies.names()
    starts = [strategies.get(name).default(SMALL, CPU) for name in names]
    measured = run(search)[: 1 + len(starts)]
    assert {c.strategy for c in measured} == {c.strategy for c in search.space}
    assert set(measured) >= {c for c in starts if c in search.space}


def test_without_optuna_chance_chooses_and_says_so(monkeypatch):
    monkeypatch.setattr("flce_tune.sweep.sampling.available", lambda: False)
    search = Search(SMALL, CPU, SweepOptions(budget=8), [])
    with pytest.warns(UserWarning, match=r"pip install 'flce-tune\[search\]'"):
        assert len(set(run(search))) == 8


def test_a_budget_for_everything_needs_no_optuna(monkeypatch, recwarn):
    monkeypatch.setattr("flce_tune.sweep.sampling.available", lambda: False)
    search = Search(SMALL, CPU, SweepOptions(budget=1000), [])
    assert set(run(search)) == set(search.space)
    assert not recwarn.list


def test_what_the_walk_leaves_of_a_budget_goes_to_new_combinations():
    search = Search(LARGE, H200, SweepOptions(strategies=("full",), budget=120), [])
    measured = run(search, lambda config: 1.0 + len(str(config)) % 7)
    assert len(measured) == len(set(measured)) == 120
    assert any(c not in search.space and c.logits and c.dx and c.dw for c in measured[60:])


def test_combinations_are_all_of_a_groups_values():
    assert set(combinations(STAR, lambda config: True)) == set(GRID)
    assert combinations(STAR, lambda config: config.dx is None) == [
        c for c in combinations(STAR, lambda config: True) if c.dx is None
    ]


def test_a_quick_sweep_keeps_the_first_tiles_and_few_sizes():
    full, quick = (Search(LARGE, H200, SweepOptions(quick=q), []).space for q in (False, True))
    assert set(quick) < set(full)
    for strategy, name in (("chunked", "chunk"), ("factored", "chunk"), ("recompute", "slab")):
        sizes = sorted({getattr(c, name) for c in full if c.strategy == strategy})
        kept = sorted({getattr(c, name) for c in quick if c.strategy == strategy})
        assert (kept[0], kept[-1]) == (sizes[0], sizes[-1])
        assert 3 <= len(kept) <= 4 < len(sizes)
    for name, tiles in TILES_PROPOSED.items():
        kept = {getattr(c, name) for c in quick}
        assert {None, tiles[0]} < kept
        assert len(kept) == 4
    assert not any(c.accumulator == "fp32" and c.dw for c in quick if c.strategy == "chunked")
    assert any(c.accumulator == "fp32" and c.chunk for c in quick), "cuBLAS sums in fp32 only"


def test_a_walk_starts_at_the_nearest_known_winner():
    near = [Config("full", logits=Tile(128, 256, 64, group=32), dx=TILES_PROPOSED["dx"][0])]
    search = Search(LARGE, H200, SweepOptions(strategies=("full",)), near, near)
    assert set(run(search)) >= {Config("full", logits=near[0].logits, dx=near[0].dx)}
    with_start = next(itertools.islice(search.batches(lambda config: 1.0), 1, None))
    assert all(c.logits == near[0].logits or c.dx == near[0].dx for c in with_start)


def test_the_sample_depends_on_the_seed_alone():
    def measured(seed):
        return run(Search(SMALL, CPU, SweepOptions(budget=8, seed=seed), []))

    assert measured(0) == measured(0)
    assert measured(0) != measured(1)


def test_the_default_and_the_incumbents_are_measured_whatever_the_budget():
    always = [Config("chunked", chunk=128 * i) for i in range(1, 6)]
    assert run(Search(LARGE, H200, SweepOptions(budget=2), always)) == always


def test_only_the_strategies_asked_for_are_searched():
    search = Search(LARGE, H200, SweepOptions(strategies=("full",)), [])
    assert {c.strategy for c in run(search)} == {"full"}


def test_few_configs_cover_all_tiles_and_share_none():
    cover = covering(STAR, lambda config: True)
    for place in ("logits", "dx"):
        tiles = [getattr(c, place) for c in cover]
        assert sorted(map(str, tiles)) == sorted(map(str, TILES))


def test_where_tiles_do_not_go_together_each_is_covered_all_the_same():
    cover = covering(STAR, lambda config: not (config.logits and config.dx))
    for place in ("logits", "dx"):
        assert {getattr(c, place) for c in cover} == set(TILES)
    assert not any(config.logits and config.dx for config in cover)


def test_a_strategy_far_behind_is_left_alone_even_when_the_budget_is_filled():
    def slow_recompute(config):
        return 500.0 if config.strategy == "recompute" else 100.0

    search = Search(LARGE, H200, SweepOptions(budget=250), [])
    measured = run(search, slow_recompute)
    tried = [config for config in measured if config.strategy == "recompute"]
    assert 1 <= len(tried) <= 2, "the start of each accumulator"
    assert len(measured) == 250


def test_a_slow_strategy_alone_is_searched_as_any_other():
    options = SweepOptions(strategies=("recompute",))
    search = Search(LARGE, H200, options, [Config("chunked", chunk=4096)])
    measured = run(search, lambda config: 500.0 if config.strategy == "recompute" else 100.0)
    assert len(measured) > 20


def test_the_promising_walk_goes_first_and_all_take_turns():
    fast = Config("full"), Config("full", chunk=2)
    slow = Config("chunked", chunk=1), Config("chunked", chunk=2)
    walks = {
        ("chunked", "fp32"): iter([[c] for c in slow]),
        ("full", "fp32"): iter([[c] for c in fast]),
    }
    rounds = in_turns(walks, lambda c: 1.0 if c.strategy == "full" else 1.2, set())
    assert [next(rounds), next(rounds)] == [[slow[0], fast[0]], [fast[1], slow[1]]]


@pytest.mark.parametrize(("workspace", "stays"), [(100, False), (200, False), (99, True)])
def test_a_walk_that_is_beaten_stays_only_for_its_workspace(workspace, stays):
    slow, fast = Config("recompute", slab=1), Config("full")
    walks = {
        ("recompute", "fp32"): iter([[slow], [slow]]),
        ("full", "fp32"): iter([[fast], [fast]]),
    }
    sizes = {"recompute": workspace, "full": 100}
    given_up = set()
    rounds = in_turns(
        walks,
        lambda c: 1.0 if c == fast else 2.5,
        given_up,
        lambda c: sizes[c.strategy],
        2.0,
    )
    next(rounds)
    assert (slow in next(rounds)) is stays
    assert given_up == (set() if stays else {("recompute", "fp32")})


def test_what_is_measured_first_is_compiled_first():
    winner = Config("full", logits=TILES_PROPOSED["logits"][1])
    search = Search(LARGE, H200, SweepOptions(quick=True), [Config("full"), winner], [winner])
    tiled = search.tiled()
    assert tiled[0] == winner
    starts = {(c.strategy, c.accumulator) for c in tiled[1:6]}
    assert len(starts) == 5, "where each walk starts is next"
    for name in ("logits", "dx", "dw"):
        wanted = {getattr(c, name) for c in search.space} - {None}
        assert wanted <= {getattr(c, name) for c in tiled}
