"""Events for many listeners from one reader of the database."""

import asyncio
from collections import Counter

import pytest

from flce_tune.errors import StoreUnavailableError
from flce_tune.service import feeds as feeds_module
from flce_tune.service.feeds import Feeds
from flce_tune.tuning_db.records import JobState
from flce_tune.tuning_db.store import Store

SPEC = {"device": "cpu", "problems": [{"tokens": 8, "hidden": 8, "vocab": 8}]}


@pytest.fixture
def job(store: Store) -> str:
    return store.submit_job(SPEC).id


async def ids(feeds: Feeds, job: str, after: int = 0) -> list[int]:
    return [event.id async for event in feeds.follow(job, after)]


def stored(store: Store, job: str) -> list[int]:
    return [event.id for event in store.events(job)]


async def write(store: Store, job: str, count: int) -> None:
    store.claim_job("worker", 60)
    for number in range(count):
        store.add_event(job, "progress", {"done": number})
        await asyncio.sleep(0.001)
    store.finish_job(job, "worker", JobState.SUCCEEDED)


@pytest.mark.parametrize("kept", [2, 1000])
def test_all_listeners_hear_all_events_in_order(
    store: Store, job: str, kept: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(feeds_module, "KEPT", kept)

    async def run() -> list[list[int]]:
        feeds = Feeds(store, 0.01)
        early = [asyncio.create_task(ids(feeds, job)) for _ in range(20)]
        writer = asyncio.create_task(write(store, job, 30))
        await asyncio.sleep(0.03)
        late = [asyncio.create_task(ids(feeds, job)) for _ in range(20)]
        await writer
        return await asyncio.gather(*early, *late, ids(feeds, job))

    heard = asyncio.run(run())
    expected = stored(store, job)
    assert len(expected) == 33
    assert all(one == expected for one in heard)


def test_a_listener_resumes_where_it_was(store: Store, job: str):
    asyncio.run(write(store, job, 5))
    expected = stored(store, job)

    async def run() -> list[int]:
        return await ids(Feeds(store, 0.01), job, expected[3])

    assert asyncio.run(run()) == expected[4:]


def test_the_database_is_read_once_for_all_and_no_more_when_nobody_listens(
    store: Store, job: str, monkeypatch: pytest.MonkeyPatch
):
    reads = Counter()
    read = Store.job

    def counted(self: Store, job_id: str):
        reads[job_id] += 1
        return read(self, job_id)

    monkeypatch.setattr(Store, "job", counted)

    async def run() -> tuple[int, int]:
        feeds = Feeds(store, 0.02)
        listeners = [asyncio.create_task(ids(feeds, job)) for _ in range(100)]
        while reads[job] < 5:
            await asyncio.sleep(0.01)
        during = len(feeds._feeds)
        for listener in listeners:
            listener.cancel()
        await asyncio.gather(*listeners, return_exceptions=True)
        await asyncio.sleep(0.05)
        before = reads[job]
        await asyncio.sleep(0.1)
        assert reads[job] == before < 100
        return during, len(feeds._feeds)

    assert asyncio.run(run()) == (1, 0)


def test_a_database_that_comes_back_is_read_on(
    store: Store, job: str, monkeypatch: pytest.MonkeyPatch
):
    read = Store.events
    failures = iter(range(3))

    def flaky(*arguments) -> list:
        if next(failures, None) is not None:
            raise StoreUnavailableError("away")
        return read(*arguments)

    store.request_cancel(job)
    monkeypatch.setattr(Store, "events", flaky)
    expected = [event.id for event in read(store, job)]

    async def run() -> list[int]:
        return await ids(Feeds(store, 0.01), job)

    assert asyncio.run(run()) == expected
