import contextlib
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import CheckConstraint, inspect

from flce_tune.errors import SchemaMismatchError
from flce_tune.tuning_db import migrations
from flce_tune.tuning_db.engine import Database
from flce_tune.tuning_db.maintenance import check_integrity
from flce_tune.tuning_db.models import Base
from flce_tune.tuning_db.store import Store

NEXT = '''"""Add a column."""

import sqlalchemy as sa
from alembic import op

revision = "9999"
down_revision = "HEAD"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("measurement", sa.Column("power_watts", sa.Integer()))
'''


@pytest.fixture
def next_version(monkeypatch, tmp_path):
    """Call it to be the version after this one, which has one revision more."""
    scripts = tmp_path / "next%version" / "migrations"
    shutil.copytree(migrations.SCRIPTS, scripts, ignore=shutil.ignore_patterns("__pycache__"))
    (scripts / "versions" / "9999_next.py").write_text(NEXT.replace("HEAD", migrations.HEAD))

    def become_next() -> None:
        monkeypatch.setattr(migrations, "SCRIPTS", scripts)
        monkeypatch.setattr(migrations, "HEAD", "9999")

    return become_next


def test_the_revisions_make_what_the_models_say(url):
    assert migrations.upgrade(url) == migrations.head()
    assert migrations.current(url) == migrations.head()
    database = Database(url)
    with database.reading() as session:
        connection = session.connection()
        options = {"version_table": migrations.VERSION_TABLE, "compare_server_default": True}
        context = MigrationContext.configure(connection, opts=options)
        assert compare_metadata(context, Base.metadata) == []
        for table in Base.metadata.tables.values():
            checks = {str(c["name"]) for c in inspect(connection).get_check_constraints(table.name)}
            expected = {str(c.name) for c in table.constraints if isinstance(c, CheckConstraint)}
            assert checks == expected
    database.close()


def test_head_is_the_newest_script():
    scripts = ScriptDirectory(str(migrations.SCRIPTS))
    assert scripts.get_heads() == [migrations.HEAD]


def test_upgrading_again_changes_nothing(url, measured):
    with Store.open(url) as store:
        stored = store.add_measurement(measured())
    migrations.upgrade(url)
    with Store.open(url) as store:
        assert store.measurements() == [stored]


def test_another_process_makes_the_tables_between_two_looks(url, monkeypatch):
    Store.open(url).close()
    look, looks = migrations.revision, []

    def late(connection):
        looks.append(look(connection))
        return None if len(looks) == 1 else looks[-1]

    monkeypatch.setattr(migrations, "revision", late)
    assert migrations.upgrade(url) == migrations.head()
    assert len(looks) > 1


def test_nothing_there_yet(url):
    if url.startswith("sqlite"):
        Path(url.removeprefix("sqlite:///")).parent.mkdir()
        Path(url.removeprefix("sqlite:///")).touch()
    assert migrations.current(url) is None
    with pytest.raises(SchemaMismatchError, match=r"no tuning database yet.*flce-tune db upgrade"):
        Store.open(url, create=False)


def test_an_older_database_waits_for_its_owner_and_keeps_its_rows(url, measured, next_version):
    with Store.open(url) as store:
        store.add_measurement(measured(3.0))
    before = migrations.HEAD
    next_version()
    for create in (True, False):
        with pytest.raises(
            SchemaMismatchError, match=rf"revision {before}.*needs 9999.*db upgrade"
        ):
            Store.open(url, create=create)
    assert migrations.current(url) == before
    assert migrations.upgrade(url) == "9999"
    with Store.open(url) as store:
        assert [m.median_ms for m in store.measurements()] == [3.0]
        store.add_measurement(measured())


def test_a_database_of_the_first_revision_is_brought_up_with_all_its_rows(sqlite_path):
    with contextlib.closing(sqlite3.connect(sqlite_path)) as connection:
        connection.executescript((Path(__file__).parent / "revisions" / "0001.sql").read_text())
    url = f"sqlite:///{sqlite_path}"
    with pytest.raises(SchemaMismatchError, match="revision 0001"):
        Store.open(url)
    assert migrations.upgrade(url) == migrations.HEAD
    assert check_integrity(url) == []
    with Store.open(url) as store:
        assert [m.median_ms for m in store.measurements()] == [1.5, None]
        (winner,) = store.winners()
        assert (winner.measurement.id, winner.default_ms, winner.eager_ms) == (1, 2.0, 3.0)
        assert [miss.count for miss in store.misses()] == [3]
        (job,) = store.jobs()
        assert [event.kind for event in store.events(job.id)] == ["state", "state", "measurement"]
        before = store.winners_version()
        store.set_winners(winner.measurement.device, winner.measurement.problem, [winner])
        assert store.winners_version() == before + 1
        assert store.tokens() == []


def test_the_first_revision_is_brought_up_on_either_database(url):
    database = Database(url)
    with database.migrating() as connection:
        config = migrations.alembic_config()
        config.attributes["connection"] = connection
        command.upgrade(config, "0001")
    database.close()
    assert migrations.current(url) == "0001"
    assert migrations.upgrade(url) == migrations.HEAD
    with Store.open(url) as store:
        assert store.winners_version() == 0


def test_a_newer_database_is_left_alone(url, next_version, monkeypatch):
    with monkeypatch.context():
        next_version()
        Store.open(url).close()
    monkeypatch.undo()
    for action in (Store.open, migrations.upgrade):
        with pytest.raises(SchemaMismatchError, match=r"9999.*newer version.*pip install -U"):
            action(url)
    assert migrations.current(url) == "9999"


def test_a_failing_migration_changes_nothing(url, measured, next_version):
    with Store.open(url) as store:
        store.add_measurement(measured())
    before = migrations.HEAD
    next_version()
    script = migrations.SCRIPTS / "versions" / "9999_next.py"
    script.write_text(script.read_text() + "    raise RuntimeError('power cut')\n")
    with pytest.raises(RuntimeError, match="power cut"):
        migrations.upgrade(url)
    assert migrations.current(url) == before
    database = Database(url)
    with database.reading() as session:
        columns = {c["name"] for c in inspect(session.connection()).get_columns("measurement")}
    database.close()
    assert "power_watts" not in columns


def test_the_ini_file_serves_the_alembic_command(tmp_path):
    url = f"sqlite:///{tmp_path / 'dev.sqlite3'}"
    ini = migrations.SCRIPTS / "alembic.ini"
    command = [sys.executable, "-m", "alembic", "-c", str(ini), "-x", f"url={url}", "upgrade"]
    subprocess.run([*command, "head"], check=True, cwd=tmp_path, capture_output=True)
    assert migrations.current(url) == migrations.HEAD


def test_opening_needs_no_alembic_once_the_database_is_there(tmp_path):
    """A training process that only looks up its config must not pay for it."""
    url = f"sqlite:///{tmp_path / 'tuning.sqlite3'}"
    Store.open(url).close()
    code = (
        "import sys; from flce_tune.tuning_db.store import Store; "
        f"Store.open({url!r}, read_only=True).winners(); "
        "sys.exit(any(m in sys.modules for m in ('alembic', 'torch', 'psycopg')))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)
