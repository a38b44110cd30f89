from dataclasses import replace
from datetime import datetime, timedelta, timezone

import pytest

from flce_tune.tuning_db.records import Status, Winner
from flce_tune.tuning_db.store import Store

NOW = datetime.now(timezone.utc)
LONG_AGO = NOW - timedelta(days=100)
MONTH = timedelta(days=30)


@pytest.fixture
def stored(store, measured, device, problem, toolchain):
    """Name of each stored measurement by id."""
    old_tools = replace(toolchain, kernel_hash="old")
    kinds = {
        "winner": measured(1.0, created_at=LONG_AGO),
        "loser": measured(2.0, created_at=LONG_AGO),
        "young loser": measured(2.0, created_at=NOW),
        "failure": measured(None, created_at=LONG_AGO),
        "abandoned": measured(3.0, created_at=LONG_AGO, toolchain=old_tools),
        "abandoned failure": measured(None, created_at=LONG_AGO, toolchain=old_tools),
        "unfinished": measured(3.0, created_at=NOW, toolchain=old_tools),
    }
    added = {name: store.add_measurement(one) for name, one in kinds.items()}
    store.set_winners(device, problem, [Winner(added["winner"])])
    return {one.id: name for name, one in added.items()}


def left(store, stored):
    return {stored[one.id] for one in store.measurements()}


def counts(report):
    return report.abandoned, report.old, report.kept


def test_what_no_winners_toolchain_measured_goes_after_a_day(store, stored):
    assert counts(store.trim()) == (2, 0, 5)
    assert left(store, stored) == {"winner", "loser", "young loser", "failure", "unfinished"}


def test_old_timings_go_but_neither_winners_nor_failures(store, stored):
    assert counts(store.trim(older_than=MONTH)) == (2, 1, 4)
    assert left(store, stored) == {"winner", "young loser", "failure", "unfinished"}
    assert [w.measurement.median_ms for w in store.winners()] == [1.0]
    assert counts(store.trim(older_than=MONTH)) == (0, 0, 4)


def test_a_toolchain_in_use_counts_as_one_with_winners(store, stored, toolchain):
    in_use = [replace(toolchain, kernel_hash="old"), replace(toolchain, kernel_hash="unknown")]
    assert counts(store.trim(in_use=in_use)) == (0, 0, 7)
    assert counts(store.trim(in_use=in_use, older_than=MONTH)) == (0, 2, 5)
    assert "abandoned failure" in left(store, stored)


def test_a_toolchain_nobody_has_measured_with_protects_nothing(store, stored, toolchain):
    assert counts(store.trim(in_use=[replace(toolchain, torch="99")])) == (2, 0, 5)


def test_a_dry_run_counts_and_deletes_nothing(url, store, stored):
    with Store.open(url, read_only=True) as reader:
        assert counts(reader.trim(older_than=MONTH, dry_run=True)) == (2, 1, 4)
    assert left(store, stored) == {*stored.values()}


def test_failures_are_still_known_afterwards(store, stored, device, problem, toolchain):
    store.trim(older_than=timedelta(0))
    known = store.measured_configs(device, problem, 16384, toolchain)
    assert Status.CRASH in {one.status for one in store.measurements()}
    assert known
