"""A service without a network, and what a sweep would write."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from remote_site import GPU, PROBLEM, TOOLCHAIN, Line, OneGpu
from served import ServedTransport

from flce_tune.client import Client, Retries
from flce_tune.service.app import create_app
from flce_tune.service.settings import ServiceSettings
from flce_tune.tuning_db.records import Measurement, Status
from flce_tune.tuning_db.store import Store
from flce_tune.worker.remote import Link


@pytest.fixture
def store(tmp_path: Path, open_new: Callable[[Path], Store]) -> Iterator[Store]:
    """The service's."""
    with open_new(tmp_path / "service.sqlite3") as opened:
        yield opened


@pytest.fixture
def line(store: Store) -> Iterator[Line]:
    settings = ServiceSettings(store.url, run_jobs=False, lease_seconds=60)
    with TestClient(create_app(settings)) as served:
        yield Line(ServedTransport(served))


@pytest.fixture
def link(line: Line) -> Link:
    def client(seconds: float) -> Client:
        retries = Retries(seconds=seconds, first_wait=0.01)
        return Client("http://testserver", retries=retries, transport=line)

    return Link(client(0), client(0.1), "worker:1:abcdef", OneGpu())


@pytest.fixture
def measured() -> Callable[..., Measurement]:
    def build(chunk: int, median_ms: float | None = 2.0, **changes: object) -> Measurement:
        timed = median_ms is not None
        values = {
            "tokens": 4096,
            "config": {"strategy": "chunked", "chunk": chunk},
            "status": Status.OK if timed else Status.CRASH,
            "median_ms": median_ms,
            "samples_ms": (median_ms,) if timed else (),
            "spread_ms": 0.1 if timed else None,
        }
        return Measurement(GPU, TOOLCHAIN, PROBLEM, **(values | changes))

    return build
