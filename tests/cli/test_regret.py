"""``flce-tune regret``: what fallback rules cost."""

import dataclasses
import json
from pathlib import Path

import pytest

from flce_tune.tuning_db.records import Winner
from flce_tune.tuning_db.store import Store


@pytest.fixture
def two_problems(h200_database: Path) -> Path:
    """The winner of one N measured, 1.5 times as slow, for half as many tokens."""
    with Store.open(f"sqlite:///{h200_database}") as store:
        known = store.winners()[0].measurement
        half = dataclasses.replace(known.problem, token_bucket=known.problem.token_bucket // 2)
        base = dataclasses.replace(known, id=None, problem=half, tokens=half.token_bucket)
        slower = dataclasses.replace(base, median_ms=15.0, samples_ms=(15.0,))
        best = dataclasses.replace(
            base, config={"strategy": "full"}, median_ms=10.0, samples_ms=(10.0,)
        )
        store.add_measurement(slower)
        stored = store.add_measurement(best)
        store.set_winners(stored.device, half, [Winner(stored)])
    return h200_database


@pytest.mark.usefixtures("two_problems")
def test_a_choice_that_was_measured_has_a_cost(run):
    found = json.loads(run("regret", "--json").stdout)
    (one,) = (f for f in found if f["rule"] == "nearest tokens" and f["best_ms"] == 10.0)
    assert one["cost"] == pytest.approx(0.5)
    text = run("regret").stdout
    assert "50.0%" in text
    assert "nearest tokens: " in text


def test_nothing_stored_is_told(run):
    assert run("regret").exit_code == 4
