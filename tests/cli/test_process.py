"""The installed command in processes of its own: a real sweep, signals, streams, start-up."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

TINY = ("--hidden", "16", "--vocab", "64", "--tokens", "32", "--dtype", "float32")
Command = Callable[..., "subprocess.CompletedProcess[str]"]


def test_a_sweep_tunes_trains_and_is_found_again(command: Command, database: Path):
    swept = command("sweep", *TINY, "--device", "cpu", "--quick", "--train-step", "--json")
    assert swept.returncode == 0, swept.stderr
    report = json.loads(swept.stdout)
    (problem,) = report["problems"]
    assert report["database"] == str(database)
    assert problem["winners"]
    assert problem["measured"] > 0
    winner = problem["winners"][0]["measurement"]

    step = report["train_step"]
    assert step["config"] == winner["config"]
    assert step["rule"] == "exact"
    assert step["loss"] == pytest.approx(step["plain_loss"], rel=1e-5)
    assert step["loss_after"] < step["loss"]

    best = command("best", *TINY, "--device", "cpu", "--json")
    assert json.loads(best.stdout)["config"] == winner["config"]

    again = command("sweep", *TINY, "--device", "cpu", "--quick")
    assert again.returncode == 0, again.stderr
    assert "known from before" in again.stdout
    assert "measuring" in again.stderr
    assert "\x1b" not in again.stdout + again.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_sweep_and_keeps_the_database(
    database: Path, number: int, command: Command
):
    executable = Path(sys.executable).with_name("flce-tune")
    sweep = ("sweep", "--preset", "demo", "--device", "cpu")
    with subprocess.Popen(
        [executable, *sweep], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        heard = iter(process.stderr.readline, "")
        assert any(line.startswith("measuring") for line in heard)
        process.send_signal(number)
        said = process.stderr.read()
    assert process.returncode == 130
    assert "interrupted" in said
    assert "Traceback" not in said
    assert "sound" in command("db", "check").stdout


def test_expected_errors_show_no_traceback(command: Command, database: Path):
    database.mkdir()
    failed = command("show")
    assert failed.returncode == 3
    assert failed.stdout == ""
    assert failed.stderr.startswith("error: ")
    assert failed.stderr.count("\n") == 1


def test_a_closed_pipe_is_no_traceback(h200_database: Path):
    executable = Path(sys.executable).with_name("flce-tune")
    with subprocess.Popen(
        [executable, "presets", "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        said = process.stderr.read()
    assert b"Traceback" not in said


def test_tables_are_not_cut_when_piped(command: Command, h200_database: Path):
    shown = command("show", COLUMNS="40")
    assert "chunked chunk=4096" in shown.stdout
    assert "…" not in shown.stdout


@pytest.mark.parametrize("arguments", [("--help",), ("--version",), ("sweep", "--help")])
def test_help_loads_neither_torch_nor_the_service(arguments: tuple[str, ...]):
    code = (
        "import sys\n"
        f"sys.argv = ['flce-tune', *{arguments!r}]\n"
        "from flce_tune.cli import main\n"
        "try:\n"
        "    main()\n"
        "except SystemExit as done:\n"
        "    assert not done.code, done.code\n"
        "heavy = {'torch', 'triton', 'fastapi', 'sqlalchemy', 'numpy'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, check=True
    )
    assert done.stderr.strip() == "[]"
