from dataclasses import replace
from datetime import datetime, timedelta, timezone

import pytest

from flce_tune.tuning_db.records import Miss, Status, Winner

NOON = datetime(2026, 5, 1, 12, tzinfo=timezone.utc)


def test_the_front_comes_back_fastest_first(store, measured, device, problem):
    slow = store.add_measurement(measured(3.0, workspace_bytes=1))
    fast = store.add_measurement(measured(1.0, workspace_bytes=100))
    store.add_measurement(measured(0.5))  # measured, but not chosen
    front = [Winner(slow, default_ms=4.0, eager_ms=9.0), Winner(fast, verified=False)]
    store.set_winners(device, problem, front)
    first, second = store.winners()
    assert (first.measurement, first.verified) == (fast, False)
    assert (first.default_ms, first.eager_ms) == (None, None)
    assert (second.measurement, second.verified) == (slow, True)
    assert (second.default_ms, second.eager_ms) == (4.0, 9.0)
    assert second.updated_at.tzinfo is not None


def test_a_new_front_replaces_only_its_own_device_and_problem(store, measured, device, problem):
    other_device, other_problem = replace(device, sm_count=1), replace(problem, hidden=1)
    for d, p, median in [
        (device, problem, 1.0),
        (other_device, problem, 2.0),
        (device, other_problem, 3.0),
    ]:
        stored = store.add_measurement(measured(median, device=d, problem=p))
        store.set_winners(d, p, [Winner(stored)])
    store.set_winners(device, problem, [Winner(store.add_measurement(measured(0.5)))])
    assert [w.measurement.median_ms for w in store.winners()] == [0.5, 2.0, 3.0]
    assert [w.measurement.median_ms for w in store.winners(device=device)] == [0.5, 3.0]
    assert [w.measurement.median_ms for w in store.winners(problem=other_problem)] == [3.0]
    store.set_winners(device, problem, [])
    assert [w.measurement.median_ms for w in store.winners()] == [2.0, 3.0]


def test_a_winner_can_win_again(store, measured, device, problem):
    stored = store.add_measurement(measured())
    store.set_winners(device, problem, [Winner(stored, default_ms=2.0)])
    store.set_winners(device, problem, [Winner(stored, default_ms=3.0)])
    assert [w.default_ms for w in store.winners()] == [3.0]


def test_a_front_that_cannot_be_leaves_the_old_one(store, measured, device, problem):
    good = store.add_measurement(measured())
    store.set_winners(device, problem, [Winner(good)])
    failed = store.add_measurement(measured(None, status=Status.WRONG_RESULT))
    elsewhere = store.add_measurement(measured(1.0, device=replace(device, sm_count=1)))
    for bad in (measured(), replace(good, id=999), failed, elsewhere):
        with pytest.raises(ValueError, match="stored measurement with status ok"):
            store.set_winners(device, problem, [Winner(bad)])
    assert [w.measurement for w in store.winners()] == [good]


def test_by_architecture(store, measured, device, problem):
    devices = [
        device,
        replace(device, name="NVIDIA H100", sm_count=114),
        replace(device, name="NVIDIA B200", capability="10.0"),
        replace(device, name="x86_64", kind="cpu", capability="0.0"),
    ]
    for median, one in enumerate(devices, start=1):
        stored = store.add_measurement(measured(float(median), device=one))
        store.set_winners(one, problem, [Winner(stored)])

    def medians(architecture):
        return [w.measurement.median_ms for w in store.winners(architecture=architecture)]

    for one in devices:
        assert float(devices.index(one) + 1) in medians(one.architecture)
    assert medians("sm_90") == [1.0, 2.0]
    assert medians("sm_100") == [3.0]
    assert medians("cpu") == [4.0]
    assert medians("sm_00") == medians("90") == []


def test_misses_add_up_and_can_be_cleared(store, device, problem):
    other = replace(problem, vocab=32000)
    later = NOON + timedelta(hours=1)
    store.note_misses([Miss(device, problem, 4096, 2, later), Miss(device, other, 8, 4, NOON)])
    store.note_misses([Miss(device, problem, 8192, 3, NOON)])
    assert store.misses() == [
        Miss(device, problem, 8192, 5, later),
        Miss(device, other, 8, 4, NOON),
    ]
    assert [m.count for m in store.misses(limit=1)] == [5]
    assert store.misses(replace(device, sm_count=1)) == []
    store.clear_miss(device, problem)
    store.clear_miss(device, problem)
    assert [m.problem for m in store.misses(device)] == [other]


def test_a_time_without_a_zone_is_the_callers_mistake(store, device, problem):
    with pytest.raises(ValueError, match="time zone"):
        store.note_misses([Miss(device, problem, 1, 1, datetime(2026, 5, 1))])
    assert store.misses() == []
