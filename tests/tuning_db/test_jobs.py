import math
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from flce_tune.tuning_db.jobs import MAX_FRUITLESS_ATTEMPTS
from flce_tune.tuning_db.records import JobState
from flce_tune.tuning_db.store import Store

LONG = 3600.0


def claim_lost_job(store, owner):
    """Claim once the short lease of another owner has run out."""
    for _ in range(1000):
        if (job := store.claim_job(owner, LONG)) is not None:
            return job
        time.sleep(0.005)
    return None


def states(store, job_id):
    return [event.data["state"] for event in store.events(job_id)]


def test_the_life_of_a_job(store):
    job = store.submit_job({"preset": "llama3-8b", "tokens": [1, 2]}, priority=3)
    assert job.state is JobState.QUEUED
    assert (job.priority, job.attempts, job.started_at) == (3, 0, None)
    assert store.job(job.id) == job

    running = store.claim_job("worker", LONG)
    assert (running.id, running.state, running.attempts) == (job.id, JobState.RUNNING, 1)
    assert running.lease_owner == "worker"
    assert running.lease_expires_at > running.started_at >= job.created_at
    assert store.claim_job("another", LONG) is None

    assert store.finish_job(job.id, "worker", JobState.FAILED, "no \0 luck")
    done = store.job(job.id)
    assert (done.state, done.message) == (JobState.FAILED, "no \ufffd luck")
    assert done.finished_at >= done.started_at
    assert done.lease_owner is None
    assert states(store, job.id) == ["queued", "running", "failed"]
    assert not store.finish_job(job.id, "worker", JobState.SUCCEEDED)
    assert store.renew_lease(job.id, "worker", LONG) is None
    assert store.job("no-such-job") is None


def test_priority_first_then_age(store):
    ids = [store.submit_job({}, priority=p).id for p in (0, 5, 0, 5)]
    claimed = [store.claim_job(f"worker {n}", LONG).id for n in range(len(ids))]
    assert claimed == [ids[1], ids[3], ids[0], ids[2]]


def test_the_same_key_is_the_same_job(store):
    first = store.submit_job({"n": 1}, idempotency_key="key")
    again = store.submit_job({"n": 2}, idempotency_key="key")
    assert again == first
    assert store.submit_job({"n": 1}, idempotency_key="other").id != first.id
    assert store.submit_job({}).id != store.submit_job({}).id
    assert states(store, first.id) == ["queued"]


def test_the_same_key_at_the_same_time(store):
    together = threading.Barrier(8)

    def submit(_):
        together.wait()
        return store.submit_job({}, idempotency_key="key").id

    with ThreadPoolExecutor(8) as threads:
        assert len(set(threads.map(submit, range(8)))) == 1
    assert len(store.jobs()) == 1


def test_a_lost_workers_job_goes_to_another(store):
    job = store.submit_job({})
    store.claim_job("lost", 0.01)
    taken = claim_lost_job(store, "heir")
    assert (taken.id, taken.lease_owner, taken.attempts) == (job.id, "heir", 2)
    assert store.renew_lease(job.id, "lost", LONG) is None
    assert not store.finish_job(job.id, "lost", JobState.SUCCEEDED)
    assert store.finish_job(job.id, "heir", JobState.SUCCEEDED)
    assert states(store, job.id) == ["queued", "running", "running", "succeeded"]


def test_a_renewed_lease_holds(store):
    job = store.submit_job({})
    first = store.claim_job("worker", 0.01)
    renewed = store.renew_lease(job.id, "worker", LONG)
    assert renewed.lease_expires_at > first.lease_expires_at
    time.sleep(0.05)
    assert store.claim_job("thief", LONG) is None
    assert store.renew_lease(job.id, "thief", LONG) is None


def test_cancelling(store):
    queued, running = store.submit_job({}), store.submit_job({}, priority=1)
    store.claim_job("worker", LONG)
    assert store.request_cancel(queued.id).state is JobState.CANCELLED
    asked = store.request_cancel(running.id)
    assert (asked.state, asked.cancel_requested) == (JobState.RUNNING, True)
    store.request_cancel(running.id)
    assert store.renew_lease(running.id, "worker", LONG).cancel_requested
    assert store.finish_job(running.id, "worker", JobState.CANCELLED, "stopped")
    after = store.request_cancel(running.id)
    assert (after.state, after.message) == (JobState.CANCELLED, "stopped")
    assert store.request_cancel("no-such-job") is None
    assert store.claim_job("worker", LONG) is None
    assert [e.data.get("cancel_requested") for e in store.events(running.id)] == [
        None,
        None,
        True,
        None,
    ]


