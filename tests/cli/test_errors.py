"""Mistakes: one message that says what helps, and the exit code that is documented for it."""

from pathlib import Path

import pytest

from flce_tune.cli import exits
from flce_tune.errors import FlceTuneError, StoreCorruptError, SweepError

CUSTOM = ("--hidden", "64", "--vocab", "256", "--tokens", "32")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("best",), "--preset NAME"),
        (("best", "--preset", "gpt9"), "llama3-8b"),
        (("best", "--preset", "llama3-8b"), "--tokens"),
        (("best", "--preset", "llama3-8b", "--tokens", "1,2"), "one token count"),
        (("best", "--preset", "llama3-8b", *CUSTOM), "one of three ways"),
        (("best", "--hidden", "64", "--tokens", "32"), "go together"),
        (("best", *CUSTOM, "--features", "magic"), "label_smoothing"),
        (("best", *CUSTOM, "--device", "h100"), "no results of a device called 'h100'"),
        (("best", *CUSTOM, "--workspace-limit", "5 bananas"), "256MiB"),
        (("best", "--from-model", "/nowhere/config.json", "--tokens", "8"), "/nowhere/config.json"),
        (("sweep", "--preset", "demo", "--tokens", "0"), "positive integer"),
        (("sweep", *CUSTOM, "--strategy", "magic"), "chunked"),
        (("sweep", *CUSTOM, "--device", "tpu"), "cpu, cuda"),
        (("sweep", *CUSTOM, "--device", "cuda:99"), "no GPU 99"),
        (("sweep", *CUSTOM, "--mode", "eval", "--train-step"), "mode train"),
        (("space", *CUSTOM, "--strategy", "magic"), "chunked"),
    ],
)
def test_usage_errors_say_what_is_accepted(run, arguments: tuple[str, ...], said: str):
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert said in " ".join(result.stderr.replace("│", " ").split())


def test_a_setting_that_is_not_accepted(run, monkeypatch):
    monkeypatch.setenv("FLCE_TUNE_WORKSPACE_LIMIT", "much")
    result = run("db", "path")
    assert result.exit_code == 2
    assert "FLCE_TUNE_WORKSPACE_LIMIT='much'" in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("show",),
        ("export",),
        ("devices",),
        ("best", *CUSTOM),
        ("sweep", *CUSTOM),
        ("db", "upgrade"),
    ],
)
def test_a_damaged_database_is_exit_3(run, database: Path, arguments: tuple[str, ...]):
    database.write_text("this is no database, and not short either\n" * 200)
    before = database.read_bytes()
    result = run(*arguments)
    assert result.exit_code == 3
    assert str(database) in result.stderr
    assert "Traceback" not in result.stderr
    assert database.read_bytes() == before


def test_a_folder_in_place_of_the_database_is_exit_3(run, database: Path):
    database.mkdir()
    result = run("sweep", *CUSTOM)
    assert result.exit_code == 3
    assert "is a folder" in result.stderr


def test_an_export_that_cannot_be_written_is_exit_1(run, h200_database: Path):
    result = run("export", h200_database.parent)
    assert result.exit_code == 1
    assert "cannot write" in result.stderr


def test_serving_beyond_loopback_needs_a_token(run, monkeypatch):
    pytest.importorskip("fastapi")
    result = run("serve", "--host", "0.0.0.0")
    assert result.exit_code == 1
    assert "FLCE_TUNE_TOKEN" in result.stderr


def test_serve_hands_its_options_and_the_settings_over(run, monkeypatch, database: Path):
    pytest.importorskip("fastapi")
    served = []
    monkeypatch.setattr("flce_tune.service.app.run", served.append)
    monkeypatch.setenv("FLCE_TUNE_TOKEN", "a-token")
    result = run("serve", "--host", "0.0.0.0", "--port", "9000", "--no-jobs")
    assert result.exit_code == 0
    (settings,) = served
    assert settings.database_url == f"sqlite:///{database}"
    assert (settings.host, settings.port, settings.token) == ("0.0.0.0", 9000, "a-token")
    assert not settings.run_jobs


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (FlceTuneError("x"), 1),
        (SweepError("x"), 1),
        (StoreCorruptError("x"), 3),
        (exits.NothingFoundError("x"), 4),
    ],
)
def test_exit_codes(error: FlceTuneError, code: int):
    assert exits.code_of(error) == code


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ("cpu,cpu", "each device once"),
        (",", "each device once"),
        ("cpu,quantum", "'quantum' is not a device"),
        ("cuda:99,cpu", "no GPU 99"),
    ],
)
def test_devices_that_are_not_there(run, names: str, said: str):
    result = run("sweep", "--preset", "demo", "--devices", names)
    assert result.exit_code == 2
    assert said in " ".join(result.stderr.replace("│", "").split())


def test_device_and_devices_exclude_each_other(run):
    result = run("sweep", "--preset", "demo", "--devices", "cpu", "--device", "cpu")
    assert result.exit_code == 2
    assert "use one of them" in " ".join(result.stderr.replace("│", "").split())
