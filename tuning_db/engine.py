"""From a URL to connections, alike on SQLite and PostgreSQL.

One writer at a time on both: a writing transaction starts with BEGIN IMMEDIATE, or with an
advisory lock. So a transaction reads what it is about to change without races, nobody
deadlocks, and ids grow in the order of commits: whoever reads "after id N" misses nothing.
Claims of jobs do without that on PostgreSQL, where rows can be locked one by one; of one job's
events the ids still grow in the order of commits. Readers never wait for a writer (WAL; MVCC).
"""

from __future__ import annotations

import functools
import json
import os
import random
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url
from sqlalchemy import exc as sa
from sqlalchemy.orm import Session
from sqlalchemy.pool import QueuePool

from flce_tune.errors import StoreUnavailableError
from flce_tune.tuning_db.faults import translated, where

WAIT_SECONDS = 60.0
"""How long a writer waits for another before StoreUnavailableError."""

_ADVISORY_LOCK = 0x666C6365  # "flce"
_WRITES = "flce_tune_writes"
_CLAIMANT = "flce_tune_claimant"
_ASK_AGAIN_S = (0.001, 0.01)

_KEPT_CONNECTIONS = 16
"""Once opened: opening and closing them under load costs time, and tears holes into the heap."""


def parse_url(url: str) -> URL:
    """Read a SQLAlchemy URL: ``sqlite:///file`` or ``postgresql://...`` (driver psycopg).

    Raises:
        StoreUnavailableError: it is none of these.
    """
    try:
        parsed = make_url(url)
    except sa.ArgumentError as error:
        raise _refused(url) from error
    backend = parsed.get_backend_name()
    if backend == "postgresql":
        return parsed.set(drivername="postgresql+psycopg")
    if backend != "sqlite" or not parsed.database or parsed.database == ":memory:":
        raise _refused(parsed.render_as_string(hide_password=True))
    path = Path(parsed.database).expanduser().absolute()
    return parsed.set(drivername="sqlite", database=str(path))


def _refused(url: str) -> StoreUnavailableError:
    return StoreUnavailableError(
        f"{url!r} names no tuning database; FLCE_TUNE_DB takes the path of a SQLite file, "
        f"sqlite:////absolute/path, or postgresql://user:password@host/database"
    )


class Database:
    """Connections to one database. Thread-safe; a forked child gets connections of its own."""

    def __init__(
        self,
        url: str,
        *,
        create: bool = True,
        read_only: bool = False,
        wait_seconds: float | None = None,
    ) -> None:
        self.url = parse_url(url)
        self.read_only = read_only
        self.path = Path(str(self.url.database)) if self.is_sqlite else None
        if self.path is not None:
            _check_file(self.path, create and not read_only, self.url)
            self._engine = _sqlite_engine(self.url, self.path, create, read_only, wait_seconds)
        else:
            self._engine = _postgresql_engine(self.url, read_only, wait_seconds)
        self._writer = self._engine.execution_options(**{_WRITES: True})
        self._pid = os.getpid()

    @property
    def is_sqlite(self) -> bool:
        """Whether this is a SQLite file."""
        return self.url.get_backend_name() == "sqlite"

    @contextmanager
    def reading(self) -> Iterator[Session]:
        """Open a session that is never committed."""
        with translated(self.url), Session(self._current(self._engine), autoflush=False) as session:
            yield session

    @contextmanager
    def writing(self) -> Iterator[Session]:
        """Open a session as the only writer; commits at the end, rolls back on an error."""
        self._refuse_if_read_only()
        with translated(self.url), Session(self._current(self._writer)) as session, session.begin():
            yield session

    @contextmanager
    def claiming(self, owner: str) -> Iterator[Session]:
        """Open a writing session for one who takes rows that nobody else has locked.

        It excludes no writers but others of this owner. SQLite, which locks no single rows, has it
        as the only writer.
        """
        self._refuse_if_read_only()
        engine = self._current(self._writer).execution_options(**{_CLAIMANT: owner})
        with translated(self.url), Session(engine) as session, session.begin():
            yield session

    @contextmanager
    def migrating(self) -> Iterator[Connection]:
        """Open a bare connection as the only writer, in one transaction."""
        self._refuse_if_read_only()
        with translated(self.url), self._current(self._writer).begin() as connection:
            yield connection

    def set_wal(self) -> None:
        """Switch a new SQLite file to write-ahead logging; the file remembers it.

        Where the file system cannot do it, SQLite keeps its rollback journal.
        """
        if self.path is None:
            return
        deadline = time.monotonic() + WAIT_SECONDS
        with translated(self.url):
            connection = connect_sqlite(self.path, "rw")
            try:
                while not _try_wal(connection, last_try=time.monotonic() > deadline):
                    time.sleep(0.02)
            finally:
                connection.close()

    def close(self) -> None:
        """Close all connections."""
        self._current(self._engine).dispose()

    def _current(self, engine: Engine) -> Engine:
        if self._pid != os.getpid():
            self._engine.dispose(close=False)  # the parent's: neither used nor closed here
            self._pid = os.getpid()
        return engine

    def _refuse_if_read_only(self) -> None:
        if self.read_only:
            raise StoreUnavailableError(f"{where(self.url)} was opened read-only")