def test_a_cancelled_job_of_a_lost_worker_is_not_run_again(store):
    job = store.submit_job({})
    store.claim_job("lost", 0.2)
    store.request_cancel(job.id)
    for _ in range(1000):
        assert store.claim_job("heir", LONG) is None
        if store.job(job.id).state is JobState.CANCELLED:
            break
        time.sleep(0.005)
    assert states(store, job.id)[-1] == "cancelled"


def test_cancelling_after_the_worker_was_lost(store):
    job = store.submit_job({})
    store.claim_job("lost", 0.01)
    time.sleep(0.05)
    assert store.request_cancel(job.id).state is JobState.CANCELLED


def test_pages_newest_first(store):
    ids = [store.submit_job({"n": n}).id for n in range(5)][::-1]
    assert [job.id for job in store.jobs()] == ids
    assert [job.id for job in store.jobs(limit=2)] == ids[:2]
    assert [job.id for job in store.jobs(before=ids[1], limit=2)] == ids[2:4]
    assert store.jobs(before="no-such-job") == []
    store.request_cancel(ids[3])
    assert [job.id for job in store.jobs(states=[JobState.CANCELLED])] == [ids[3]]
    assert store.jobs(states=[]) == []


def test_events_in_order_and_after_an_id(store):
    job, other = store.submit_job({}), store.submit_job({})
    first = store.add_event(job.id, "progress", {"done": 1, "of": 3})
    store.add_event(other.id, "log", {"text": "else"})
    second = store.add_event(job.id, "log", {"text": "\0 日本"})
    assert store.events(job.id)[1:] == [first, second]
    assert store.events(job.id, after_id=first.id) == [second]
    assert store.events(job.id, limit=1)[0].kind == "state"


def test_events_that_cannot_be(store):
    job = store.submit_job({})
    with pytest.raises(ValueError, match="no job 'nobody'"):
        store.add_event("nobody", "log", {})
    for value in (math.nan, math.inf):
        with pytest.raises(ValueError, match="JSON"):
            store.add_event(job.id, "measurement", {"median_ms": value})
    with pytest.raises(TypeError, match="JSON"):
        store.submit_job({"spec": object()})
    with pytest.raises(ValueError, match="not running"):
        store.finish_job(job.id, "w", JobState.RUNNING)
    assert len(store.events(job.id)) == len(store.jobs()) == 1


def test_eight_workers_take_each_of_many_jobs_once(url):
    """Each worker has a store of its own, as processes do."""
    jobs, workers = 200, 8
    with Store.open(url) as store:
        ids = {store.submit_job({"n": n}).id for n in range(jobs)}
        together = threading.Barrier(workers)

        def work(number):
            with Store.open(url) as own:
                together.wait()
                taken = []
                while (job := own.claim_job(f"worker {number}", LONG)) is not None:
                    taken.append(job.id)
                    assert own.finish_job(job.id, f"worker {number}", JobState.SUCCEEDED)
                return taken

        with ThreadPoolExecutor(workers) as threads:
            runs = Counter(job for taken in threads.map(work, range(workers)) for job in taken)
        assert set(runs) == ids
        assert set(runs.values()) == {1}
        assert {job.attempts for job in store.jobs(limit=jobs)} == {1}


def test_a_job_that_keeps_killing_its_workers_fails(store):
    job = store.submit_job({"n": 1})
    for number in range(MAX_FRUITLESS_ATTEMPTS):
        assert store.claim_job(f"worker {number}", -1.0).id == job.id
    assert store.claim_job("one more", 60) is None
    failed = store.job(job.id)
    assert (failed.state, failed.attempts) == (JobState.FAILED, MAX_FRUITLESS_ATTEMPTS)
    assert "5 workers in a row" in failed.message


def test_a_job_that_gets_on_or_is_given_back_is_tried_on(store):
    job = store.submit_job({"n": 1})
    for number in range(2 * MAX_FRUITLESS_ATTEMPTS):
        assert store.claim_job(f"worker {number}", -1.0).id == job.id
        if number % 3 == 2:
            store.add_event(job.id, "measurement", {"done": number})
    assert store.claim_job("a patient one", 60).id == job.id
    assert not store.release_job(job.id, "somebody else")
    for number in range(2 * MAX_FRUITLESS_ATTEMPTS):
        assert store.release_job(job.id, "a patient one" if number == 0 else "again")
        time.sleep(0.002)
        assert store.claim_job("again", 60).id == job.id
