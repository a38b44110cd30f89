"""Many processes on one database that is not there yet."""

import multiprocessing
import os
import sqlite3
import threading
import time
from collections import Counter
from datetime import datetime, timezone

import pytest

from flce_tune.errors import StoreUnavailableError
from flce_tune.tuning_db import engine, measurements
from flce_tune.tuning_db.records import Miss, Winner
from flce_tune.tuning_db.store import Store

FORK = multiprocessing.get_context("fork")
PROCESSES = 16
ROWS = 25
HELD_SECONDS = 1.0


def run_all(target, arguments):
    """Run each in a process of its own; returns what each put into its pipe."""
    started = []
    for argument in arguments:
        ours, theirs = FORK.Pipe(duplex=False)
        process = FORK.Process(target=report, args=(theirs, target, argument), daemon=True)
        process.start()
        theirs.close()
        started.append((process, ours))
    results = [pipe.recv() for _, pipe in started]
    for process, _ in started:
        process.join(60)
    return results


def report(pipe, target, argument):
    try:
        pipe.send(target(argument))
    except BaseException as error:  # noqa: BLE001 - the parent fails the test with it
        pipe.send(f"{type(error).__name__}: {error}")


def test_sixteen_processes_start_at_once_on_nothing(url, measured, device, problem):
    together = FORK.Barrier(PROCESSES + 2)
    done = FORK.Event()

    def write(number):
        together.wait(60)
        with Store.open(url) as store:
            for row in range(ROWS):
                stored = store.add_measurement(measured(1.0 + row, message=f"{number}/{row}"))
            store.note_misses([])
            store.set_winners(device, problem, [Winner(stored)])
            return store.count_measurements() >= ROWS

    def hold(_):
        together.wait(60)
        with Store.open(url) as store, store._database.writing() as session:
            session.connection()
            time.sleep(HELD_SECONDS)
            return True

    def read(_):
        together.wait(60)
        seen = [0]
        with Store.open(url) as store:
            while not done.is_set():
                seen.append(store.count_measurements())
                store.winners(device=device, problem=problem)
        return seen == sorted(seen)

    roles = [(write, n) for n in range(PROCESSES)] + [(hold, None)]
    reader = FORK.Pipe(duplex=False)
    reading = FORK.Process(target=report, args=(reader[1], read, None), daemon=True)
    reading.start()
    try:
        results = run_all(lambda role: role[0](role[1]), roles)
    finally:
        done.set()
    assert reader[0].recv() is True
    reading.join(60)
    assert results == [True] * (PROCESSES + 1)
    with Store.open(url) as store:
        counts = Counter(m.message for m in store.measurements())
        assert counts == {f"{n}/{r}": 1 for n in range(PROCESSES) for r in range(ROWS)}
        assert len(store.winners()) == len(store.devices()) == len(store.problems()) == 1


def test_many_processes_create_the_same_database(url):
    for _ in range(3 if url.startswith("sqlite") else 1):
        together = FORK.Barrier(PROCESSES)

        def create(_, together=together):
            together.wait(60)
            with Store.open(url) as store:
                return store.count_measurements()

        assert run_all(create, range(PROCESSES)) == [0] * PROCESSES
        if url.startswith("sqlite"):
            os.remove(url.removeprefix("sqlite:///"))


def test_concurrent_misses_add_up(url, device, problem):
    miss = Miss(device, problem, 1, 1, datetime.now(timezone.utc))

    def note(_):
        with Store.open(url) as store:
            for _ in range(10):
                store.note_misses([miss])

    run_all(note, range(4))
    with Store.open(url) as store:
        assert [m.count for m in store.misses()] == [40]


def test_many_threads_share_one_store(store, measured):
    threads = [
        threading.Thread(target=lambda: [store.add_measurement(measured()) for _ in range(5)])
        for _ in range(24)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.count_measurements() == 120


def test_readers_answer_while_another_writes(store, measured):
    store.add_measurement(measured(1.0))
    with Store.open(store.url) as other, store._database.writing() as session:
        session.connection()
        assert [m.median_ms for m in other.measurements()] == [1.0]
        with Store.open(store.url, create=False, read_only=True) as third:
            assert third.count_measurements() == 1


def test_a_writer_that_never_ends_is_not_waited_for_forever(store, measured, monkeypatch):
    monkeypatch.setattr(engine, "WAIT_SECONDS", 0.1)
    with Store.open(store.url) as other, store._database.writing() as session:
        session.connection()
        with pytest.raises(StoreUnavailableError, match="another process held") as caught:
            other.add_measurement(measured())
    assert "keeps a transaction open" in str(caught.value)


def test_a_forked_child_uses_connections_of_its_own(store, measured):
    store.add_measurement(measured())

    def child(_):
        store.add_measurement(measured())
        return store.count_measurements() >= 2

    assert run_all(child, range(3)) == [True] * 3
    store.add_measurement(measured())
    assert store.count_measurements() == 5


def test_killed_in_the_middle_of_a_write(url, measured):
    """A process that dies with its transaction open loses that transaction alone."""
    with Store.open(url) as store:
        store.add_measurement(measured(1.0))

    def die(_):
        with Store.open(url) as own, own._database.writing() as session:
            session.connection()
            measurements.add(session, measured(2.0))
            os._exit(9)

    process = FORK.Process(target=die, args=(None,))
    process.start()
    process.join(60)
    assert process.exitcode == 9
    with Store.open(url) as store:
        store.add_measurement(measured(3.0))
        assert [m.median_ms for m in store.measurements()] == [1.0, 3.0]


def test_write_ahead_logging_is_set_at_creation_only(sqlite_path):
    Store.open(f"sqlite:///{sqlite_path}").close()
    connection = sqlite3.connect(sqlite_path)
    assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    connection.execute("PRAGMA journal_mode = DELETE")
    Store.open(f"sqlite:///{sqlite_path}").close()
    assert connection.execute("PRAGMA journal_mode").fetchone() == ("delete",)
    connection.close()


def test_a_new_file_that_somebody_has_locked_is_waited_for(sqlite_path):
    """SQLite's own busy timeout does not cover the switch to write-ahead logging."""
    other = sqlite3.connect(sqlite_path, isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    release = threading.Timer(0.5, other.rollback)
    release.start()
    with Store.open(f"sqlite:///{sqlite_path}") as store:
        assert store.count_measurements() == 0
    release.join()
    assert other.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    other.close()


def test_a_new_file_that_stays_locked(sqlite_path, monkeypatch):
    monkeypatch.setattr(engine, "WAIT_SECONDS", 0.1)
    other = sqlite3.connect(sqlite_path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreUnavailableError, match="another process held"):
        Store.open(f"sqlite:///{sqlite_path}")
    other.close()
