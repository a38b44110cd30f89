"""Claims of jobs, made while others claim and write."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import create_engine, event, text

from flce_tune.tuning_db import jobs
from flce_tune.tuning_db.records import JobState
from flce_tune.tuning_db.store import Store

LONG = 3600.0
WAIT_S = 30.0  # for a lock, before a claim that should have waited for none fails


@pytest.fixture
def shared(postgres_url: str) -> Iterator[Store]:
    with Store.open(postgres_url, wait_seconds=WAIT_S) as opened:
        yield opened


@pytest.fixture
def waiting(postgres: str) -> Iterator[Callable[[], int]]:
    """How many statements on jobs wait for a lock."""
    query = text(
        "SELECT count(*) FROM pg_stat_activity "
        "WHERE wait_event_type = 'Lock' AND query LIKE '%job%' AND pid <> pg_backend_pid()"
    )
    engine = create_engine(postgres)

    def count() -> int:
        with engine.connect() as connection:
            return connection.execute(query).scalar_one()

    yield count
    engine.dispose()


def claim_open(store: Store, owner: str):
    """A claim whose transaction lasts as long as the context."""
    return store._database.claiming(owner)


def test_eight_claimers_take_each_of_200_jobs_once(postgres_url: str, shared: Store):
    ids = [shared.submit_job({"n": n}).id for n in range(200)]
    together = threading.Barrier(8)

    def claim_all(number: int) -> list[str]:
        taken: list[str] = []
        with Store.open(postgres_url) as own:
            together.wait()
            while (job := own.claim_job(f"{number}/{len(taken)}", LONG)) is not None:
                taken.append(job.id)
        return taken

    with ThreadPoolExecutor(8) as threads:
        taken = Counter(job for one in threads.map(claim_all, range(8)) for job in one)
    assert taken == Counter(ids)
    running = shared.jobs(limit=200)
    assert {job.attempts for job in running} == {1}
    assert len({job.lease_owner for job in running}) == 200
    for job in running:
        states = [event.data for event in shared.events(job.id)]
        assert [one["state"] for one in states] == ["queued", "running"]
        assert states[1]["owner"] == job.lease_owner


def test_a_claim_left_open_keeps_nobody_from_the_next_job(shared: Store):
    first, second, third = (shared.submit_job({"n": n}).id for n in range(3))
    with claim_open(shared, "slow") as slow:
        assert jobs.claim(slow, "slow", LONG, None).id == first
        assert shared.claim_job("quick", LONG).id == second
        with claim_open(shared, "another") as another:
            assert jobs.claim(another, "another", LONG, None).id == third
            assert shared.claim_job("late", LONG) is None
            another.rollback()
        assert shared.claim_job("late", LONG).id == third
    assert [shared.job(n).lease_owner for n in (first, second, third)] == ["slow", "quick", "late"]


def test_a_claim_waits_for_no_other_writer(shared: Store):
    job = shared.submit_job({})
    with shared._database.writing() as session:
        session.connection()
        assert shared.claim_job("worker", LONG).id == job.id


@pytest.mark.parametrize("change", ["cancel", "renew"])
def test_who_changes_a_job_that_is_being_claimed_waits_for_the_claim(
    shared: Store, waiting: Callable[[], int], change: str
):
    job = shared.submit_job({})
    if change == "renew":
        shared.claim_job("lost", -1.0)
    with ThreadPoolExecutor(1) as thread, claim_open(shared, "heir") as heir:
        assert jobs.claim(heir, "heir", LONG, None).id == job.id
        changing = {
            "cancel": lambda: shared.request_cancel(job.id),
            "renew": lambda: shared.renew_lease(job.id, "lost", LONG),
        }
        changed = thread.submit(changing[change])
        while not waiting():
            assert not changed.done()
        heir.commit()
        after = changed.result()
    if change == "cancel":
        assert (after.state, after.cancel_requested) == (JobState.RUNNING, True)
    else:
        assert after is None
    assert shared.job(job.id).lease_owner == "heir"


def test_the_same_owner_twice_at_once_gets_one_job(store: Store):
    for n in range(4):
        store.submit_job({"n": n})
    together = threading.Barrier(8)

    def claim(_: int) -> str:
        together.wait()
        return store.claim_job("worker", LONG).id

    with ThreadPoolExecutor(8) as threads:
        assert len(set(threads.map(claim, range(8)))) == 1
    assert store.count_jobs()[JobState.RUNNING] == 1


def test_the_jobs_of_others_devices_are_left(store: Store):
    gpu, cpu = (store.submit_job({"device": device}).id for device in ("sm_90", "cpu"))
    assert store.claim_job("a", LONG, ["auto", "cpu"]).id == cpu
    assert store.claim_job("b", LONG, ["auto", "cpu"]) is None
    assert store.claim_job("b", LONG, ["cuda", "sm_90"]).id == gpu


def test_finding_and_taking_are_one_statement(store: Store):
    store.submit_job({})
    told: list[str] = []
    engine = store._database._engine

    @event.listens_for(engine, "before_cursor_execute")
    def note(_connection, _cursor, statement, *_rest):
        told.append(" ".join(statement.split()))

    store.claim_job("worker", LONG)
    taking = [one for one in told if "ORDER BY" in one and "FROM job " in one]
    assert len(taking) == 1
    assert taking[0].startswith("UPDATE job SET")
    assert "RETURNING" in taking[0]
    if engine.dialect.name == "postgresql":
        assert "LIMIT" in taking[0]
        assert "FOR NO KEY UPDATE SKIP LOCKED" in taking[0]
        assert not any("FOR UPDATE" in one for one in told)
