"""Workers without database access against a real service process.

All of it on both databases: pytest -m "slow or soak" tests/worker
"""

import contextlib
import json
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

from flce_tune.client import Client, Retries
from flce_tune.service.schemas import JobOptions, JobRequest, ProblemSpec
from flce_tune.tuning_db.records import JobState, Scope
from flce_tune.tuning_db.store import Store

SERVE = """
import gc, json, sys
gc.disable()  # it takes a quarter of the time of the imports
from flce_tune.service.app import run
from flce_tune.service.settings import ServiceSettings
gc.enable()
run(ServiceSettings(**json.loads(sys.argv[1])))
"""
WORK = """
import sys
from flce_tune.cli import main
sys.argv[0] = "flce-tune"
main()
"""


class Site:
    """One service and its workers, as processes."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url = url
        self._folder = folder
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.address = f"http://127.0.0.1:{self.port}"
        with Store.open(url) as store:
            self.admin = store.create_token("admin", Scope.ADMIN)
            self.work = store.create_token("worker", Scope.WORK)
        self.processes: list[subprocess.Popen] = []

    def serve(self, *, lease_seconds: int = 300) -> subprocess.Popen:
        settings = {
            "database_url": self.url,
            "port": self.port,
            "lease_seconds": lease_seconds,
            "poll_seconds": 0.1,
            "run_jobs": False,
        }
        process = self._start("service", "-c", SERVE, json.dumps(settings))
        while True:
            assert process.poll() is None, self.log("service")
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{self.address}/readyz").status_code == 200:
                    return process
            time.sleep(0.1)

    def worker(self, name: str) -> subprocess.Popen:
        options = ("--server", self.address, "--token", self.work, "--device", "cpu")
        return self._start(name, "-c", WORK, "worker", *options)

    def log(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text()

    def _start(self, name: str, *arguments: str) -> subprocess.Popen:
        with (self._folder / f"{name}.log").open("ab") as log:
            command = [sys.executable, "-P", *arguments]
            process = subprocess.Popen(command, cwd=self._folder, stdout=log, stderr=log)
        self.processes.append(process)
        return process


@pytest.fixture(
    params=[
        pytest.param("sqlite", marks=pytest.mark.slow),
        pytest.param("postgresql", marks=pytest.mark.soak),
    ]
)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "postgresql":
        return request.getfixturevalue("postgres_url")
    return f"sqlite:///{tmp_path / 'tuning.sqlite3'}"


@pytest.fixture
def site(url: str, tmp_path: Path) -> Iterator[Site]:
    made = Site(url, tmp_path)
    yield made
    for process in reversed(made.processes):
        process.terminate()
        process.wait()


@pytest.fixture
def client(site: Site) -> Iterator[Client]:
    with Client(site.address, token=site.admin, retries=Retries(seconds=60)) as opened:
        yield opened


def request(number: int) -> JobRequest:
    """A job whose problem is nobody else's, and takes some seconds."""
    problem = ProblemSpec(tokens=2048, hidden=64, vocab=2048 + 64 * number, dtype="float32")
    options = JobOptions(quick=True, strategies=["chunked", "full"])
    return JobRequest(device="cpu", problems=[problem], options=options)


def until(condition: Callable[[], object]) -> None:
    """Wait for something that must come; the test's own time limit ends a wait in vain."""
    while not condition():
        time.sleep(0.05)


def measured_by(store: Store, job: str) -> list[str]:
    return [e.data["config"] for e in store.events(job) if e.kind == "measurement"]


@pytest.mark.timeout(1200)  # two starts of the service and three of workers, on busy cores too
def test_workers_and_service_die_in_mid_job_and_nothing_is_lost_or_doubled(
    site: Site, client: Client
):
    service = site.serve(lease_seconds=8)
    first = site.worker("first")
    jobs = [client.submit(request(number)).id for number in range(2)]
    with Store.open(site.url) as store:
        until(lambda: measured_by(store, jobs[0]))
        first.kill()  # its job's lease has to run out
        service.terminate()
        service.wait()
        service = site.serve()  # whose leases outlast its own restart, however busy the machine
        others = [site.worker("second"), site.worker("third")]
        until(lambda: measured_by(store, jobs[1]))
        service.kill()
        service.wait()
        site.serve()
        for job in jobs:
            until(lambda job=job: store.job(job).state.final)
            assert store.job(job).state is JobState.SUCCEEDED, store.job(job).message
            configs = measured_by(store, job)
            assert len(configs) == len(set(configs)) > 1
        attempts = [store.job(job).attempts for job in jobs]
        assert attempts == [2, 1], site.log("second") + site.log("third")
        rows = store.measurements()
        # Timed once each, and the finalists again in their final.
        times = Counter((m.problem, str(m.config), len(m.samples_ms) > 1) for m in rows)
        assert set(times.values()) == {1}
        assert len({(m.created_at, str(m.config)) for m in rows}) == len(rows)
        fronts = store.winners()
        assert {w.measurement.problem.vocab for w in fronts} == {2048, 2112}
        assert all(w.verified for w in fronts)
        assert client.best(tokens=2048, hidden=64, vocab=2112, dtype="float32").rule == "exact"
    for worker in others:
        worker.send_signal(signal.SIGTERM)
        assert worker.wait() == 0


@pytest.mark.soak
def test_a_stopped_worker_gives_its_job_back_with_what_it_measured(site: Site, client: Client):
    site.serve()
    worker = site.worker("worker")
    job = client.submit(request(0)).id
    with Store.open(site.url) as store:
        until(lambda: measured_by(store, job))
        worker.send_signal(signal.SIGTERM)
        assert worker.wait() == 0, site.log("worker")
        released = store.latest_event(job, ["state"])
        assert released.data["released"]
        assert len(measured_by(store, job)) == store.count_measurements() > 0
        site.worker("next")
        until(lambda: store.job(job).state.final)
        configs = measured_by(store, job)
        assert len(configs) == len(set(configs))
    assert [event.kind for event in client.follow(job)].count("measurement") == len(configs)


@pytest.mark.soak
def test_a_running_job_is_cancelled_at_its_worker(site: Site, client: Client):
    site.serve()
    site.worker("worker")
    job = client.submit(request(0)).id
    for event in client.follow(job):
        if event.kind == "measurement":
            client.cancel(job)
    assert client.job(job).state is JobState.CANCELLED
