"""SIGKILL of services under load: no job is lost or run twice at once, no measurement lost.

Twice in the suite; twenty times, on both databases, by hand: pytest -m soak tests/load
"""

import contextlib
import io
import json
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from flce_tune.client import Client, Retries
from flce_tune.service.schemas import JobRequest, ProblemSpec
from flce_tune.tuning_db.records import JobState
from flce_tune.tuning_db.store import Store

SERVICE = Path(__file__).parents[2] / "benchmarks" / "service" / "fake_jobs.py"
CONFIGS_PER_JOB = 8
MOST_JOBS = 300


class Service:
    """A service process that is killed and started again, always at the same port."""

    def __init__(self, url: str, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        self.address = f"http://127.0.0.1:{self._port}"
        self._url = url
        self._folder = folder
        self._process: subprocess.Popen | None = None

    def start(self) -> None:
        settings = {
            "database_url": self._url,
            "port": self._port,
            "lease_seconds": 4,
            "poll_seconds": 0.05,
        }
        command = [sys.executable, "-P", str(SERVICE), json.dumps(settings), str(self._folder)]
        with (self._folder / f"{self._port}.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        while True:
            assert self._process.poll() is None, "see the service's log"
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{self.address}/readyz", timeout=30).status_code == 200:
                    return
            time.sleep(0.05)

    def kill(self) -> None:
        self._process.kill()
        assert self._process.wait() == -signal.SIGKILL

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()


class Load:
    """Threads that submit, import, ask and follow until told to stop; they note what was taken."""

    def __init__(self, services: list[Service]) -> None:
        self._services = services
        self._stopping = threading.Event()
        self._numbers = iter(range(1, 1_000_000))
        self.jobs: list[str] = []
        self.imported: list[int] = []  # vocab of each document taken
        self.answers = 0
        self.errors: list[Exception] = []
        actions = (self._submit, self._import, self._ask, self._follow)
        self._threads = [threading.Thread(target=self._repeat, args=(a,)) for a in actions]

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def _repeat(self, action) -> None:
        clients = [Client(s.address, retries=Retries(900)) for s in self._services]
        try:
            while not self._stopping.is_set():
                action(random.choice(clients))
        except Exception as error:  # noqa: BLE001 - the test reports it
            self.errors.append(error)
        for client in clients:
            client.close()

    def _submit(self, client: Client) -> None:
        if len(self.jobs) < MOST_JOBS:
            vocab = 1000 + next(self._numbers)
            problem = ProblemSpec(tokens=64, hidden=32, vocab=vocab, dtype="float32")
            self.jobs.append(client.submit(JobRequest(device="cpu", problems=[problem])).id)
        self._stopping.wait(0.2)

    def _import(self, client: Client) -> None:
        vocab = 1_000_000 + next(self._numbers)
        client.import_(io.BytesIO(document(vocab)))
        self.imported.append(vocab)
        self._stopping.wait(0.1)

    def _ask(self, client: Client) -> None:
        client.best(tokens=64, hidden=32, vocab=random.randrange(1000, 1100), dtype="float32")
        self.answers += 1
        self._stopping.wait(0.005)

    def _follow(self, client: Client) -> None:
        if self.jobs:
            for _ in client.follow(random.choice(self.jobs)):
                if self._stopping.is_set():
                    return
        self._stopping.wait(0.05)


def document(vocab: int) -> bytes:
    """An export of one measurement, of a problem nobody else has."""
    cpu = {"kind": "cpu", "name": "Other", "capability": "0.0", "sm_count": 1}
    tools = dict.fromkeys(("torch", "triton", "cuda", "driver", "kernel_hash"), "x")
    problem = {"mode": "train", "dtype": "float32", "accumulate": "fp32", "hidden": 8}
    measured = {"device": 0, "toolchain": 0, "problem": 0, "tokens": 64, "status": "ok"}
    return json.dumps(
        {
            "schema": "flce-tune/1",
            "devices": [cpu | {"shared_memory_per_block": 0}],
            "toolchains": [tools],
            "problems": [problem | {"vocab": vocab, "token_bucket": 64}],
            "measurements": [
                measured
                | {"config": {"strategy": "full"}, "median_ms": 1.0, "samples_ms": [1.0]}
                | {"created_at": "2026-11-01T00:00:00Z"}
            ],
            "winners": [],
        }
    ).encode()


@pytest.fixture
def services(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[list[Service]]:
    url, count = request.param
    if url == "postgresql":
        url = request.getfixturevalue("postgres_url")
    else:
        url = f"sqlite:///{tmp_path / 'tuning.sqlite3'}"
    Store.open(url).close()
    made = [Service(url, tmp_path) for _ in range(count)]
    for one in made:
        one.start()
    request.node.url = url
    yield made
    for one in made:
        one.stop()


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("services", "kills"),
    [
        pytest.param(("sqlite", 1), 2, marks=pytest.mark.slow, id="sqlite-2"),
        pytest.param(("sqlite", 1), 20, marks=pytest.mark.soak, id="sqlite-20"),
        pytest.param(("postgresql", 2), 20, marks=pytest.mark.soak, id="two-on-postgresql-20"),
    ],
    indirect=["services"],
)
def test_killed_services_lose_and_double_nothing(
    request: pytest.FixtureRequest, services: list[Service], kills: int, tmp_path: Path
):
    with Load(services) as load:
        for number in range(kills):
            time.sleep(random.uniform(0.5, 4.0))
            victim = services[number % len(services)]
            victim.kill()
            victim.start()
    assert load.errors == []
    with Store.open(request.node.url) as store:
        while store.jobs(states=[JobState.QUEUED, JobState.RUNNING], limit=1):
            time.sleep(0.1)
        assert {store.job(job).state for job in load.jobs} == {JobState.SUCCEEDED}
        assert len(load.jobs) == len(set(load.jobs)) == sum(store.count_jobs().values())
        rows = Counter(
            (m.device.name, m.problem.vocab, str(m.config)) for m in store.measurements()
        )
        attempts = Counter(store.job(job).attempts for job in load.jobs)
    assert set(rows.values()) == {1}
    of_jobs = [vocab for name, vocab, _ in rows if name == "Fake CPU"]
    assert len(of_jobs) == CONFIGS_PER_JOB * len(load.jobs)
    assert {vocab for name, vocab, _ in rows if name == "Other"} >= set(load.imported)
    assert not list(tmp_path.glob("*.twice"))
    assert len(load.jobs) > kills
    assert load.imported
    print(
        f"\n{kills} kills: {len(load.jobs)} jobs (by attempts: {dict(attempts)}), "
        f"{len(of_jobs)} of their measurements, {len(load.imported)} imports, "
        f"{load.answers} configs asked for"
    )
