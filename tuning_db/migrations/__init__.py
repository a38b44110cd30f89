"""The schema's revisions, and how a database gets to the newest.

A new revision: change ``models.py``, then ``alembic -c tuning_db/migrations/alembic.ini -x
url=sqlite:///old.sqlite3 revision --autogenerate -m "..."`` against a database of the revision
before, read what it wrote, and set ``HEAD``.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, column, inspect, select, table

from flce_tune.errors import SchemaMismatchError
from flce_tune.tuning_db.engine import Database
from flce_tune.tuning_db.faults import where
from flce_tune.tuning_db.models import Base

if TYPE_CHECKING:
    from alembic.config import Config

HEAD = "0004"
"""The newest revision, so that opening a database need not load Alembic."""

SCRIPTS = Path(__file__).parent
VERSION_TABLE = "flce_tune_revision"

_alembic = threading.Lock()  # Alembic keeps the migration it runs in module globals


def head() -> str:
    """Say the revision this version of flce-tune reads and writes."""
    return HEAD


def current(url: str) -> str | None:
    """Say the revision of a database; None if it has no schema yet.

    Raises:
        StoreUnavailableError, StoreCorruptError: it cannot be read.
    """
    database = Database(url, create=False)
    try:
        with database.reading() as session:
            return revision(session.connection())
    finally:
        database.close()


def upgrade(url: str) -> str:
    """Bring a database to the newest revision, creating it if need be; returns that revision.

    Raises:
        StoreUnavailableError, StoreCorruptError: it cannot be opened or written.
        SchemaMismatchError: it is newer than this version, or holds somebody else's tables.
    """
    database = Database(url)
    try:
        migrate(database)
    finally:
        database.close()
    return HEAD


def ensure_head(database: Database, *, create: bool) -> None:
    """Check that the schema is this version's; ``create`` makes one where there is none.

    Raises:
        SchemaMismatchError: the schema is older, newer, missing, or somebody else's.
    """
    with database.reading() as session:
        found = revision(session.connection())
    if found == HEAD:
        return
    if found is None and create:
        migrate(database)
        return
    name = where(database.url)
    if found is None:
        raise SchemaMismatchError(
            f"{name} holds no tuning database yet; `flce-tune db upgrade` creates its tables"
        )
    _refuse_unknown(found, name)
    raise SchemaMismatchError(
        f"{name} has schema revision {found}, this flce-tune needs {HEAD}; make a copy with "
        f"`flce-tune db backup`, then run `flce-tune db upgrade`"
    )


def migrate(database: Database) -> None:
    """Run what is missing up to ``HEAD`` in one transaction; any number of processes may."""
    with database.reading() as session:
        found = revision(session.connection())
        if found is None:
            _refuse_foreign(session.connection(), database)
    if found is None:
        database.set_wal()
    with database.migrating() as connection:
        found = revision(connection)  # another process may have been first
        if found == HEAD:
            return
        if found is None:
            _refuse_foreign(connection, database)
        else:
            _refuse_unknown(found, where(database.url))
        _run(connection)


def revision(connection: Connection) -> str | None:
    """Read the revision a database is at."""
    if not inspect(connection).has_table(VERSION_TABLE):
        return None
    number: Any = column("version_num")
    return connection.scalars(select(number).select_from(table(VERSION_TABLE))).one_or_none()


def _refuse_foreign(connection: Connection, database: Database) -> None:
    tables = set(inspect(connection).get_table_names())
    ours = tables & set(Base.metadata.tables)
    if not ours and not (database.is_sqlite and tables):
        return
    # Read again: another process may have made the tables since the caller looked.
    if revision(connection) is None:
        raise SchemaMismatchError(
            f"{where(database.url)} holds tables of something else ({', '.join(sorted(tables))}); "
            f"give flce-tune a file, a PostgreSQL database or a schema of its own in FLCE_TUNE_DB"
        )


def _refuse_unknown(found: str, name: str) -> None:
    from alembic.script import ScriptDirectory

    known = {script.revision for script in ScriptDirectory(str(SCRIPTS)).walk_revisions()}
    if found not in known:
        raise SchemaMismatchError(
            f"{name} has schema revision {found}, which this flce-tune does not know (its newest "
            f"is {HEAD}): a newer version wrote it. Upgrade with `pip install -U flce-tune`, or "
            f"point FLCE_TUNE_DB elsewhere"
        )


def _run(connection: Connection) -> None:
    from alembic import command

    config = alembic_config()
    config.attributes["connection"] = connection
    with _alembic:
        command.upgrade(config, "head")


def alembic_config() -> Config:
    """Build the Alembic configuration; no ini file is needed."""
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(SCRIPTS).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    return config
