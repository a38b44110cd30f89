"""Checking and copying a whole database."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import select, text
from sqlalchemy.orm import Session

from flce_tune.errors import StoreCorruptError, StoreError, StoreUnavailableError
from flce_tune.tuning_db import rows
from flce_tune.tuning_db.engine import Database, connect_sqlite
from flce_tune.tuning_db.faults import reading_rows, translated, where
from flce_tune.tuning_db.migrations import ensure_head
from flce_tune.tuning_db.models import (
    Base,
    JobEventRow,
    JobRow,
    MeasurementRow,
    MissRow,
    TokenRow,
    WinnerRow,
)

_READERS: tuple[tuple[type[Base], Callable[[Any], object]], ...] = (
    (MeasurementRow, rows.measurement_record),
    (WinnerRow, rows.winner_record),
    (MissRow, rows.miss_record),
    (JobRow, rows.job_record),
    (JobEventRow, rows.event_record),
    (TokenRow, rows.token_record),
)


def check_integrity(url: str) -> list[str]:
    """Look for damage: SQLite's own checks, then every row is read.

    Returns:
        What is wrong, one line each; empty if all is well.

    Raises:
        StoreUnavailableError, SchemaMismatchError: it cannot be checked.
    """
    try:
        with _opened(url) as database:
            ensure_head(database, create=False)
            with database.reading() as session:
                found = _sqlite_problems(session) if database.is_sqlite else []
                with reading_rows(database.url):
                    for row, record in _READERS:
                        for one in session.scalars(select(row).execution_options(yield_per=1000)):
                            record(one)
            return found
    except StoreCorruptError as error:
        return [str(error)]


def backup(url: str, path: Path) -> None:
    """Copy a SQLite database to a new file while others go on using it.

    Raises:
        StoreUnavailableError: ``path`` exists or cannot be written, or the database cannot be
            read.
        StoreError: it is a PostgreSQL database, which pg_dump copies.
    """
    with _opened(url) as database:
        if database.path is None:
            raise StoreError(
                f"{where(database.url)} is a PostgreSQL database; copy it with "
                f"pg_dump --format=custom --file={path} <database>"
            )
        if path.exists():
            raise StoreUnavailableError(f"{path} exists already; name a new file for the copy")
        partial = path.with_name(path.name + ".partial")
        try:
            with (
                translated(database.url),
                closing(connect_sqlite(database.path, "ro")) as source,
                closing(sqlite3.connect(partial)) as copy,
            ):
                source.backup(copy)
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)


def _sqlite_problems(session: Session) -> list[str]:
    found = [str(line) for line in session.scalars(text("PRAGMA integrity_check"))]
    orphans = session.execute(text("PRAGMA foreign_key_check")).all()
    return [line for line in found if line != "ok"] + [
        f"{orphan.table} row {orphan.rowid} refers to a missing row of {orphan.parent}"
        for orphan in orphans
    ]


@contextmanager
def _opened(url: str) -> Iterator[Database]:
    database = Database(url, create=False, read_only=True)
    try:
        yield database
    finally:
        database.close()
