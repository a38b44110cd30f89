"""Events of jobs as they come; the database is asked once per job, however many listen."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Iterator

import anyio.to_thread

from flce_tune.errors import StoreError
from flce_tune.tuning_db.records import JobEvent
from flce_tune.tuning_db.store import Store

log = logging.getLogger(__name__)

KEPT = 1000
"""Events a feed remembers; who is further behind reads the database until they caught up."""


class Feeds:
    """The feeds of all jobs that somebody follows. For use in one event loop."""

    def __init__(self, store: Store, poll_seconds: float) -> None:
        self._store = store
        self._poll_seconds = poll_seconds
        self._feeds: dict[str, _Feed] = {}

    async def follow(self, job_id: str, after: int) -> AsyncIterator[JobEvent]:
        """The events with ids above ``after``, until the job has ended and all were seen."""
        async with contextlib.aclosing(self.batches(job_id, after)) as batches:
            async for events in batches:
                for event in events:
                    yield event

    async def batches(self, job_id: str, after: int) -> AsyncGenerator[list[JobEvent]]:
        """The same events, as many at a time as there are."""
        with self._joined(job_id, after) as feed:
            while True:
                if after < feed.start:
                    events = await anyio.to_thread.run_sync(self._store.events, job_id, after)
                else:
                    events = feed.after(after)
                if events:
                    after = events[-1].id
                    yield events
                elif feed.ended:
                    return
                else:
                    await feed.changed.wait()

    @contextlib.contextmanager
    def _joined(self, job_id: str, after: int) -> Iterator[_Feed]:
        feed = self._feeds.get(job_id)
        if feed is None:
            feed = self._feeds[job_id] = _Feed(self._store, job_id, after, self._poll_seconds)
        feed.listeners += 1
        try:
            yield feed
        finally:
            feed.listeners -= 1
            if feed.listeners == 0:
                feed.stop()
                del self._feeds[job_id]


class _Feed:
    """One job's latest events, read by one task."""

    def __init__(self, store: Store, job_id: str, start: int, poll_seconds: float) -> None:
        self._store = store
        self._job_id = job_id
        self._poll_seconds = poll_seconds
        self._events: deque[JobEvent] = deque()
        self.start = start  # what came after this id is remembered
        self.listeners = 0
        self.ended = False
        self.changed = asyncio.Event()  # a new one after every change
        self._task = asyncio.create_task(self._poll(start))

    def after(self, event_id: int) -> list[JobEvent]:
        """The remembered events with larger ids."""
        return [event for event in self._events if event.id > event_id]

    def stop(self) -> None:
        """Ask the database no more."""
        self._task.cancel()

    async def _poll(self, last: int) -> None:
        while not self.ended:
            try:
                # The state is read before the events: what a job wrote last is not missed.
                job = await anyio.to_thread.run_sync(self._store.job, self._job_id)
                events = await anyio.to_thread.run_sync(self._store.events, self._job_id, last)
            except StoreError as error:
                log.warning("job %s: events not read, trying again: %s", self._job_id, error)
                await asyncio.sleep(self._poll_seconds)
                continue
            if events:
                last = events[-1].id
                self._remember(events)
            self.ended = not events and (job is None or job.state.final)
            if events or self.ended:
                self.changed.set()
                self.changed = asyncio.Event()
            else:
                await asyncio.sleep(self._poll_seconds)

    def _remember(self, events: list[JobEvent]) -> None:
        self._events.extend(events)
        while len(self._events) > KEPT:
            self.start = self._events.popleft().id
