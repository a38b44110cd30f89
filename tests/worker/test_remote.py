"""A worker's side of a job: whatever happens to the line, each thing arrives once."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from remote_site import GPU, PROBLEM, SPEC, Line

from flce_tune.errors import InterchangeError, UnreachableError
from flce_tune.service.executors import LocalSite
from flce_tune.service.runner import JobRunner
from flce_tune.tuning_db.records import Job, JobState, Measurement, Winner
from flce_tune.tuning_db.store import Store
from flce_tune.worker import remote
from flce_tune.worker.remote import Link, RemoteQueue, RemoteWork

Measured = Callable[..., Measurement]


class Sweep:
    """Stands in for a job's process; writes what a sweep would."""

    def __init__(self, url: str, job: Job, site: LocalSite) -> None:
        self.job = job
        self.site = site
        self.store = Store.open(url)

    def measure(self, measurement: Measurement) -> Measurement:
        stored = self.store.add_measurement(measurement)
        data = {"config": str(measurement.config), "done": 1}
        self.store.add_event(self.job.id, "measurement", data)
        return stored

    def win(self, *measurements: Measurement) -> None:
        self.store.set_winners(GPU, PROBLEM, [Winner(m, 3.0, 4.0) for m in measurements])
        self.store.add_event(self.job.id, "winners", {"winners": []})

    @property
    def folder(self) -> Path:
        return Path(self.store.url.removeprefix("sqlite:///")).parent


