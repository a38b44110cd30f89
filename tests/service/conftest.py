"""A service on a database of its own; no job is taken unless a test starts a runner."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from flce_tune.service.app import create_app
from flce_tune.service.settings import ServiceSettings
from flce_tune.tuning_db.records import (
    DeviceRecord,
    Measurement,
    ProblemRecord,
    Status,
    ToolchainRecord,
    Winner,
)
from flce_tune.tuning_db.store import Store

H200 = DeviceRecord("cuda", "NVIDIA H200", "9.0", 132, 232448, 150_000_000_000)
TOOLCHAIN = ToolchainRecord("2.13.0", "3.7.1", "13.0", "580.1", "0" * 64)
LLAMA3 = ProblemRecord("train", "bfloat16", "fp32", 4096, 128256, 4096)


@pytest.fixture
def settings(tmp_path: Path) -> ServiceSettings:
    return ServiceSettings(
        database_url=f"sqlite:///{tmp_path / 'tuning.sqlite3'}", run_jobs=False, poll_seconds=0.05
    )


@pytest.fixture
def store(
    settings: ServiceSettings, tmp_path: Path, open_new: Callable[[Path], Store]
) -> Iterator[Store]:
    with open_new(tmp_path / "tuning.sqlite3") as opened:
        assert opened.url == settings.database_url
        yield opened


@pytest.fixture
def client(settings: ServiceSettings, store: Store) -> Iterator[TestClient]:
    with TestClient(create_app(settings)) as opened:
        yield opened


@pytest.fixture
def measure(store: Store) -> Callable[..., Measurement]:
    """Store one measurement of the Llama 3 problem on an H200, changed as the test says."""

    def add(**changes) -> Measurement:
        values = {
            "device": H200,
            "toolchain": TOOLCHAIN,
            "problem": LLAMA3,
            "tokens": 4096,
            "config": {"strategy": "chunked", "chunk": 1024},
            "status": Status.OK,
            "samples_ms": (12.0, 12.5, 13.0),
            "median_ms": 12.5,
            "spread_ms": 0.25,
            "workspace_bytes": 2_400_000_000,
        }
        return store.add_measurement(Measurement(**(values | changes)))

    return add


@pytest.fixture
def front(store: Store, measure: Callable[..., Measurement]) -> list[Winner]:
    """A stored front of two: a fast one that needs more workspace, a slow one that needs less."""
    fast = measure()
    small = measure(
        config={"strategy": "chunked", "chunk": 256}, median_ms=15.0, workspace_bytes=2_200_000_000
    )
    winners = [Winner(m, default_ms=20.0, eager_ms=25.0) for m in (fast, small)]
    store.set_winners(H200, LLAMA3, winners)
    return winners


@pytest.fixture
def job_body() -> dict:
    return {"problems": [{"tokens": 64, "hidden": 32, "vocab": 128, "dtype": "float32"}]}
