"""Every test that takes ``url`` runs on SQLite and on PostgreSQL."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flce_tune.tuning_db.records import (
    DeviceRecord,
    Measurement,
    ProblemRecord,
    Status,
    ToolchainRecord,
)
from flce_tune.tuning_db.store import Store


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    with Store.open(url) as opened:
        yield opened


@pytest.fixture
def sqlite_path(tmp_path: Path) -> Path:
    return tmp_path / "tuning.sqlite3"


DEVICE = DeviceRecord("cuda", "NVIDIA H200", "9.0", 132, 232448, memory_bytes=150_000_000_000)
TOOLCHAIN = ToolchainRecord("2.13.0", "3.7.1", "13.0", "580.1", "abc123")
PROBLEM = ProblemRecord("train", "bfloat16", "fp32", 4096, 128256, 16384)


@pytest.fixture
def device() -> DeviceRecord:
    return DEVICE


@pytest.fixture
def problem() -> ProblemRecord:
    return PROBLEM


@pytest.fixture
def toolchain() -> ToolchainRecord:
    return TOOLCHAIN


@pytest.fixture
def measured() -> Callable[..., Measurement]:
    """Build a measurement that is ok unless told otherwise."""

    def build(median_ms: float | None = 1.5, **changes: Any) -> Measurement:
        fields: dict[str, Any] = {
            "device": DEVICE,
            "toolchain": TOOLCHAIN,
            "problem": PROBLEM,
            "tokens": 16384,
            "config": {"strategy": "chunked", "chunk": 2048},
            "status": Status.OK if median_ms is not None else Status.CRASH,
            "samples_ms": () if median_ms is None else (median_ms, median_ms * 1.25),
            "median_ms": median_ms,
            "spread_ms": None if median_ms is None else 0.125,
        }
        return Measurement(**(fields | changes))

    return build
