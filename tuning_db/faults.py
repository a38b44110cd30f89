"""From what a database driver raises to the errors of this package, with the remedy."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import URL
from sqlalchemy import exc as sa

from flce_tune.errors import StoreCorruptError, StoreError, StoreUnavailableError

_CORRUPT = ("file is not a database", "malformed", "could not decode to utf-8")
_SCHEMA_LOST = ("no such table", "no such column", "undefinedtable", "undefinedcolumn")
_LOCKED = ("is locked", "locknotavailable")
_READ_ONLY = ("readonly database", "read-only transaction", "insufficientprivilege")
_NO_SPACE = ("disk is full", "diskfull", "disk i/o error")


def where(url: URL) -> str:
    """Name a database as its user knows it: the file, or the URL without its password."""
    if url.get_backend_name() == "sqlite":
        return str(url.database)
    return url.render_as_string(hide_password=True)


@contextmanager
def translated(url: URL) -> Iterator[None]:
    """Raise StoreError instead of what SQLAlchemy and the driver raise.

    Values the tables cannot hold (a NaN in JSON, a naive datetime) stay the caller's ValueError
    or TypeError.
    """
    try:
        yield
    except sa.DBAPIError as error:
        raise explain(url, error.orig or error) from error
    except sa.StatementError as error:
        if isinstance(error.orig, (TypeError, ValueError)):
            raise error.orig from error
        raise StoreError(f"the tuning database {where(url)} failed: {error}") from error
    except sa.TimeoutError as error:
        raise StoreUnavailableError(
            f"no connection to the tuning database {where(url)} became free: {error}"
        ) from error
    except (sqlite3.Error, OSError) as error:
        raise explain(url, error) from error


@contextmanager
def reading_rows(url: URL) -> Iterator[None]:
    """Report rows whose values make no sense as damage."""
    try:
        yield
    except (ValueError, TypeError, LookupError) as error:
        raise corrupt(url, f"a row cannot be read ({error})") from error


def explain(url: URL, error: BaseException) -> StoreError:
    """Choose the error class and write the message for what a driver or the system raised."""
    name = where(url)
    text = f"{type(error).__name__}: {error}".strip()
    lowered = text.lower()
    if any(mark in lowered for mark in _CORRUPT):
        return corrupt(url, text)
    if any(mark in lowered for mark in _SCHEMA_LOST):
        return corrupt(url, f"its tables are not those of its schema revision ({text})")
    if any(mark in lowered for mark in _LOCKED):
        return StoreUnavailableError(
            f"another process held the tuning database {name} for too long ({text}); "
            f"find the process that keeps a transaction open, then try again"
        )
    if any(mark in lowered for mark in _READ_ONLY):
        return StoreUnavailableError(
            f"the tuning database {name} cannot be written ({text}); make it and its folder "
            f"writable for this user, or point FLCE_TUNE_DB elsewhere"
        )
    if any(mark in lowered for mark in _NO_SPACE):
        return StoreUnavailableError(
            f"the tuning database {name} cannot be written ({text}); free space on its disk, "
            f"or point FLCE_TUNE_DB elsewhere"
        )
    if isinstance(error, OSError) or "unable to open database file" in lowered:
        return StoreUnavailableError(
            f"the tuning database {name} cannot be opened ({text}); check that its folder exists "
            f"and is writable for this user, or point FLCE_TUNE_DB elsewhere"
        )
    if "OperationalError" in {kind.__name__ for kind in type(error).__mro__}:
        return StoreUnavailableError(
            f"the tuning database {name} cannot be reached ({text}); check that the server runs, "
            f"that the database exists, and the user and password in FLCE_TUNE_DB"
        )
    return StoreError(f"the tuning database {name} failed: {text}")


def corrupt(url: URL, what: str) -> StoreCorruptError:
    """Say that a database is damaged, and how to set it aside."""
    name = where(url)
    if url.get_backend_name() != "sqlite":
        return StoreCorruptError(
            f"the tuning database {name} is damaged: {what}; restore it from a backup"
        )
    return StoreCorruptError(
        f"{name} is not a tuning database, or a damaged one: {what}. Nothing was changed. "
        f"To go on with a fresh one, set it aside together with its -wal and -shm files: "
        f"mv {name} {name}.damaged (likewise {name}-wal and {name}-shm where they exist). "
        f"`flce-tune db check` says what is wrong with it; a copy made by `flce-tune db backup` "
        f"can take its place"
    )
