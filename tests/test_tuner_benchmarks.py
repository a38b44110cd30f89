"""The tuner's benchmark of searches, on a table made up here."""

import itertools
import json
from argparse import Namespace
from pathlib import Path

import pytest

from flce_tune.kernels.config import Config, Tile

SCRIPTS = Path(__file__).parent.parent / "benchmarks" / "tuner"
RESULTS = SCRIPTS.parent / "results"
TILES = (None, *(Tile(64, 64, 64, num_stages=stages) for stages in range(1, 6)))
TIMES = {
    Config("full", logits=logits, dx=dx): 10.0 + abs(a - 2) + abs(b - 3)
    for (a, logits), (b, dx) in itertools.product(enumerate(TILES), enumerate(TILES))
}
STARTS = [Config("full")]


@pytest.fixture
def search(monkeypatch):
    pytest.importorskip("optuna")
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import search

    return search


def test_regret_falls_to_nothing_when_all_is_evaluated(search):
    for name, one in search.SEARCHES.items():
        few, half, everything = search.regrets(TIMES, STARTS, one, 0, (1, 18, 36))
        assert few >= half >= everything == 0.0, name


def test_the_walk_finds_the_best_of_what_adds_up(search):
    assert search.regrets(TIMES, STARTS, search.as_a_sweep, 1, (14,)) == [0.0]


def test_replay_prints_a_row_for_each_search(search, tmp_path, capsys):
    table = [{"config": config.to_dict(), "ms": ms} for config, ms in TIMES.items()]
    file = tmp_path / "grid.json"
    measured_on = json.loads((RESULTS / "search-cpu.json").read_text())
    file.write_text(json.dumps({**measured_on, "table": table}))
    search.replay(Namespace(table=file, seeds=2))
    out = capsys.readouterr().out
    assert "36 configs; the best takes 10.000 ms" in out
    assert all(f"| {name} |" in out for name in search.SEARCHES)
