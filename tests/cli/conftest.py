"""A command line with a database of its own."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from flce_tune.cli.app import app
from flce_tune.tuning_db.records import (
    DeviceRecord,
    Measurement,
    ProblemRecord,
    Status,
    ToolchainRecord,
    Winner,
)
from flce_tune.tuning_db.store import Store

H200 = DeviceRecord("cuda", "NVIDIA H200", "9.0", 132, 232448, 150 << 30)
TOOLCHAIN = ToolchainRecord("2.13.0", "3.7.1", "13.0", "580.1", "a" * 64)
PROBLEM = ProblemRecord("train", "bfloat16", "fp32", 4096, 128256, 16384)

CHUNKED = {"strategy": "chunked", "chunk": 4096}
SMALL = {"strategy": "chunked", "chunk": 512}

Run = Callable[..., Result]


def measured(config: dict[str, object], median_ms: float, workspace: int) -> Measurement:
    return Measurement(
        device=H200,
        toolchain=TOOLCHAIN,
        problem=PROBLEM,
        tokens=16384,
        config=config,
        status=Status.OK,
        samples_ms=(median_ms,),
        median_ms=median_ms,
        spread_ms=0.1,
        workspace_bytes=workspace,
    )


@pytest.fixture
def database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the commands of this test keep their database; it is not there yet."""
    path = tmp_path / "tuning.sqlite3"
    monkeypatch.setenv("FLCE_TUNE_DB", str(path))
    return path


@pytest.fixture
def h200_database(database: Path, open_new: Callable[[Path], Store]) -> Path:
    """The database with an H200's front of two winners and one failure."""
    with open_new(database) as store:
        fast = store.add_measurement(measured(CHUNKED, 76.5, 3 << 30))
        small = store.add_measurement(measured(SMALL, 90.0, 512 << 20))
        store.add_measurement(
            Measurement(
                H200, TOOLCHAIN, PROBLEM, 16384, {"strategy": "full"}, Status.OUT_OF_MEMORY,
                message="CUDA out of memory",
            )
        )  # fmt: skip
        front = [Winner(fast, default_ms=80.0, eager_ms=153.0), Winner(small, default_ms=80.0)]
        store.set_winners(H200, PROBLEM, front)
    return database


@pytest.fixture
def run(database: Path) -> Run:
    """Run a command in this process; colours off, stdout and stderr apart."""
    runner = CliRunner()

    def invoke(*arguments: str, **options: object) -> Result:
        result = runner.invoke(app, [str(part) for part in arguments], **options)
        expected = result.exception is None or isinstance(result.exception, SystemExit)
        assert expected, result.exception
        return result

    return invoke


@pytest.fixture
def command(database: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run the installed command as a user does."""
    executable = Path(sys.executable).with_name("flce-tune")

    def invoke(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [executable, *arguments],
            capture_output=True,
            text=True,
            env={**os.environ, **environment},
            cwd=database.parent,
        )

    return invoke
