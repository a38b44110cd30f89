"""The runner on a real store, with stand-ins for the processes it starts."""

import threading
import time
from collections import Counter
from collections.abc import Callable

import pytest

from flce_tune.errors import StoreUnavailableError
from flce_tune.service import queue as queue_module
from flce_tune.service.executors import Site
from flce_tune.service.job_process import Outcome
from flce_tune.service.queue import StoreQueue
from flce_tune.service.runner import JobRunner, new_owner
from flce_tune.service.settings import ServiceSettings
from flce_tune.tuning_db.records import Job, JobState
from flce_tune.tuning_db.store import Store

SPEC = {"device": "cpu", "problems": [{"tokens": 8, "hidden": 8, "vocab": 8}]}


class FakeProcess:
    """Runs until told to stop or ``outcome`` is set."""

    started: list["FakeProcess"]

    def __init__(self, _url: str, job: Job, _site: Site) -> None:
        self.job = job
        self.outcome: Outcome | None = None
        self.stopped = threading.Event()
        self.killed = threading.Event()
        self.started.append(self)

    def wait(self, seconds: float) -> Outcome | None:
        if self.outcome is None and self.stopped.wait(seconds):
            self.outcome = Outcome(None)
        return self.outcome

    def stop(self, _grace_seconds: float) -> None:
        self.stopped.set()

    def kill(self) -> None:
        self.killed.set()


class InstantProcess(FakeProcess):
    def wait(self, seconds: float) -> Outcome | None:
        return Outcome(JobState.SUCCEEDED)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[FakeProcess]:
    FakeProcess.started = []
    monkeypatch.setattr(queue_module, "JobProcess", FakeProcess)
    return FakeProcess.started


@pytest.fixture
def quick(settings: ServiceSettings) -> ServiceSettings:
    return ServiceSettings(settings.database_url, lease_seconds=0.4, poll_seconds=0.02)


def make(store: Store, settings: ServiceSettings) -> JobRunner:
    queue = StoreQueue(store, new_owner(), settings.lease_seconds, settings.executor)
    return JobRunner(queue, poll_seconds=settings.poll_seconds, stop_seconds=settings.stop_seconds)


def until(condition: Callable[[], object]) -> None:
    """Wait for something that must come; the test's own time limit ends a wait in vain."""
    while not condition():
        time.sleep(0.01)


def test_each_job_is_run_once_by_many_runners(
    store: Store, settings: ServiceSettings, started, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(queue_module, "JobProcess", InstantProcess)
    for _ in range(24):
        store.submit_job(SPEC)
    with Store.open(settings.database_url) as second:
        runners = [make(s, settings) for s in (store, store, second, second)]
        for runner in runners:
            runner.start()
        until(lambda: not store.jobs(states=[JobState.QUEUED, JobState.RUNNING]))
        for runner in runners:
            runner.stop()
    assert set(Counter(process.job.id for process in started).values()) == {1}
    assert len(started) == 24
    assert {job.state for job in store.jobs()} == {JobState.SUCCEEDED}


def test_a_running_job_keeps_its_lease(store: Store, quick: ServiceSettings, started):
    job = store.submit_job(SPEC)
    runner = make(store, quick)
    runner.start()
    time.sleep(3 * quick.lease_seconds)
    assert store.claim_job("somebody else", 60) is None
    started[0].outcome = Outcome(JobState.FAILED, "no config ran")
    until(lambda: store.job(job.id).state.final)
    runner.stop()
    assert (store.job(job.id).state, store.job(job.id).message) == (
        JobState.FAILED,
        "no config ran",
    )
    assert started[0].killed.is_set()


def test_a_running_job_is_cancelled(store: Store, quick: ServiceSettings, started):
    job = store.submit_job(SPEC)
    runner = make(store, quick)
    runner.start()
    until(lambda: started)
    store.request_cancel(job.id)
    until(lambda: store.job(job.id).state.final)
    runner.stop()
    assert store.job(job.id).state is JobState.CANCELLED
    assert store.job(job.id).message == "cancelled while running"


def test_a_stopped_runner_gives_its_job_back(store: Store, quick: ServiceSettings, started):
    long_lease = ServiceSettings(quick.database_url, lease_seconds=3600, poll_seconds=0.02)
    job = store.submit_job(SPEC)
    runner = make(store, long_lease)
    runner.start()
    until(lambda: started)
    runner.stop()
    assert started[0].stopped.is_set()
    until(lambda: store.claim_job("the next service", 60) is not None)
    assert store.job(job.id).lease_owner == "the next service"


def test_a_job_without_a_place_is_given_back_and_left_alone_for_a_while(
    store: Store, quick: ServiceSettings, started
):
    job = store.submit_job(SPEC)
    queue = StoreQueue(store, new_owner(), 3600, quick.executor)
    runner = JobRunner(queue, poll_seconds=0.02, stop_seconds=10, away_seconds=3600)
    runner.start()
    until(lambda: started)
    started[0].outcome = Outcome(None, "the cluster is away")
    until(lambda: any("released" in event.data for event in store.events(job.id)))
    until(lambda: store.claim_job("another service", 60) is not None)
    assert len(started) == 1
    runner.stop()


def test_a_runner_that_lost_its_lease_kills_the_sweep_and_writes_nothing(
    store: Store, quick: ServiceSettings, started, monkeypatch: pytest.MonkeyPatch
):
    job = store.submit_job(SPEC)
    runner = make(store, quick)
    runner.start()
    until(lambda: started)
    monkeypatch.setattr(Store, "renew_lease", lambda *_: None)
    until(lambda: started[0].killed.is_set())
    monkeypatch.undo()
    monkeypatch.setattr(queue_module, "JobProcess", FakeProcess)
    until(lambda: len(started) == 2)  # the lease ran out, and it was claimed again
    assert store.job(job.id).state is JobState.RUNNING
    runner.stop()


def test_a_sweep_is_killed_when_the_lease_cannot_be_renewed_in_time(
    store: Store, quick: ServiceSettings, started, monkeypatch: pytest.MonkeyPatch
):
    def away(*_args: object) -> None:
        raise StoreUnavailableError("away")

    store.submit_job(SPEC)
    runner = make(store, quick)
    runner.start()
    until(lambda: started)
    monkeypatch.setattr(Store, "renew_lease", away)
    until(lambda: started[0].killed.is_set())
    monkeypatch.setattr(Store, "claim_job", away)
    time.sleep(3 * quick.poll_seconds)
    assert runner.alive
    runner.stop()
