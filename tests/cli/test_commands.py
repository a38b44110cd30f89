"""Each command over a stored front: what it prints, and its exit code."""

import json
from pathlib import Path
from typing import get_args

import pytest

from flce_tune.cli import options
from flce_tune.kernels import problem as kernels_problem
from flce_tune.sweep.presets import PRESETS
from flce_tune.tuning_db.records import Status
from flce_tune.version import __version__

LLAMA = ("--preset", "llama3-8b", "--tokens", "16384", "--device", "h200")


def test_version(run):
    assert run("--version").stdout == f"flce-tune {__version__}\n"


def test_without_a_command_there_is_help(run):
    result = run()
    assert "sweep" in result.output
    assert result.exit_code == 2


class TestBest:
    @pytest.mark.usefixtures("h200_database")
    def test_names_the_fastest_of_the_front(self, run):
        found = json.loads(run("best", *LLAMA, "--json").stdout)
        assert found["config"] == {"strategy": "chunked", "chunk": 4096}
        assert found["rule"] == "exact"
        assert found["expected_ms"] == 76.5
        assert found["winner"]["speedup_over_eager"] == 2.0
        assert [one["measurement"]["median_ms"] for one in found["front"]] == [76.5, 90.0]

    @pytest.mark.usefixtures("h200_database")
    def test_keeps_to_the_workspace_limit(self, run):
        unlimited = json.loads(run("best", *LLAMA, "--json").stdout)
        limit = f"{unlimited['workspace_bytes'] - 1}B"
        limited = json.loads(run("best", *LLAMA, "--workspace-limit", limit, "--json").stdout)
        assert limited["config"] == {"strategy": "chunked", "chunk": 512}

    @pytest.mark.usefixtures("h200_database")
    def test_takes_the_limit_from_the_settings(self, run, monkeypatch):
        unlimited = json.loads(run("best", *LLAMA, "--json").stdout)
        monkeypatch.setenv("FLCE_TUNE_WORKSPACE_LIMIT", str(unlimited["workspace_bytes"] - 1))
        limited = json.loads(run("best", *LLAMA, "--json").stdout)
        assert limited["config"]["chunk"] == 512

    @pytest.mark.usefixtures("h200_database")
    def test_reads_the_shape_from_a_model(self, run, tmp_path: Path):
        model = tmp_path / "config.json"
        model.write_text(json.dumps({"hidden_size": 4096, "vocab_size": 128256}))
        where = ("--tokens", "16384", "--device", "h200", "--json")
        found = json.loads(run("best", "--from-model", model, *where).stdout)
        assert found["rule"] == "exact"

    @pytest.mark.usefixtures("h200_database")
    def test_shows_a_table_to_people(self, run):
        shown = run("best", *LLAMA).stdout
        assert "→   chunked chunk=4096" in shown
        assert "2.00×" in shown

    def test_nothing_measured_is_exit_4(self, run):
        result = run("best", "--preset", "demo", "--device", "cpu")
        assert result.exit_code == 4
        assert result.stdout == ""
        assert "flce-tune sweep" in result.stderr


class TestExplain:
    @pytest.mark.usefixtures("h200_database")
    def test_names_the_rule_and_the_config(self, run):
        shown = run("explain", *LLAMA).stdout
        assert "because   exact" in shown
        explained = json.loads(run("explain", *LLAMA, "--json").stdout)
        assert explained["rule"] == "exact"

    def test_without_a_database_shows_the_default(self, run, database: Path):
        result = run("explain", "--preset", "demo", "--device", "cpu", "--json")
        assert json.loads(result.stdout)["rule"] == "default"
        assert not database.exists()


class TestShow:
    @pytest.mark.usefixtures("h200_database")
    def test_lists_winners(self, run):
        winners = json.loads(run("show", "--json").stdout)
        assert [one["measurement"]["median_ms"] for one in winners] == [76.5, 90.0]
        assert "NVIDIA H200" in run("show").stdout

    @pytest.mark.usefixtures("h200_database")
    def test_lists_measurements_newest_first(self, run):
        shown = json.loads(run("show", "--measurements", "--json").stdout)
        assert [one["status"] for one in shown] == ["out_of_memory", "ok", "ok"]
        (newest,) = json.loads(run("show", "--measurements", "--limit", "1", "--json").stdout)
        assert newest == shown[0]

    @pytest.mark.usefixtures("h200_database")
    def test_a_status_selects_measurements(self, run):
        (failed,) = json.loads(run("show", "--status", "out_of_memory", "--json").stdout)
        assert failed["message"] == "CUDA out of memory"
        assert "out_of_memory" in run("show", "--status", "out_of_memory").stdout

    @pytest.mark.usefixtures("h200_database")
    @pytest.mark.parametrize(
        ("option", "hit", "miss"),
        [
            ("--tokens", "16384", "4096"),
            ("--hidden", "4096", "4097"),
            ("--vocab", "128256", "128"),
            ("--dtype", "bfloat16", "float16"),
            ("--mode", "train", "eval"),
        ],
    )
    def test_filters(self, run, option: str, hit: str, miss: str):
        assert run("show", option, hit).exit_code == 0
        missed = run("show", option, miss, "--json")
        assert missed.exit_code == 4
        assert json.loads(missed.stdout) == []

    def test_without_a_database_nothing_is_found(self, run, database: Path):
        result = run("show")
        assert result.exit_code == 4
        assert "flce-tune sweep" in result.stderr
        assert not database.exists()


