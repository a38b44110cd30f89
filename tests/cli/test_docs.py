"""docs/tuning.md names every command, setting and exit code."""

import re
from pathlib import Path

import pytest
import typer

from flce_tune.cli import exits
from flce_tune.cli.app import app
from flce_tune.settings import Settings

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "tuning.md").read_text()
TABLES = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S))


def listed(heading: str) -> set[str]:
    """Words in the first column of a section's table."""
    cells = re.findall(r"^\| ([^|]+) \|", TABLES[heading], re.MULTILINE)
    return {word for cell in cells for word in re.findall(r"[A-Za-z_0-9]+", cell)}


def test_every_command():
    assert listed("All commands") - {"command"} == {*typer.main.get_command(app).commands}


def test_every_setting():
    names = {f"FLCE_TUNE_{name.upper()}" for name in Settings.model_fields}
    assert listed("Settings") - {"variable"} == names


def test_every_exit_code():
    codes = {exits.FAILURE, exits.DATABASE, exits.NOTHING_FOUND, exits.INTERRUPTED, 0, 2}
    assert listed("Exit codes") - {"code"} == {*map(str, codes)}


@pytest.mark.parametrize("line", re.findall(r"^(flce-tune .+)$", PAGE, re.MULTILINE))
def test_the_commands_shown_have_these_options(line: str):
    _, name, *rest = line.partition("#")[0].split()
    command = typer.main.get_command(app).commands[name]
    known = {option for parameter in command.params for option in parameter.opts}
    assert {word for word in rest if word.startswith("--")} <= known
