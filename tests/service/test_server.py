"""The service as a process of its own, with real sweeps on the CPU."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from flce_tune.tuning_db.records import JobState
from flce_tune.tuning_db.store import Store

pytestmark = pytest.mark.slow

SERVE = """
import gc, json, sys
gc.disable()  # it takes a quarter of the time of the imports
from flce_tune.service.app import run
from flce_tune.service.settings import ServiceSettings
gc.enable()
run(ServiceSettings(**json.loads(sys.argv[1])))
"""

Start = Callable[..., tuple[subprocess.Popen, httpx.Client]]


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'tuning.sqlite3'}"


@pytest.fixture
def start(tmp_path: Path, url: str) -> Iterator[Start]:
    """Start a service on the test's database; all are stopped in the end."""
    processes: list[subprocess.Popen] = []
    clients: list[httpx.Client] = []

    def start_one() -> tuple[subprocess.Popen, httpx.Client]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        settings = {"database_url": url, "port": port, "lease_seconds": 3, "poll_seconds": 0.1}
        with (tmp_path / "log.txt").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", SERVE, json.dumps(settings)],
                cwd=tmp_path,
                stdout=log,
                stderr=log,
            )
        processes.append(process)
        client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30)
        clients.append(client)
        while True:
            assert process.poll() is None, (tmp_path / "log.txt").read_text()
            try:
                if client.get("/readyz").status_code == 200:
                    return process, client
            except httpx.TransportError:
                time.sleep(0.1)

    yield start_one
    for client in clients:
        client.close()
    for process in processes:
        process.terminate()
        process.wait()


SMALL = {"tokens": 64, "hidden": 32, "vocab": 128, "dtype": "float32"}
SLOWER = {"tokens": 2048, "hidden": 32, "vocab": 1024, "dtype": "float32"}


def job_body(problem: dict) -> dict:
    options = {"quick": True, "strategies": ["chunked", "full"]}
    return {"device": "cpu", "problems": [problem], "options": options}


def follow(client: httpx.Client, job_id: str) -> Iterator[tuple[str, dict]]:
    """The live events of a job, until the stream ends."""
    kind = ""
    with client.stream("GET", f"/v1/jobs/{job_id}/events") as stream:
        for line in stream.iter_lines():
            if line.startswith("event: "):
                kind = line.removeprefix("event: ")
            elif line.startswith("data: "):
                yield kind, json.loads(line.removeprefix("data: "))


def test_a_job_runs_while_the_service_stays_awake_and_its_winner_is_served(start: Start):
    process, client = start()
    answer = client.post("/v1/jobs", json=job_body(SMALL))
    assert answer.status_code == 202
    job = answer.json()["id"]
    kinds = Counter()
    for kind, data in follow(client, job):
        kinds[kind] += 1
        if data.get("state") == "running":
            assert [client.get("/healthz").status_code for _ in range(100)] == [200] * 100
            assert client.get(f"/v1/jobs/{job}").json()["state"] == "running"
    finished = client.get(f"/v1/jobs/{job}").json()
    assert (finished["state"], finished["message"]) == ("succeeded", "")
    assert kinds["measurement"] > 0
    winners = client.get("/v1/winners").json()["items"]
    best = client.get("/v1/configs/best", params=SMALL).json()
    assert best["rule"] == "exact"
    assert best["config"] == winners[0]["measurement"]["config"]
    assert best["expected_ms"] == winners[0]["measurement"]["median_ms"]
    process.terminate()
    assert process.wait() in (0, -signal.SIGTERM)


def test_a_job_for_a_device_nobody_has_waits(start: Start):
    _, client = start()
    waiting = client.post("/v1/jobs", json=job_body(SMALL) | {"device": "cuda:77"}).json()["id"]
    done = client.post("/v1/jobs", json=job_body(SMALL)).json()["id"]
    for _ in follow(client, done):
        pass
    assert client.get(f"/v1/jobs/{done}").json()["state"] == "succeeded"
    assert client.get(f"/v1/jobs/{waiting}").json()["state"] == "queued"


def test_a_stopped_service_gives_its_job_back_and_ends_open_streams(start: Start, url: str):
    process, client = start()
    job = client.post("/v1/jobs", json=job_body(SLOWER)).json()["id"]
    with contextlib.suppress(httpx.TransportError):
        for kind, _ in follow(client, job):
            if kind == "progress":
                process.terminate()
    process.wait()
    with Store.open(url) as store:
        assert store.job(job).state is JobState.RUNNING
        assert store.claim_job("the next service", 60).id == job


def test_a_job_of_a_killed_service_is_resumed_and_nothing_is_measured_twice(start: Start, url: str):
    process, client = start()
    job = client.post("/v1/jobs", json=job_body(SLOWER)).json()["id"]
    with contextlib.suppress(httpx.TransportError):
        for kind, _ in follow(client, job):
            if kind == "measurement":
                process.kill()
    assert process.wait(timeout=60) == -signal.SIGKILL
    with Store.open(url) as store:
        assert store.count_measurements() > 0
        assert store.job(job).state is JobState.RUNNING
        _, client = start()
        for _ in follow(client, job):
            pass
        assert client.get(f"/v1/jobs/{job}").json()["state"] == "succeeded"
        attempts = [e.data["attempt"] for e in store.events(job) if "attempt" in e.data]
        assert attempts == [1, 2]
        measured = [e.data["config"] for e in store.events(job) if e.kind == "measurement"]
        assert len(measured) == len(set(measured)) > 1


TRAINING = """
import torch
from flce_tune import linear_cross_entropy
x, w = torch.randn(60, 32, requires_grad=True), torch.randn(128, 32, requires_grad=True)
for _ in range(3):
    linear_cross_entropy(x, w, torch.zeros(60, dtype=torch.long)).backward()
"""


def test_what_training_missed_is_tuned_and_chosen_next_time(start: Start, tmp_path: Path):
    _, client = start()
    ours = {"FLCE_TUNE_URL": str(client.base_url), "FLCE_TUNE_DB": str(tmp_path / "own.sqlite3")}
    environment = {**os.environ, **ours, "FLCE_TUNE_CACHE_DIR": str(tmp_path / "cache")}
    train = [sys.executable, "-P", "-c", TRAINING]
    subprocess.run(train, env=environment, check=True)
    (missed,) = client.get("/v1/misses").json()["items"]
    assert (missed["tokens"], missed["count"], missed["device"]["kind"]) == (60, 1, "cpu")
    options = {"quick": True, "strategies": ["chunked", "full"]}
    body = {"device": "cpu", "missed": 5, "options": options}
    job = client.post("/v1/jobs", json=body).json()
    (problem,) = job["spec"]["problems"]
    assert (problem["tokens"], problem["hidden"], problem["vocab"]) == (60, 32, 128)
    assert list(follow(client, job["id"]))[-1][1]["state"] == "succeeded"
    assert client.get("/v1/misses").json()["items"] == []
    subprocess.run(train, env=environment, check=True)
    assert client.get("/v1/misses").json()["items"] == []  # what was tuned is not missed again
