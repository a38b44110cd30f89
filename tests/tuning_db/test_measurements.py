import math
from dataclasses import replace
from datetime import datetime, timedelta, timezone

import pytest
from sqlalchemy import text

from flce_tune.errors import StoreError
from flce_tune.tuning_db.engine import Database
from flce_tune.tuning_db.records import (
    DeviceRecord,
    Measurement,
    ProblemRecord,
    Status,
    canonical_config,
)
from flce_tune.tuning_db.store import Store


def test_everything_said_comes_back(store, measured):
    said = measured(
        workspace_bytes=5_000_000_000,
        registers=128,
        spills=0,
        shared_memory=98304,
        errors={"dx": 0.001, "dw": 0.25},
        clocks_mhz=1980,
        message="fine",
        problem=ProblemRecord(
            "train", "bfloat16", "fp32", 4096, 128256, 16384, ("softcap", "bias")
        ),
        config={"strategy": "atomic", "dx": {"v_block": 64, "n_block": 1, "d_block": 64}},
        created_at=datetime(2026, 1, 2, 3, 4, 5, 678901, timezone(timedelta(hours=2))),
    )
    stored = store.add_measurement(said)
    assert stored.id is not None
    assert stored == replace(said, id=stored.id)
    assert store.measurements() == [stored]
    assert store.measurements()[0].device.memory_bytes == 150_000_000_000
    assert store.measurements()[0].created_at.utcoffset() == timedelta(0)
    assert store.problems() == [said.problem]
    assert said.problem.features == ("bias", "softcap")


def test_the_store_fills_in_the_time(store, measured):
    stored = store.add_measurement(measured())
    age = datetime.now(timezone.utc) - stored.created_at
    assert abs(age) < timedelta(hours=1)


def test_filters_pages_and_counts(store, measured, device, problem):
    other_device = replace(device, sm_count=114)
    other_problem = replace(problem, vocab=32000)
    store.add_measurements(
        [
            measured(1.0),
            measured(None, status=Status.TIMEOUT),
            measured(2.0, device=other_device),
            measured(3.0, problem=other_problem),
        ]
    )
    medians = [m.median_ms for m in store.measurements()]
    assert medians == [1.0, None, 2.0, 3.0]
    first = store.measurements()[0].id
    for filters, expected in [
        ({"device": device}, [1.0, None, 3.0]),
        ({"device": other_device}, [2.0]),
        ({"device": device, "problem": problem}, [1.0, None]),
        ({"problem": other_problem}, [3.0]),
        ({"status": Status.TIMEOUT}, [None]),
        ({"status": Status.OK, "after_id": first}, [2.0, 3.0]),
        ({"device": replace(device, name="unknown")}, []),
    ]:
        assert [m.median_ms for m in store.measurements(**filters)] == expected
        assert store.count_measurements(**filters) == len(expected)
    assert [m.median_ms for m in store.measurements(after_id=first, limit=2)] == [None, 2.0]
    assert store.devices() == [device, other_device]
    assert store.problems(other_device) == [problem]
    assert store.problems() == [other_problem, problem]
    assert len(store.toolchains()) == 1


def test_memory_is_recorded_but_no_identity(store, measured, device):
    store.add_measurement(measured())
    store.add_measurement(measured(device=replace(device, memory_bytes=7)))
    assert len(store.devices()) == 1
    assert store.count_measurements(device=replace(device, memory_bytes=9)) == 2


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "cpu"},
        {"name": "other"},
        {"capability": "8.0"},
        {"sm_count": 1},
        {"shared_memory_per_block": 1},
    ],
)
def test_each_identifying_field_makes_another_device(store, measured, device: DeviceRecord, change):
    store.add_measurement(measured())
    assert store.count_measurements(device=replace(device, **change)) == 0


