"""``flce-tune diff`` and ``flce-tune gc``."""

import json
from pathlib import Path

import pytest


@pytest.fixture
def export(run, h200_database: Path, tmp_path: Path) -> Path:
    file = tmp_path / "export.json"
    assert run("export", file).exit_code == 0
    return file


class TestDiff:
    def test_an_export_against_its_device(self, run, export: Path):
        result = run("diff", export, "h200", "--json")
        assert result.exit_code == 0
        (one,) = json.loads(result.stdout)
        assert (one["ratio"], one["same_config"]) == (1.0, True)
        assert one["a"]["measurement"]["median_ms"] == 76.5
        assert "the same" in run("diff", export, "h200").stdout

    def test_a_faster_side(self, run, export: Path, tmp_path: Path):
        faster = tmp_path / "faster.json"
        faster.write_text(export.read_text().replace("76.5", "38.25"))
        assert json.loads(run("diff", export, faster, "--json").stdout)[0]["ratio"] == 2.0
        assert "2.00×" in run("diff", export, faster).stdout

    def test_nothing_in_common_is_exit_4(self, run, export: Path, tmp_path: Path):
        other = tmp_path / "other.json"
        other.write_text(export.read_text().replace("128256", "32000"))
        result = run("diff", export, other)
        assert result.exit_code == 4
        assert "32000" in result.stdout
        assert "no problem has winners in both" in result.stderr

    @pytest.mark.usefixtures("h200_database")
    def test_an_unknown_side_is_a_usage_error(self, run):
        result = run("diff", "h200", "a100")
        assert result.exit_code == 2
        assert "a100" in result.stderr

    def test_without_a_database_the_file_is_named(self, run):
        result = run("diff", "missing.json", "h200")
        assert result.exit_code == 4
        assert "missing.json" in result.stderr


class TestGc:
    def test_a_dry_run_counts(self, run, h200_database: Path):
        before = h200_database.read_bytes()
        report = json.loads(run("gc", "--older-than", "0", "--dry-run", "--json").stdout)
        assert report == {"abandoned": 0, "old": 0, "kept": 3, "dry_run": True}
        assert h200_database.read_bytes() == before

    @pytest.mark.usefixtures("h200_database")
    def test_says_what_it_deleted(self, run):
        assert run("gc").stdout.startswith("deleted 0 measurements")

    def test_without_a_database_none_is_made(self, run, database: Path):
        assert run("gc").exit_code == 4
        assert not database.exists()
