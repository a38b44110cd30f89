"""Files that are no database, or no longer one: a clear error, and not a byte changed."""

import multiprocessing
import os
import random
import re
import shutil
import sqlite3
import tempfile
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text

from flce_tune.errors import (
    SchemaMismatchError,
    StoreCorruptError,
    StoreError,
    StoreUnavailableError,
)
from flce_tune.tuning_db import migrations
from flce_tune.tuning_db.maintenance import backup, check_integrity
from flce_tune.tuning_db.records import Winner
from flce_tune.tuning_db.store import Store


@pytest.fixture
def sqlite_url(sqlite_path):
    return f"sqlite:///{sqlite_path}"


@pytest.fixture
def filled(sqlite_path, sqlite_url, measured, device, problem):
    """A database of some hundred KiB, at rest."""
    with Store.open(sqlite_url) as store:
        for n in range(4):
            store.add_measurements(measured(1.0 + i, message="m" * 200) for i in range(100))
            store.add_event(store.submit_job({"n": n}).id, "log", {"text": "x" * 500})
        store.set_winners(device, problem, [Winner(store.measurements()[0])])
    return sqlite_path


def read_everything(url):
    with Store.open(url) as store:
        store.measurements()
        store.winners()
        store.misses()
        for job in store.jobs():
            store.events(job.id)


def snapshot(path):
    return {file.name: file.read_bytes() for file in path.parent.iterdir() if file.is_file()}


def assert_says_what_to_do(error: StoreError, path: Path):
    assert str(path) in str(error)
    assert f"mv {path}" in str(error)


def test_an_empty_file_is_a_new_database(sqlite_path, sqlite_url):
    sqlite_path.touch()
    with pytest.raises(SchemaMismatchError, match="flce-tune db upgrade"):
        Store.open(sqlite_url, create=False)
    assert sqlite_path.read_bytes() == b""
    with Store.open(sqlite_url) as store:
        assert store.measurements() == []


@pytest.mark.parametrize("create", [True, False])
@pytest.mark.parametrize(
    "content",
    [
        b"{}",
        b"not a database\n" * 1000,
        b"SQLite format 3\0",
        random.Random(1).randbytes(8192),
        b'{"schema": "flce-tune/1", "dev',
    ],
)
def test_a_file_of_something_else(sqlite_path, sqlite_url, content, create):
    sqlite_path.write_bytes(content)
    with pytest.raises(StoreCorruptError) as caught:
        Store.open(sqlite_url, create=create)
    assert_says_what_to_do(caught.value, sqlite_path)
    assert snapshot(sqlite_path) == {sqlite_path.name: content}


@pytest.mark.parametrize("size", [50, 100, 4096, 0.3, 0.9])
def test_a_truncated_file(filled, sqlite_url, size):
    size = size if size > 1 else int(filled.stat().st_size * size)
    with filled.open("r+b") as file:
        file.truncate(size)
    before = filled.read_bytes()
    with pytest.raises(StoreCorruptError) as caught:
        read_everything(sqlite_url)
    assert_says_what_to_do(caught.value, filled)
    assert filled.read_bytes() == before
    assert check_integrity(sqlite_url) != []


def test_every_page_in_turn_turned_to_noise(filled, sqlite_url, tmp_path):
    """Reading gives rows or StoreError, never another exception; the check finds it."""
    noise = random.Random(0)
    pages = filled.stat().st_size // 4096
    assert pages > 20
    sound = filled.read_bytes()
    for page in noise.sample(range(pages), 25):
        damaged = bytearray(sound)
        damaged[page * 4096 : (page + 1) * 4096] = noise.randbytes(4096)
        filled.write_bytes(damaged)
        try:
            read_everything(sqlite_url)
        except StoreError as error:
            assert str(filled) in str(error)  # noqa: PT017
        assert check_integrity(sqlite_url) != [], f"page {page}"
        assert filled.read_bytes() == damaged


def test_values_that_make_no_sense(filled, sqlite_url):
    connection = sqlite3.connect(filled)
    connection.execute("UPDATE measurement SET config = '{cut' WHERE id = 7")
    connection.commit()
    connection.close()
    with Store.open(sqlite_url) as store:
        assert store.winners() != []
        with pytest.raises(StoreCorruptError, match="row cannot be read") as caught:
            store.measurements()
    assert_says_what_to_do(caught.value, filled)
    assert len(check_integrity(sqlite_url)) == 1


def test_rows_whose_parents_are_gone(filled, sqlite_url):
    connection = sqlite3.connect(filled)
    connection.execute("DELETE FROM measurement WHERE id = 1")
    connection.commit()
    connection.close()
    assert check_integrity(sqlite_url) == ["winner row 1 refers to a missing row of measurement"]


def test_a_table_is_gone(filled, sqlite_url):
    connection = sqlite3.connect(filled)
    connection.execute("DROP TABLE winner")
    connection.close()
    with Store.open(sqlite_url) as store, pytest.raises(StoreCorruptError, match="no such table"):
        store.winners()


def test_a_folder_in_its_place(sqlite_path, sqlite_url):
    sqlite_path.mkdir()
    with pytest.raises(StoreUnavailableError, match=re.escape(f"{sqlite_path} is a folder")):
        Store.open(sqlite_url)
    assert list(sqlite_path.iterdir()) == []


def test_a_file_where_a_folder_should_be(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreUnavailableError, match="FLCE_TUNE_DB elsewhere"):
        Store.open(f"sqlite:///{tmp_path}/file/tuning.sqlite3")


