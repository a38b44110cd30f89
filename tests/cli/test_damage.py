"""Commands on a damaged database: exit 3, what is wrong and what helps; nothing is erased."""

import multiprocessing
import os
import tempfile
from pathlib import Path

import damage
import pytest

from flce_tune.cli.exits import DATABASE

TINY = ("--hidden", "16", "--vocab", "64", "--tokens", "32", "--dtype", "float32")
SWEEP = ("sweep", *TINY, "--device", "cpu", "--strategy", "full")
SET_ASIDE = "mv {path} {path}.damaged"


@pytest.mark.parametrize(
    ("happen", "remedy"),
    [
        (damage.cut_off, SET_ASIDE),
        (damage.cut_in_half, SET_ASIDE),
        (damage.flipped_pages, SET_ASIDE),
        (damage.text_file, SET_ASIDE),
        (damage.folder, "FLCE_TUNE_DB must name a file"),
        (damage.older_version, "flce-tune db upgrade"),
        (damage.newer_version, "pip install -U"),
    ],
)
@pytest.mark.parametrize("arguments", [("show",), SWEEP, ("verify",), ("db", "check")])
def test_what_is_wrong_and_what_helps(run, h200_database: Path, happen, remedy, arguments):
    happen(h200_database)
    before = h200_database.read_bytes() if h200_database.is_file() else None
    result = run(*arguments)
    assert result.exit_code == DATABASE
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert str(h200_database) in result.stderr
    assert remedy.format(path=h200_database) in result.stderr
    assert "Traceback" not in result.stderr
    if before is not None:
        assert h200_database.read_bytes() == before


def test_an_empty_file_is_filled_by_those_who_write(run, h200_database: Path):
    damage.zero_bytes(h200_database)
    asked = run("show")
    assert asked.exit_code == DATABASE
    assert "flce-tune db upgrade" in asked.stderr
    assert h200_database.read_bytes() == b""
    assert run(*SWEEP).exit_code == 0


def test_a_database_that_may_only_be_read(run, monkeypatch):
    """Permissions do not bind root: the sweep runs in a child that gives its rights up."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tuning.sqlite3"
        monkeypatch.setenv("FLCE_TUNE_DB", str(path))
        assert run(*SWEEP).exit_code == 0
        before = path.read_bytes()
        path.chmod(0o444)
        Path(folder).chmod(0o555)
        code, said = as_nobody(lambda: run(*SWEEP))
        assert code == DATABASE
        assert f"{path} cannot be written" in said
        assert "FLCE_TUNE_DB elsewhere" in said
        code, _ = as_nobody(lambda: run("show"))
        assert code == 0
        assert path.read_bytes() == before


def as_nobody(invoke) -> tuple[int, str]:
    def child(pipe) -> None:
        if os.geteuid() == 0:
            os.setgid(65534)
            os.setuid(65534)
        result = invoke()
        pipe.send((result.exit_code, result.stderr))

    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=child, args=(theirs,))
    process.start()
    theirs.close()
    told: tuple[int, str] = ours.recv()
    process.join(60)
    return told
