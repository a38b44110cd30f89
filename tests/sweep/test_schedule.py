"""That a sweep ends in time, and what it finds by then, on a simulated H200."""

import itertools
import math

import pytest

from flce_tune.dispatch.convert import config_of, toolchain_record
from flce_tune.dispatch.snapshot import Snapshot
from flce_tune.sweep.events import SweepEvents, SweepOptions
from flce_tune.sweep.interval import FEWEST
from flce_tune.sweep.schedule import FULL, QUICK, Schedule, limit_of
from flce_tune.sweep.tuning import ProblemSweep
from flce_tune.tuning_db.store import Store

QUICKLY, FULLY = SweepOptions(quick=True), SweepOptions()


@pytest.fixture
def simulated(monkeypatch):
    from pathlib import Path

    monkeypatch.syspath_prepend(str(Path(__file__).parent / "support"))
    import simulated

    recorded = Snapshot.from_winners(simulated.winners(), "recorded")
    monkeypatch.setattr(Snapshot, "from_pretuned", lambda: recorded)
    return simulated


@pytest.fixture
def nothing_shipped(simulated, monkeypatch):
    monkeypatch.setattr(Snapshot, "from_pretuned", lambda: Snapshot.from_winners([], ""))


@pytest.fixture
def run(simulated, tmp_path, cpu):
    """Sweeps the problem of a table; returns the report, the place and the seconds it took.

    Each sweep has a database of its own, or that of a name.
    """
    numbers = itertools.count()

    def run(table, options, spent_s=0.0, database=None):
        store = Store.open(f"sqlite:///{tmp_path / (database or str(next(numbers)))}")
        clock = simulated.Clock()
        place = simulated.SimulatedPlace(table, clock, simulated.h200(), toolchain_record(cpu))
        started = clock.now
        tuning = ProblemSweep(
            table.problem, store, place, options, SweepEvents(), None, None,
            spent_s=spent_s, clock=clock,
        )  # fmt: skip
        with store:
            report = tuning.run()
        return report, place, clock.now - started + spent_s

    return run


def tables(simulated):
    """The fastest first."""
    found = [t for t in simulated.h200_tables() if t.problem.accumulate == "fp32"]
    assert {(t.problem.tokens, t.problem.vocab) for t in found} >= {(16384, 128256), (4096, 128256)}
    return sorted(found, key=simulated.Table.best)


def timed(place, method="time"):
    return [config for called, config in place.calls if called == method]


@pytest.mark.parametrize(("options", "limit"), [(QUICKLY, 30), (FULLY, 180)])
def test_each_recorded_problem_is_swept_in_time_and_its_best_found(simulated, run, options, limit):
    for table in tables(simulated):
        report, _, seconds = run(table, options, spent_s=4.0)
        assert report.error is None
        assert seconds <= limit, table.problem
        assert report.best_ms <= table.best() * 1.001, "it was recorded, so it is near"
        samples = [len(w.measurement.samples_ms) for w in report.winners]
        assert min(samples) >= FEWEST, "enough for an interval"


def test_with_nothing_known_quick_is_nearly_as_good_as_full(run, simulated, nothing_shipped):
    for table in tables(simulated):
        found = {}
        for options, limit in ((QUICKLY, 30), (FULLY, 180)):
            report, _, seconds = run(table, options, spent_s=4.0)
            assert seconds <= limit
            found[options.quick] = report.best_ms
        assert found[False] <= table.best() / 0.97
        assert found[True] <= found[False] / 0.97, table.problem


def test_the_slower_the_device_the_less_is_measured_but_the_time_is_kept(simulated, run):
    table = tables(simulated)[-1]
    measured = []
    for factor in (1, 2, 3):
        slow = simulated.Table(table.problem, {c: factor * t for c, t in table.recorded.items()})
        report, place, seconds = run(slow, QUICKLY)
        measured.append(len(timed(place, "trial")))
        assert seconds <= 30
        assert report.best_ms <= slow.best() * 1.03
        assert report.left_out >= 1
    assert measured == sorted(measured, reverse=True)
    assert measured[0] > measured[-1] > 1


def test_what_was_known_before_is_measured_first(simulated, run):
    table = tables(simulated)[-1]
    _, place, _ = run(table, QUICKLY)
    first = timed(place, "trial")[: len(table.recorded) + 1]
    assert len(set(first) & set(table.recorded)) >= len(table.recorded) - 1


def test_the_default_is_measured_however_late_it_is(simulated, run, nothing_shipped):
    table = tables(simulated)[-1]
    report, place, _ = run(table, SweepOptions(time_limit_s=1.0))
    assert timed(place, "trial") == [config_of(w.measurement) for w in report.winners]
    assert report.default_ms == report.best_ms
    assert report.left_out > 1


def test_the_same_command_goes_on_with_what_was_left_out(simulated, run):
    table = tables(simulated)[-1]
    first, before, _ = run(table, QUICKLY, database="same")
    second, after, seconds = run(table, QUICKLY, database="same")
    assert 0 < second.resumed <= first.measured
    again = set(timed(after, "trial")) & set(timed(before, "trial"))
    finalists = set(timed(after, "check_ragged"))
    assert again <= finalists, "checked again before it may win, and nothing else repeated"
    assert second.measured > 0
    assert seconds <= 30


def test_without_a_limit_nothing_is_left_out(simulated, run):
    table = tables(simulated)[-1]
    report, place, _ = run(table, SweepOptions(quick=True, time_limit_s=math.inf))
    limited, before, _ = run(table, QUICKLY)
    assert report.left_out == 0 < limited.left_out
    assert len(timed(place, "trial")) > len(timed(before, "trial"))


@pytest.mark.parametrize(
    ("options", "limit"),
    [
        (QUICKLY, QUICK.limit_s),
        (FULLY, FULL.limit_s),
        (SweepOptions(budget=7), math.inf),
        (SweepOptions(budget=7, time_limit_s=9.0), 9.0),
        (SweepOptions(quick=True, time_limit_s=math.inf), math.inf),
    ],
)
def test_the_limit(options, limit):
    assert limit_of(options) == limit


def test_stages_end_one_after_the_other_within_the_limit():
    now = [100.0]
    schedule = Schedule(FULLY, spent_s=30.0, clock=lambda: now[0])
    ends = [schedule.left(stage) for stage in ("measure", "race", "final")]
    assert ends == sorted(ends)
    assert ends[-1] < 150.0
    now[0] += ends[0]
    assert schedule.over("measure")
    assert not schedule.over("race")