def test_measured_configs_are_the_latest_of_this_toolchain(
    store, measured, device, problem, toolchain
):
    a, b = {"strategy": "chunked", "chunk": 1}, {"chunk": 2, "strategy": "chunked"}
    store.add_measurements(
        [
            measured(1.0, config=a),
            measured(None, config=b),
            measured(2.0, config=a),
            measured(9.0, config=a, tokens=8192),
            measured(9.0, config=b, toolchain=replace(toolchain, kernel_hash="new")),
        ]
    )
    found = store.measured_configs(device, problem, 16384, toolchain)
    assert {key: m.median_ms for key, m in found.items()} == {
        canonical_config(a): 2.0,
        canonical_config(b): None,
    }


def test_bulk_is_all_or_nothing(store, measured):
    def broken():
        yield measured(1.0)
        raise RuntimeError("the sweep died")

    with pytest.raises(RuntimeError, match="the sweep died"):
        store.add_measurements(broken())
    assert store.measurements() == []


def test_more_than_one_batch(store, measured):
    assert store.add_measurements(measured(1.0 + i) for i in range(2500)) == 2500
    assert [m.median_ms for m in store.measurements(after_id=0)] == [1.0 + i for i in range(2500)]


def test_text_no_backend_refuses(store, measured):
    stored = store.add_measurement(measured(None, message="ptxas \0 failed \ud800 日本"))
    assert store.measurements()[0].message == stored.message == "ptxas \ufffd failed ? 日本"


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 0.0, -1.0])
def test_a_time_is_a_finite_number_above_zero(measured, bad):
    with pytest.raises(ValueError, match="finite"):
        measured(bad, samples_ms=())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0])
def test_so_is_each_sample_and_the_spread(measured, bad):
    with pytest.raises(ValueError, match="finite"):
        measured(1.0, samples_ms=(1.0, bad))
    with pytest.raises(ValueError, match="finite"):
        measured(1.0, spread_ms=bad)


@pytest.mark.parametrize(
    "fields",
    [
        {"median_ms": 1.0, "status": Status.CRASH},
        {"median_ms": None, "status": Status.OK},
        {"median_ms": None, "samples_ms": (1.0,)},
        {"errors": {"dx": math.nan}},
        {"config": {"strategy": "chunked", "scale": math.inf}},
        {"config": {"strategy": object()}},
    ],
)
def test_records_that_contradict_themselves(measured, fields):
    with pytest.raises(ValueError, match=r"status|time|errors\['dx'\]|plain JSON"):
        measured(**fields)


@pytest.mark.parametrize("value", ["'NaN'", "'Infinity'", "9e999", "-1"])
def test_not_even_plain_sql_stores_a_time_that_is_none(store, measured, value):
    store.add_measurement(measured())
    database = Database(store.url)
    if database.is_sqlite and value.startswith("'"):
        value = "9e999"  # SQLite has no NaN
    with pytest.raises(StoreError), database.writing() as session:
        session.execute(text(f"UPDATE measurement SET median_ms = {value}"))
    database.close()
    assert store.measurements()[0].median_ms == 1.5


def test_canonical_config_ignores_the_order_of_keys():
    assert canonical_config({"b": {"y": 1, "x": 2}, "a": 3}) == '{"a":3,"b":{"x":2,"y":1}}'


def test_measurements_are_values(measured):
    assert measured() == measured()
    assert isinstance(measured(), Measurement)


def test_two_stores_of_one_database_see_each_other(url, measured):
    with Store.open(url) as one, Store.open(url) as two:
        one.add_measurement(measured())
        assert two.count_measurements() == 1


def test_the_fastest_of_a_toolchain_came_through_a_final(store, measured, toolchain, device):
    newer = replace(toolchain, triton="3.9")
    raced = {"toolchain": newer, "samples_ms": (2.0, 2.0, 2.0)}
    store.add_measurement(measured(0.5))
    store.add_measurement(measured(1.0, toolchain=newer, config={"strategy": "full"}))  # once
    store.add_measurement(measured(1.5, **raced))
    slower = store.add_measurement(measured(2.0, **raced))  # again: the latest counts
    elsewhere = store.add_measurement(
        measured(9.0, toolchain=newer, device=replace(device, name="Y"))
    )
    assert store.fastest(newer) == [slower, elsewhere]
    assert store.fastest(newer, device) == [slower]
    assert store.fastest(replace(toolchain, triton="0")) == []