def _wait(seconds: float | None) -> float:
    return WAIT_SECONDS if seconds is None else seconds


def _check_file(path: Path, create: bool, url: URL) -> None:
    if path.is_dir():
        raise StoreUnavailableError(
            f"{path} is a folder; FLCE_TUNE_DB must name a file, e.g. {path / 'tuning.sqlite3'}"
        )
    if create:
        with translated(url):
            path.parent.mkdir(parents=True, exist_ok=True)
    elif not path.exists():
        raise StoreUnavailableError(
            f"there is no tuning database at {path}; `flce-tune sweep` creates it, and "
            f"`flce-tune db path` says which file is used"
        )


_dumps = functools.partial(json.dumps, allow_nan=False)


def _sqlite_engine(
    url: URL, path: Path, create: bool, read_only: bool, wait_seconds: float | None
) -> Engine:
    mode = "ro" if read_only else "rwc" if create else "rw"
    engine = create_engine(
        url,
        creator=lambda: connect_sqlite(path, mode, wait_seconds),
        poolclass=QueuePool,
        pool_size=_KEPT_CONNECTIONS,
        max_overflow=-1,  # a connection is a file handle; threads wait for the lock, not for one
        json_serializer=_dumps,
    )

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        driver = connection.connection.driver_connection
        assert isinstance(driver, sqlite3.Connection)
        if connection.get_execution_options().get(_WRITES, False):
            _begin_writing(driver, _wait(wait_seconds))
        else:
            driver.execute("BEGIN")

    return engine


def _begin_writing(connection: sqlite3.Connection, seconds: float) -> None:
    """Wait for the write lock by asking again and again, at random moments.

    SQLite's own wait asks ever more seldom: with many writers, whoever came first gets it last, or
    not in time at all.
    """
    deadline = time.monotonic() + seconds
    connection.execute("PRAGMA busy_timeout = 0")
    try:
        while True:
            try:
                connection.execute("BEGIN IMMEDIATE")
                return
            except sqlite3.OperationalError as error:
                if "locked" not in str(error) or time.monotonic() > deadline:
                    raise
            time.sleep(random.uniform(*_ASK_AGAIN_S))
    finally:
        connection.execute(f"PRAGMA busy_timeout = {int(seconds * 1000)}")


def connect_sqlite(path: Path, mode: str, wait_seconds: float | None = None) -> sqlite3.Connection:
    """Open a SQLite file; ``mode`` is ro, rw or rwc (create), as in its URI."""
    query = f"mode={mode}"
    if mode == "ro" and _is_at_rest_in_a_read_only_folder(path):
        query = "immutable=1"
    connection = sqlite3.connect(
        f"{path.as_uri()}?{query}",
        uri=True,
        timeout=_wait(wait_seconds),
        isolation_level=None,  # the "begin" event says which BEGIN
        check_same_thread=False,  # the pool lends a connection to one thread at a time
    )
    try:
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("PRAGMA synchronous = NORMAL")  # with WAL: safe against a killed process
    except sqlite3.Error:
        connection.close()
        raise
    return connection


def _is_at_rest_in_a_read_only_folder(path: Path) -> bool:
    """Whether SQLite cannot make the -shm file it wants, and nobody is writing either."""
    return not os.access(path.parent, os.W_OK) and not Path(f"{path}-wal").exists()


def _try_wal(connection: sqlite3.Connection, *, last_try: bool) -> bool:
    try:
        connection.execute("PRAGMA journal_mode = WAL").fetchone()
    except sqlite3.OperationalError as error:
        # The busy timeout does not cover this switch.
        if "locked" not in str(error) or last_try:
            raise
        return False
    return True


def _postgresql_engine(url: URL, read_only: bool, wait_seconds: float | None) -> Engine:
    try:
        engine = create_engine(
            url,
            pool_size=_KEPT_CONNECTIONS,
            max_overflow=0,
            pool_pre_ping=True,
            connect_args={"connect_timeout": 10},
            json_serializer=_dumps,
        )
    except ModuleNotFoundError as error:
        raise StoreUnavailableError(
            "a PostgreSQL tuning database needs psycopg: pip install 'flce-tune[postgres]'"
        ) from error

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        options = connection.get_execution_options()
        if options.get(_WRITES, False):
            wait_ms = int(_wait(wait_seconds) * 1000)
            connection.exec_driver_sql(f"SET LOCAL lock_timeout = {wait_ms}")
            owner = options.get(_CLAIMANT)
            if owner is None:
                connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_ADVISORY_LOCK})")
            else:
                lock = f"SELECT pg_advisory_xact_lock({_ADVISORY_LOCK}, hashtext(%s))"
                connection.exec_driver_sql(lock, (owner,))
        elif read_only:
            connection.exec_driver_sql("SET TRANSACTION READ ONLY")

    return engine
