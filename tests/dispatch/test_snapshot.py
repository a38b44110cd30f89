from dataclasses import replace

import pytest

from flce_tune.dispatch import Snapshot
from flce_tune.dispatch.convert import device_record, problem_record
from flce_tune.dispatch.snapshot import without_password
from flce_tune.kernels.config import Config
from flce_tune.kernels.problem import Device, Problem
from flce_tune.tuning_db.records import Status


def chunks(snapshot: Snapshot, device: Device, problem: Problem) -> list[int]:
    front = snapshot.fronts[device_record(device)][problem_record(problem)]
    return [winner.measurement.config["chunk"] for winner in front]


def test_a_front_runs_from_fast_to_slow(make_winner, h200: Device, problem: Problem):
    winners = [make_winner(Config("chunked", chunk=c), ms) for c, ms in ((1, 3.0), (2, 1.0))]
    snapshot = Snapshot.from_winners(winners, "test")
    assert chunks(snapshot, h200, problem) == [2, 1]
    assert len(snapshot) == 2


def test_failures_and_impossible_sizes_are_left_out(make_winner):
    good = make_winner(Config("full"))
    failed = replace(
        good,
        measurement=replace(
            good.measurement, status=Status.CRASH, samples_ms=(), median_ms=None, spread_ms=None
        ),
    )
    sizeless = replace(
        good,
        measurement=replace(
            good.measurement, problem=replace(good.measurement.problem, token_bucket=0)
        ),
    )
    assert len(Snapshot.from_winners([failed, sizeless], "test")) == 0


def test_a_snapshot_cannot_be_changed(make_winner, h200: Device, problem: Problem):
    snapshot = Snapshot.from_winners([make_winner(Config("full"))], "test")
    with pytest.raises(TypeError):
        snapshot.fronts[device_record(h200)] = {}
    with pytest.raises(TypeError):
        del snapshot.fronts[device_record(h200)][problem_record(problem)]


def test_the_upper_of_two_snapshots_wins_front_by_front(
    make_winner, h200: Device, problem: Problem
):
    upper = Snapshot.from_winners([make_winner(Config("chunked", chunk=1))], "upper")
    lower = Snapshot.from_winners(
        [
            make_winner(Config("chunked", chunk=2)),
            make_winner(Config("chunked", chunk=3), tokens=64),
        ],
        "lower",
    )
    both = upper.over(lower)
    assert chunks(both, h200, problem) == [1]
    assert chunks(both, h200, replace(problem, tokens=64)) == [3]
    assert both.source == "upper; lower"


def test_fingerprints_are_equal_for_equal_choices_only(make_winner, h200: Device):
    def fingerprint(*winners) -> str:
        return Snapshot.from_winners(winners, "test").fingerprint

    a, b = make_winner(Config("full"), 1.0), make_winner(Config("chunked", chunk=8), 2.0)
    assert fingerprint(a, b) == fingerprint(b, a)
    assert fingerprint(a) != fingerprint(b)
    assert fingerprint(a) != fingerprint(make_winner(Config("full"), tokens=64))
    faster_b = make_winner(Config("chunked", chunk=8), 0.5)
    assert fingerprint(a, b) != fingerprint(a, faster_b)
    other_memory = make_winner(Config("full"), device=replace(h200, memory_bytes=1))
    assert fingerprint(a) == fingerprint(other_memory)


def test_passwords_are_not_shown():
    assert without_password("postgresql://me:s3cret@host/db") == "postgresql://me:***@host/db"
    assert without_password("sqlite:////data/a:b@c.sqlite3") == "sqlite:////data/a:b@c.sqlite3"