def test_missing(sqlite_path, sqlite_url):
    for options in ({"create": False}, {"read_only": True}):
        with pytest.raises(StoreUnavailableError, match=r"no tuning database at .*flce-tune sweep"):
            Store.open(sqlite_url, **options)
    assert not sqlite_path.exists()


@pytest.mark.parametrize(
    "url", ["", "tuning.sqlite3", "sqlite://", "sqlite:///:memory:", "mysql://host/db"]
)
def test_urls_of_nothing_we_know(url):
    with pytest.raises(StoreUnavailableError, match="names no tuning database"):
        Store.open(url)


def test_a_database_of_something_else(sqlite_path, sqlite_url):
    connection = sqlite3.connect(sqlite_path)
    connection.execute("CREATE TABLE trials (id INTEGER)")
    connection.close()
    before = sqlite_path.read_bytes()
    with pytest.raises(SchemaMismatchError, match=r"something else \(trials\)"):
        Store.open(sqlite_url)
    with pytest.raises(SchemaMismatchError, match="something else"):
        migrations.upgrade(sqlite_url)
    assert sqlite_path.read_bytes() == before


def test_what_a_killed_process_leaves_is_read(filled, sqlite_url, measured, tmp_path):
    """Its -wal holds the last rows: they are there for readers, and nothing needs repair."""
    with Store.open(sqlite_url) as store:
        store.add_measurement(measured(7.0))
        left = tmp_path / "left"
        left.mkdir()
        for file in (filled, Path(f"{filled}-wal")):
            shutil.copy(file, left)
    url = f"sqlite:///{left / filled.name}"
    for options in ({"read_only": True}, {}):
        with Store.open(url, **options) as store:
            assert store.measurements()[-1].median_ms == 7.0


def test_a_foreign_wal_beside_the_file(filled, sqlite_url):
    Path(f"{filled}-wal").write_bytes(b"garbage" * 1000)
    with Store.open(sqlite_url) as store:
        assert store.count_measurements() == 400


def test_read_only_never_writes(filled, sqlite_url, measured):
    with Store.open(sqlite_url, read_only=True) as store:
        assert store.count_measurements() == 400
        with pytest.raises(StoreUnavailableError, match="read-only"):
            store.add_measurement(measured())


def test_backup_is_a_whole_database(filled, sqlite_url, measured, tmp_path):
    with Store.open(sqlite_url) as store:
        store.add_measurement(measured(7.0))  # still in the -wal
        backup(sqlite_url, tmp_path / "copy.sqlite3")
    copy = f"sqlite:///{tmp_path / 'copy.sqlite3'}"
    assert check_integrity(copy) == []
    with Store.open(copy) as store:
        assert store.count_measurements() == 401
    with pytest.raises(StoreUnavailableError, match="exists already"):
        backup(sqlite_url, tmp_path / "copy.sqlite3")
    with pytest.raises(StoreUnavailableError, match="cannot be opened"):
        backup(sqlite_url, tmp_path / "nowhere" / "copy.sqlite3")


def test_postgresql_is_copied_by_its_own_tool(postgres_url, tmp_path):
    Store.open(postgres_url).close()
    with pytest.raises(StoreError, match="pg_dump"):
        backup(postgres_url, tmp_path / "copy")
    assert check_integrity(postgres_url) == []


def test_postgresql_that_is_not_there():
    with pytest.raises(StoreUnavailableError, match="cannot be reached") as caught:
        Store.open("postgresql://me:secret@127.0.0.1:1/tuning")
    assert "secret" not in str(caught.value)


def test_somebody_elses_tables_on_postgresql(postgres_url):
    engine = create_engine(postgres_url)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE job (id INTEGER)"))
    engine.dispose()
    with pytest.raises(SchemaMismatchError, match=r"something else \(job\)"):
        Store.open(postgres_url)


# Permissions do not bind root: these run in a child that gives its rights up.


@pytest.fixture
def public_folder():
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


def as_nobody(action):
    def child(pipe):
        if os.geteuid() == 0:
            os.setgid(65534)
            os.setuid(65534)
        try:
            pipe.send(action())
        except StoreError as error:
            pipe.send(error)

    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=child, args=(theirs,))
    process.start()
    theirs.close()
    result = ours.recv()
    process.join(60)
    return result


def test_a_folder_that_may_not_be_written(public_folder):
    os.chmod(public_folder, 0o555)
    for place in ("tuning.sqlite3", "deeper/tuning.sqlite3"):
        url = f"sqlite:///{public_folder}/{place}"
        error = as_nobody(lambda url=url: Store.open(url).url)
        assert type(error) is StoreUnavailableError
        assert "writable for this user" in str(error)
        assert str(public_folder) in str(error)
    assert list(public_folder.iterdir()) == []


def test_a_database_that_may_only_be_read(public_folder, measured):
    path = public_folder / "tuning.sqlite3"
    url = f"sqlite:///{path}"
    with Store.open(url) as store:
        store.add_measurement(measured(3.0))
    os.chmod(path, 0o444)
    os.chmod(public_folder, 0o555)

    def read():
        with Store.open(url, read_only=True) as store:
            return [m.median_ms for m in store.measurements()]

    def write():
        with Store.open(url) as store:
            return store.add_measurement(measured())

    assert as_nobody(read) == [3.0]
    error = as_nobody(write)
    assert type(error) is StoreUnavailableError
    assert "FLCE_TUNE_DB elsewhere" in str(error)
