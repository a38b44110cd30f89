"""What a good command does besides its work: dry runs, completion, colours, a missing extra."""

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

TINY = ("--hidden", "16", "--vocab", "64", "--tokens", "32,48", "--dtype", "float32")
SWEEP = ("sweep", *TINY, "--device", "cpu", "--strategy", "full")
FAILS = ("db", "check")  # without loading torch
EXECUTABLE = Path(sys.executable).with_name("flce-tune")


def test_a_dry_run_says_what_there_is_to_do_and_does_nothing(run, database: Path):
    result = run(*SWEEP, "--dry-run")
    assert result.exit_code == 0
    assert "N=32 D=16 V=64 float32" in result.stdout
    assert not database.exists()


def test_a_dry_run_knows_what_is_done_already(run):
    before = json.loads(run(*SWEEP, "--dry-run", "--json").stdout)
    assert [(one["problem"]["tokens"], one["known"], one["winners"]) for one in before] == [
        (32, 0, 0),
        (48, 0, 0),
    ]
    done = run("sweep", *TINY[:4], "--tokens", "32", *TINY[6:], *SWEEP[-4:], "--json")
    measured = json.loads(done.stdout)["problems"][0]["measured"]
    after = json.loads(run(*SWEEP, "--dry-run", "--json").stdout)
    assert [(one["configs"], one["known"]) for one in after] == [
        (before[0]["configs"], measured),
        (before[1]["configs"], 0),
    ]
    assert before[0]["configs"] == measured
    assert after[0]["winners"] > 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--executor", "ray", "--devices", "all"), "--accelerator H200"),
        (("--executor", "ray", "--device", "cuda:0"), "--accelerator H200"),
        (("--executor", "ray", "--device", "cpu", "--accelerator", "H200"), "exclude each other"),
        (("--executor", "ray", "--train-step"), "about this machine"),
        (("--accelerator", "H200"), "goes with --executor ray"),
        (("--executor", "slurm"), "'local', 'ray'"),
    ],
)
def test_options_of_executors_that_do_not_fit(run, arguments: tuple[str, ...], said: str):
    result = run("sweep", *TINY, *arguments)
    assert result.exit_code == 2
    assert said in " ".join(result.stderr.replace("│", " ").split())


def test_without_ray_the_error_says_what_to_install(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "flce_tune.sweep.ray_cluster", raising=False)
    monkeypatch.delitem(sys.modules, "flce_tune.sweep.ray_places", raising=False)
    result = run("sweep", *TINY, "--executor", "ray")
    assert result.exit_code == 1
    assert "pip install 'flce-tune[ray]'" in result.stderr


def test_the_shell_completes_commands_and_options(command):
    def completed(words: str) -> str:
        count = len(words.split(" ")) - 1
        return command(
            _FLCE_TUNE_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD=str(count)
        ).stdout

    assert completed("flce-tune sw").split() == ["sweep"]
    assert "--dry-run" in completed("flce-tune sweep --d").split()
    assert completed("flce-tune sweep --executor r").split() == ["ray"]


def on_a_terminal(*arguments: str, **environment: str) -> str:
    """What a command writes to a terminal."""
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [EXECUTABLE, *arguments],
        stdout=slave,
        stderr=slave,
        stdin=slave,
        env={**os.environ, "TERM": "xterm-256color", **environment},
    )
    os.close(slave)
    written = b""
    try:
        while chunk := os.read(master, 4096):
            written += chunk
    except OSError:  # how Linux says that the other end is closed
        pass
    process.wait()
    os.close(master)
    return written.decode()


def test_colours_are_for_terminals_that_want_them(database: Path, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    database.mkdir()
    assert "\x1b[1;31merror: " in on_a_terminal(*FAILS)
    for plain in (on_a_terminal(*FAILS, NO_COLOR="1"), on_a_terminal(*FAILS, TERM="dumb")):
        assert "error: " in plain
        assert "\x1b[" not in plain.replace("\x1b[1m", "").replace("\x1b[0m", "")
        assert "31m" not in plain