@pytest.fixture(autouse=True)
def _sweep(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(remote, "JobProcess", Sweep)


@pytest.fixture
def queue(link: Link) -> RemoteQueue:
    return RemoteQueue(link)


@pytest.fixture
def job(store: Store) -> str:
    return store.submit_job(SPEC).id


@pytest.fixture
def work(job: str, queue: RemoteQueue) -> RemoteWork:
    claimed = queue.claim()
    assert claimed.id == job
    return claimed


def configs(store: Store) -> list[int]:
    return [m.config["chunk"] for m in store.measurements()]


def told(store: Store, job: str) -> list[str]:
    return [event.kind for event in store.events(job) if event.kind != "state"]


def test_a_sweep_runs_on_the_workers_device(work: RemoteWork):
    assert work.start().site == LocalSite(("cuda:0",))


def test_only_jobs_for_the_device_are_taken(store: Store, queue: RemoteQueue):
    store.submit_job(SPEC | {"device": "cpu"})
    assert queue.claim() is None


def test_what_a_sweep_finds_arrives_verified_and_ends_the_job(
    work: RemoteWork, store: Store, measured: Measured, job: str
):
    sweep = work.start()
    first = sweep.measure(measured(1024))
    assert work.renew() is False
    assert (configs(store), told(store, job)) == ([1024], ["measurement"])
    failed = sweep.measure(measured(512, None, message="illegal access"))
    sweep.win(first)
    work.finish(JobState.SUCCEEDED, "")
    work.close()
    assert configs(store) == [1024, 512]
    assert store.measurements()[1].message == failed.message
    (winner,) = store.winners()
    assert (winner.measurement.config, winner.default_ms, winner.verified) == (
        first.config,
        3.0,
        True,
    )
    assert store.job(job).state is JobState.SUCCEEDED
    assert told(store, job) == ["measurement", "measurement", "winners"]
    assert not sweep.folder.exists()


def test_a_sweep_begins_with_what_the_service_knows(
    store: Store, queue: RemoteQueue, job: str, measured: Measured
):
    known = store.add_measurement(measured(1024))
    store.set_winners(GPU, PROBLEM, [Winner(known)])
    sweep = queue.claim().start()
    assert configs(sweep.store) == [1024]
    assert [w.measurement.config["chunk"] for w in sweep.store.winners()] == [1024]


def test_what_was_known_is_not_sent_back(
    store: Store, queue: RemoteQueue, job: str, measured: Measured
):
    store.set_winners(GPU, PROBLEM, [Winner(store.add_measurement(measured(1024)))])
    before = store.winners_version()
    work = queue.claim()
    work.start().measure(measured(512))
    work.renew()
    assert configs(store) == [1024, 512]
    assert store.winners_version() == before


@pytest.mark.parametrize("lost", [1, 2, 3])
def test_a_lost_answer_doubles_nothing(
    work: RemoteWork, store: Store, measured: Measured, line: Line, job: str, lost: int
):
    sweep = work.start()
    winner = sweep.measure(measured(1024))
    line.lost_answers = lost
    for number in range(lost):
        with pytest.raises(UnreachableError):
            work.renew()
        sweep.measure(measured(16 << number))
    sweep.win(winner)
    assert work.renew() is False
    expected = [1024, *(16 << number for number in range(lost))]
    assert configs(store) == expected
    assert told(store, job) == ["measurement"] * len(expected) + ["winners"]
    assert len(store.winners()) == 1


def test_what_an_outage_held_up_comes_later_as_the_jobs(
    work: RemoteWork, queue: RemoteQueue, store: Store, measured: Measured, line: Line, job: str
):
    sweep = work.start()
    line.cut = True
    sweep.win(sweep.measure(measured(1024)))
    for attempt in (work.renew, queue.claim):
        with pytest.raises(UnreachableError):
            attempt()
    work.close()
    with pytest.raises(UnreachableError):
        queue.claim()
    line.cut = False
    again = queue.claim()
    assert again.id == job
    assert (configs(store), len(store.winners())) == ([1024], 1)
    assert told(store, job) == ["measurement", "winners"]
    assert not sweep.folder.exists()
    second = again.start()
    assert configs(second.store) == [1024]
    second.measure(measured(512))
    again.renew()
    assert told(store, job) == ["measurement", "winners", "measurement"]


def test_a_job_whose_end_was_not_heard_is_ended_later_and_not_begun_again(
    work: RemoteWork, queue: RemoteQueue, store: Store, measured: Measured, line: Line, job: str
):
    sweep = work.start()
    sweep.win(sweep.measure(measured(1024)))
    work.renew()
    line.cut = True
    with pytest.raises(UnreachableError):
        work.finish(JobState.SUCCEEDED, "all is well")
    work.close()
    line.cut = False
    assert queue.claim() is None
    ended = store.job(job)
    assert (ended.state, ended.message, ended.attempts) == (
        JobState.SUCCEEDED, "all is well", 1,
    )  # fmt: skip
    assert not sweep.folder.exists()


def test_the_end_of_a_job_that_somebody_else_has_by_then_is_forgotten(
    work: RemoteWork, queue: RemoteQueue, store: Store, measured: Measured, line: Line, job: str
):
    sweep = work.start()
    sweep.measure(measured(1024))
    line.cut = True
    with pytest.raises(UnreachableError):
        work.finish(JobState.SUCCEEDED, "")
    work.close()
    store.release_job(job, "worker:1:abcdef")
    store.claim_job("another one", 60)
    line.cut = False
    assert queue.claim() is None
    assert (store.job(job).state, configs(store)) == (JobState.RUNNING, [1024])


def test_measurements_arrive_even_if_the_job_is_somebody_elses(
    work: RemoteWork, queue: RemoteQueue, store: Store, measured: Measured, line: Line, job: str
):
    sweep = work.start()
    line.cut = True
    sweep.win(sweep.measure(measured(1024)))
    work.close()
    store.release_job(job, "worker:1:abcdef")
    assert store.claim_job("another one", 60).id == job
    line.cut = False
    assert queue.claim() is None
    assert (configs(store), store.winners(), told(store, job)) == ([1024], [], [])


def test_a_job_taken_over_is_left(work: RemoteWork, store: Store, job: str):
    work.start()
    store.release_job(job, "worker:1:abcdef")
    store.claim_job("another one", 60)
    assert work.renew() is None
    work.close()


def test_a_cancellation_is_noticed(work: RemoteWork, store: Store, job: str):
    work.start()
    store.request_cancel(job)
    assert work.renew() is True


def test_a_released_job_is_free_with_what_was_measured(
    work: RemoteWork, store: Store, measured: Measured, job: str
):
    work.start().measure(measured(1024))
    work.release()
    assert configs(store) == [1024]
    assert store.claim_job("another one", 60).id == job


def test_a_job_whose_results_are_refused_fails_with_the_reason(
    work: RemoteWork, queue: RemoteQueue, store: Store, measured: Measured, job: str
):
    sweep = work.start()
    sweep.measure(measured(1024, config={"strategy": "of a newer version"}))
    assert work.renew() is True  # stop it
    work.finish(JobState.CANCELLED, "cancelled while running")
    work.close()
    assert store.job(job).state is JobState.FAILED
    assert "of a newer version" in store.job(job).message
    assert queue.claim() is None


def test_many_results_go_in_parts(work: RemoteWork, store: Store, measured: Measured, job: str):
    sweep = work.start()
    message = "x" * 30_000
    sweep.store.add_measurements(
        measured(16, None, message=message, tokens=4096 - n) for n in range(40)
    )
    sweep.store.add_measurements(measured(16, tokens=4096 - n) for n in range(450))
    for _ in range(20):
        sweep.store.add_event(sweep.job.id, "log", {"text": message * 2})
    work.renew()
    assert store.count_measurements() == 490
    assert len(told(store, job)) == 20


@pytest.mark.parametrize(
    ("fault", "state"),
    [(InterchangeError("of another version"), JobState.FAILED), (OSError("no disk"), None)],
)
def test_a_job_that_cannot_begin_fails_or_goes_to_others(
    queue: RemoteQueue, store: Store, job: str, monkeypatch: pytest.MonkeyPatch, fault, state
):
    def refuse(*_: object) -> None:
        raise fault

    monkeypatch.setattr(RemoteWork, "_fetch_known", refuse)
    runner = JobRunner(queue, poll_seconds=60, stop_seconds=1)
    runner.start()
    if state is not None:
        while not store.job(job).state.final:
            time.sleep(0.01)
        assert (store.job(job).state, store.job(job).message) == (state, "of another version")
    else:
        while store.claim_job("another one", 60) is None:
            time.sleep(0.01)
    runner.stop()