class TestInterchange:
    @pytest.mark.usefixtures("h200_database")
    def test_what_is_exported_can_be_imported(self, run, tmp_path: Path, monkeypatch):
        file = tmp_path / "export.json"
        assert run("export", file).stdout == ""
        assert file.read_text() == run("export").stdout
        monkeypatch.setenv("FLCE_TUNE_DB", str(tmp_path / "other.sqlite3"))
        added = json.loads(run("import", file, "--json").stdout)
        assert added == {"measurements": 3, "winners": 2, "skipped": 0}
        assert "skipped 5" in run("import", "-", input=file.read_text()).stdout
        assert json.loads(run("best", *LLAMA, "--json").stdout)["winner"]["verified"] is False

    @pytest.mark.usefixtures("h200_database")
    def test_winners_only_leaves_failures_out(self, run):
        document = json.loads(run("export", "--winners-only", "--device", "H200").stdout)
        assert [one["status"] for one in document["measurements"]] == ["ok", "ok"]

    def test_a_damaged_file_is_refused(self, run, tmp_path: Path):
        file = tmp_path / "export.json"
        file.write_text('{"schema": "flce-tune/1", "devices": [')
        result = run("import", file)
        assert result.exit_code == 1
        assert str(file) in result.stderr

    def test_a_missing_file_is_named(self, run, tmp_path: Path):
        result = run("import", tmp_path / "none.json")
        assert result.exit_code == 1
        assert "none.json: No such file" in result.stderr

    def test_a_binary_file_is_refused(self, run, tmp_path: Path):
        file = tmp_path / "export.json"
        file.write_bytes(b"\xff\xfe\x00")
        assert "not UTF-8" in run("import", file).stderr


class TestMachine:
    @pytest.mark.usefixtures("h200_database")
    def test_devices_are_ours_and_the_stored(self, run):
        devices = json.loads(run("devices", "--json").stdout)
        (h200,) = [one for one in devices if one["name"] == "NVIDIA H200" and not one["here"]]
        assert h200["measurements"] == 3
        assert any("cpu" in one["here"] for one in devices)
        assert "NVIDIA H200" in run("devices").stdout

    def test_presets(self, run):
        listed = json.loads(run("presets", "--json").stdout)
        assert [one["name"] for one in listed] == list(PRESETS)
        assert "gemma2-2b" in run("presets").stdout

    @pytest.mark.usefixtures("h200_database")
    def test_space_counts_and_says_why(self, run):
        found = json.loads(run("space", *LLAMA, "--json").stdout)["strategies"]
        pruned = [one for name in found for one in found[name]["pruned"]]
        assert found["chunked"]["configs"]
        assert pruned
        assert all(one["reason"] for one in pruned)
        shown = run("space", *LLAMA, "--strategy", "chunked").stdout
        assert f"chunked: {len(found['chunked']['configs'])} proposed" in shown
        assert found["chunked"]["pruned"][0]["reason"] in run("space", *LLAMA, "--list").stdout


class TestDatabase:
    def test_path(self, run, database: Path):
        assert run("db", "path").stdout == f"{database}\n"

    def test_path_hides_the_password(self, run, monkeypatch):
        monkeypatch.setenv("FLCE_TUNE_DB", "postgresql://tuner:secret@db/tuning")
        shown = run("db", "path").stdout
        assert "secret" not in shown
        assert "tuner" in shown

    def test_upgrade_creates_it(self, run, database: Path):
        assert run("db", "upgrade").exit_code == 0
        assert database.exists()
        assert "sound" in run("db", "check").stdout

    @pytest.mark.usefixtures("h200_database")
    def test_backup_holds_the_same(self, run, tmp_path: Path, monkeypatch):
        before = run("export").stdout
        assert run("db", "backup", tmp_path / "copy.sqlite3").exit_code == 0
        monkeypatch.setenv("FLCE_TUNE_DB", str(tmp_path / "copy.sqlite3"))
        assert run("export").stdout == before

    def test_check_finds_damage(self, run, database: Path):
        database.write_text("this is no database, and not short either\n" * 200)
        result = run("db", "check")
        assert result.exit_code == 3
        assert str(database) in result.stderr


def test_the_choices_are_those_of_the_parts():
    assert get_args(options.ModeName) == get_args(kernels_problem.Mode)
    assert get_args(options.AccumulateName) == get_args(kernels_problem.Accumulate)
    assert get_args(options.DtypeName) == tuple(kernels_problem.DTYPES)
    assert get_args(options.StatusName) == tuple(status.value for status in Status)


def test_the_help_names_every_feature(run):
    shown = " ".join(run("best", "--help").output.replace("│", " ").split())
    assert all(feature in shown for feature in kernels_problem.FEATURES)
