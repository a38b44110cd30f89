"""The dispatcher of the process, over real databases in every state."""

import os
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import damage
import pytest
import torch

import flce_tune
from flce_tune import pretuned
from flce_tune.dispatch import (
    Dispatcher,
    TuningWarning,
    build_dispatcher,
    default,
    default_dispatcher,
    reset_default_dispatcher,
)
from flce_tune.dispatch.convert import kernel_hash, triton_version
from flce_tune.errors import InterchangeError
from flce_tune.kernels import strategies
from flce_tune.kernels.config import Config
from flce_tune.settings import Settings
from flce_tune.tuning_db.records import Winner
from flce_tune.tuning_db.store import Store

PATIENCE = {"token": None, "timeout_s": 0.2}


@pytest.fixture(autouse=True)
def _fresh():
    reset_default_dispatcher()
    yield
    reset_default_dispatcher()


@pytest.fixture
def current(make_winner) -> Winner:
    """A winner measured with the kernels and Triton in use."""
    winner = make_winner(Config("chunked", chunk=64))
    toolchain = replace(
        winner.measurement.toolchain, kernel_hash=kernel_hash(), triton=triton_version()
    )
    return make_winner(Config("chunked", chunk=64), toolchain=toolchain)


def save(path: Path, *winners: Winner) -> Path:
    with Store.open(f"sqlite:///{path}") as store:
        for winner in winners:
            measured = store.add_measurement(winner.measurement)
            store.set_winners(
                measured.device, measured.problem, [replace(winner, measurement=measured)]
            )
    return path


def opened(path: Path, **others: str) -> Dispatcher:
    return build_dispatcher(Settings(db=str(path), **others))


def test_what_a_sweep_stored_is_chosen(tmp_path: Path, current, problem, h200, recwarn):
    choice = opened(save(tmp_path / "db", current)).choose(problem, h200)
    assert (choice.rule, choice.config) == ("exact", Config("chunked", chunk=64))
    assert not recwarn.list


def test_a_missing_database_is_neither_created_nor_warned_about(
    tmp_path: Path, problem, h200, recwarn
):
    subject = opened(tmp_path / "folder" / "db")
    assert subject.choose(problem, h200).rule in ("default", "pretuned", "same architecture")
    assert not list(tmp_path.iterdir())
    assert not recwarn.list


@pytest.mark.parametrize(
    "happen",
    [
        damage.zero_bytes,
        damage.cut_off,
        damage.cut_in_half,
        damage.flipped_pages,
        damage.text_file,
        damage.folder,
        damage.lost_tables,
        damage.older_version,
        damage.newer_version,
    ],
)
def test_a_damaged_database_costs_one_warning_that_names_it(
    tmp_path: Path, current, problem, h200, recwarn, happen
):
    path = save(tmp_path / "tuning.sqlite3", current)
    happen(path)
    before = path.read_bytes() if path.is_file() else None
    subject = opened(path)
    for tokens in (4096, 64):
        asked = replace(problem, tokens=tokens, vocab=40)
        assert subject.choose(asked, h200).config == strategies.default(asked, h200)
    (warning,) = recwarn.list
    assert warning.category is TuningWarning
    assert str(path) in str(warning.message)
    if before is not None:
        assert path.read_bytes() == before


def test_a_refused_url_costs_one_warning_without_its_password(problem, h200, recwarn):
    subject = build_dispatcher(Settings(db="mysql://me:s3cret@host/db"))
    subject.choose(problem, h200)
    (warning,) = recwarn.list
    assert "FLCE_TUNE_DB" in str(warning.message)
    assert "s3cret" not in str(warning.message)


def test_a_database_in_a_read_only_folder_is_read(tmp_path: Path, current, problem, h200, recwarn):
    path = save(tmp_path / "db", current)
    tmp_path.chmod(0o500)
    try:
        assert opened(path).choose(problem, h200).rule == "exact"
    finally:
        tmp_path.chmod(0o700)
    assert not recwarn.list


def test_a_writer_does_not_stand_in_the_way(tmp_path: Path, current, problem, h200, recwarn):
    import sqlite3

    path = save(tmp_path / "db", current)
    writer = sqlite3.connect(path, isolation_level=None)
    writer.execute("BEGIN IMMEDIATE")
    try:
        assert opened(path).choose(problem, h200).rule == "exact"
    finally:
        writer.rollback()
        writer.close()
    assert not recwarn.list


def test_a_service_that_is_away_costs_one_warning(tmp_path: Path, current, problem, h200, recwarn):
    path = save(tmp_path / "db", current)
    subject = opened(path, url="http://127.0.0.1:1", cache_dir=str(tmp_path / "cache"))
    for tokens in (4096, 64, 8192):
        subject.choose(replace(problem, tokens=tokens), h200)
    assert subject.choose(problem, h200).rule == "exact"
    (warning,) = recwarn.list
    assert "FLCE_TUNE_URL" in str(warning.message)


def test_training_asks_the_service_once_and_never_waits_again(tmp_path: Path, monkeypatch, recwarn):
    """A service that takes connections and never answers: what would hang any step that asks."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("FLCE_TUNE_DB", str(tmp_path / "db"))
        monkeypatch.setenv("FLCE_TUNE_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setenv("FLCE_TUNE_CACHE_DIR", str(tmp_path / "cache"))
        monkeypatch.setattr(default.RemoteSnapshots.__init__, "__kwdefaults__", PATIENCE)
        flce_tune.prefetch("cpu")
        asked, _ = silent.accept()
        asked.close()
        silent.setblocking(False)
        x, weight = torch.randn(8, 4, requires_grad=True), torch.randn(6, 4)
        for tokens in (8, 4, 2):
            flce_tune.linear_cross_entropy(
                x[:tokens], weight, torch.zeros(tokens, dtype=torch.long)
            ).backward()
        with pytest.raises(BlockingIOError):
            silent.accept()
    (warning,) = [w for w in recwarn.list if w.category is TuningWarning]
    assert "FLCE_TUNE_URL" in str(warning.message)


def test_a_damaged_shipped_file_costs_one_warning(
    tmp_path: Path, current, problem, h200, recwarn, monkeypatch
):
    def damaged():
        raise InterchangeError("h200.json: winners[0]: what is this")

    monkeypatch.setattr(pretuned, "winners", damaged)
    subject = opened(save(tmp_path / "db", current))
    assert subject.choose(problem, h200).rule == "exact"
    (warning,) = recwarn.list
    assert "h200.json" in str(warning.message)


def test_the_process_has_one_until_it_is_reset(tmp_path: Path, current, problem, h200, monkeypatch):
    monkeypatch.setenv("FLCE_TUNE_DB", str(tmp_path / "db"))
    with ThreadPoolExecutor(4) as pool:
        dispatchers = set(pool.map(lambda _: default_dispatcher(), range(8)))
    assert len(dispatchers) == 1
    save(tmp_path / "db", current)
    assert default_dispatcher().choose(problem, h200).rule != "exact"
    reset_default_dispatcher()
    assert default_dispatcher().choose(problem, h200).rule == "exact"


def test_importing_reads_no_environment_and_no_database():
    import subprocess

    code = (
        "import sys, flce_tune.dispatch;"
        "print([m for m in ('sqlalchemy', 'alembic', 'fastapi', 'triton') if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "FLCE_TUNE_WORKSPACE_LIMIT": "nonsense", "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.strip() == "[]"
