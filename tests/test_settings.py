from pathlib import Path

import pytest

from flce_tune import settings
from flce_tune.settings import Settings


@pytest.mark.parametrize(
    ("db", "url", "path"),
    [
        ("/data/t.db", "sqlite:////data/t.db", Path("/data/t.db")),
        ("sqlite:////data/t.db", "sqlite:////data/t.db", Path("/data/t.db")),
        ("sqlite:////data/t.db?timeout=3", "sqlite:////data/t.db?timeout=3", Path("/data/t.db")),
        ("sqlite+pysqlite:///t.db", "sqlite+pysqlite:///t.db", Path("t.db")),
        ("sqlite://", "sqlite://", None),
        ("postgresql://me@host/db", "postgresql://me@host/db", None),
    ],
)
def test_a_database_is_a_path_or_a_url(db: str, url: str, path: Path | None):
    subject = Settings(db=db)
    assert (subject.database_url, subject.database_path) == (url, path)


def test_by_default_files_are_where_the_user_keeps_such_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    subject = settings.load()
    assert subject.database_path == tmp_path / "data/flce-tune/tuning.sqlite3"
    assert subject.cache_path == tmp_path / "cache/flce-tune"
    assert not list(tmp_path.iterdir())


def test_the_environment_is_read_on_load(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FLCE_TUNE_URL", "http://team")
    monkeypatch.setenv("FLCE_TUNE_WORKSPACE_LIMIT", "1000")
    monkeypatch.setenv("FLCE_TUNE_CACHE_DIR", "/cache")
    subject = settings.load()
    assert (subject.url, subject.workspace_limit) == ("http://team", 1000)
    assert subject.cache_path == Path("/cache")


def test_an_empty_variable_is_as_good_as_none(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FLCE_TUNE_DB", "")
    monkeypatch.setenv("FLCE_TUNE_URL", "")
    subject = settings.load()
    assert (subject.db, subject.url) == (None, None)


def test_nonsense_is_refused_by_name(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FLCE_TUNE_WORKSPACE_LIMIT", "much")
    with pytest.raises(ValueError, match="FLCE_TUNE_WORKSPACE_LIMIT"):
        settings.load()
