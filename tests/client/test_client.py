"""The client and the service together: each method does what it says."""

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from served import ServedTransport

from flce_tune.client import Client
from flce_tune.errors import RefusedError
from flce_tune.service.app import create_app
from flce_tune.service.schemas import JobRequest, ProblemSpec
from flce_tune.service.settings import ServiceSettings
from flce_tune.tuning_db.interchange import dump
from flce_tune.tuning_db.records import (
    DeviceRecord,
    JobState,
    Measurement,
    ProblemRecord,
    Scope,
    Status,
    ToolchainRecord,
    Winner,
)
from flce_tune.tuning_db.store import Store

H200 = DeviceRecord("cuda", "NVIDIA H200", "9.0", 132, 232448, 150_000_000_000)
TOOLCHAIN = ToolchainRecord("2.13.0", "3.7.1", "13.0", "580.1", "0" * 64)
LLAMA3 = ProblemRecord("train", "bfloat16", "fp32", 4096, 128256, 4096)
SPEC = ProblemSpec(tokens=4096, hidden=4096, vocab=128256)
CONFIG = {"strategy": "chunked", "chunk": 1024}
OWNER = "worker:1:abcdef"
SMALL = JobRequest(device="cpu", problems=[ProblemSpec(tokens=64, hidden=32, vocab=128)])


@pytest.fixture
def store(tmp_path: Path, open_new: Callable[[Path], Store]) -> Iterator[Store]:
    with open_new(tmp_path / "tuning.sqlite3") as opened:
        yield opened


@pytest.fixture
def client(store: Store) -> Iterator[Client]:
    """A client with a token that may do everything."""
    secret = store.create_token("test", Scope.ADMIN)
    settings = ServiceSettings(store.url, run_jobs=False, poll_seconds=0.05, lease_seconds=60)
    with (
        TestClient(create_app(settings)) as served,
        Client("http://testserver", token=secret, transport=ServedTransport(served)) as opened,
    ):
        yield opened


def measured(**changes) -> Measurement:
    values = {"samples_ms": (12.5,), "median_ms": 12.5, "spread_ms": 0.1}
    return Measurement(H200, TOOLCHAIN, LLAMA3, 4096, CONFIG, Status.OK, **(values | changes))


@pytest.fixture
def front(store: Store) -> Winner:
    winner = Winner(store.add_measurement(measured()), 20.0, 25.0)
    store.set_winners(H200, LLAMA3, [winner])
    return winner


def test_results(client: Client, front: Winner):
    (device,) = client.devices()
    assert device.name == "NVIDIA H200"
    (winner,) = client.winners(vocab=128256, dtype=None)
    assert winner.measurement.median_ms == 12.5
    best = client.best(preset="llama3-8b", tokens=4096, device=device.id)
    assert (best.rule, best.config) == ("exact", CONFIG)
    assert client.explain(preset="llama3-8b", tokens=4096, device=device.id).rule == "exact"
    assert client.compare(device.id, "NVIDIA H200").geometric_mean == 1
    with pytest.raises(RefusedError, match=r"known are: .*cuda-nvidia-h200") as caught:
        client.best(preset="llama3-8b", tokens=4096, device="abacus")
    assert caught.value.kind == "unknown-device"


def test_jobs(client: Client, store: Store):
    job = client.submit(SMALL, idempotency_key="once")
    assert client.submit(SMALL, idempotency_key="once").id == job.id
    others = [client.submit(SMALL).id for _ in range(60)]
    assert len({job.id, *others}) == 61
    assert client.job(job.id).spec.problems == SMALL.problems
    assert [one.id for one in client.jobs()] == [*reversed(others), job.id]
    assert client.cancel(job.id).state is JobState.CANCELLED
    assert [one.id for one in client.jobs(JobState.CANCELLED)] == [job.id]
    assert [event.data["state"] for event in client.follow(job.id)] == ["queued", "cancelled"]


def test_databases_in_and_out(client: Client, front: Winner, tmp_path: Path):
    whole, part, winners = io.BytesIO(b"rest of before"), io.BytesIO(), io.BytesIO()
    client.export(whole)
    client.export(part, device="NVIDIA H200", problem=SPEC)
    client.export(winners, winners_only=True)
    assert whole.getvalue() == part.getvalue() == winners.getvalue()
    other = io.BytesIO()
    client.export(other, problem=SPEC.model_copy(update={"vocab": 5}))
    assert json.loads(other.getvalue())["measurements"] == []
    whole.seek(0)
    report = client.import_(whole)
    assert (report.measurements, report.winners, report.skipped) == (0, 0, 2)


def test_work(client: Client, store: Store):
    assert client.claim(OWNER, ["cpu"]) is None
    job = client.submit(SMALL)
    assert client.claim(OWNER, ["cuda", "sm_90"]) is None
    claimed = client.claim(OWNER, ["auto", "cpu"])
    assert (claimed.job.id, claimed.lease_seconds) == (job.id, 60)
    told = [(3, "log", {"a": 1}), (5, "log", {"a": 2}), (6, "log", {"a": 3})]
    for upto in (1, 1, 3, 2):  # answers were lost, and more had happened
        lease = client.report(job.id, OWNER, told[:upto])
        client.send_results(job.id, OWNER, dump([measured(id=1, created_at=job.created_at)], []))
    assert not lease.cancel_requested
    client.cancel(job.id)
    assert client.report(job.id, OWNER).cancel_requested
    for _ in range(2):
        assert client.finish(job.id, OWNER, JobState.CANCELLED, "why").message == "why"
    assert store.count_measurements() == 1
    assert [e.data["a"] for e in store.events(job.id) if e.kind == "log"] == [1, 2, 3]
    with pytest.raises(RefusedError, match="not yours any more") as caught:
        client.report(job.id, OWNER)
    assert caught.value.kind == "lease-lost"


def test_a_released_job_is_anybodys(client: Client, store: Store):
    job = client.submit(SMALL)
    client.claim(OWNER, ["cpu"])
    assert client.claim("worker:2:abcdef", ["cpu"]) is None
    client.release(job.id, OWNER)
    assert client.claim("worker:2:abcdef", ["cpu"]).job.id == job.id
