"""Fixtures: databases of a test's own, on SQLite and on PostgreSQL."""

import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.exc import OperationalError

from flce_tune.tuning_db.store import Store


def _postgres_server() -> str:
    url = os.environ.get("FLCE_TUNE_TEST_POSTGRES", "postgresql://postgres@127.0.0.1:5432/test")
    return url.replace("postgresql://", "postgresql+psycopg://", 1)


@pytest.fixture(scope="session")
def postgres() -> str:
    """URL of a PostgreSQL database in which schemas may be created; skips without one."""
    pytest.importorskip("psycopg")
    server = _postgres_server()
    engine = create_engine(server, connect_args={"connect_timeout": 3})
    try:
        engine.connect().close()
    except OperationalError as error:
        pytest.skip(f"no PostgreSQL answers (FLCE_TUNE_TEST_POSTGRES): {error}")
    finally:
        engine.dispose()
    return server


@pytest.fixture
def postgres_url(postgres: str) -> Iterator[str]:
    """URL of an empty schema of its own."""
    schema = f"flce_{uuid.uuid4().hex}"
    engine = create_engine(postgres)
    with engine.begin() as connection:
        connection.execute(text(f"CREATE SCHEMA {schema}"))
    yield f"{postgres}{'&' if '?' in postgres else '?'}options=-csearch_path%3D{schema}"
    with engine.begin() as connection:
        connection.execute(text(f"DROP SCHEMA {schema} CASCADE"))
    engine.dispose()


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """URL of a database that does not exist yet (PostgreSQL: of an empty schema)."""
    if request.param == "postgresql":
        return request.getfixturevalue("postgres_url")
    return f"sqlite:///{tmp_path / 'new' / 'tuning.sqlite3'}"


@pytest.fixture(scope="session")
def _empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("database") / "empty.sqlite3"
    Store.open(f"sqlite:///{path}").close()
    return path


@pytest.fixture
def open_new(_empty_database: Path) -> Callable[[Path], Store]:
    """Open a new SQLite database at a path; its tables are copied, not made by Alembic."""

    def open_it(path: Path) -> Store:
        shutil.copyfile(_empty_database, path)
        return Store.open(f"sqlite:///{path}", create=False)

    return open_it
