"""Where a runner's jobs come from, and the one in the database."""

from __future__ import annotations

from typing import Protocol

from flce_tune.service.executors import Executor
from flce_tune.service.job_process import JobProcess
from flce_tune.tuning_db.records import Job, JobState
from flce_tune.tuning_db.store import Store


class Work(Protocol):
    """A job that is ours for as long as its lease is renewed.

    Every method may raise FlceTuneError: the queue cannot be asked at the moment.
    """

    id: str
    lease_seconds: float

    def start(self) -> JobProcess:
        """Begin the sweep.

        Raises:
            InterchangeError: what the job needs cannot be read; it has failed.
        """

    def renew(self) -> bool | None:
        """Keep the job, and say whether somebody wants it cancelled; None: it is not ours."""

    def finish(self, state: JobState, message: str) -> None:
        """End the job, if it is still ours."""

    def release(self) -> None:
        """Give the job back, if it is still ours."""

    def close(self) -> None:
        """Be done with it, whatever became of it. Raises nothing."""


class Queue(Protocol):
    """Jobs to take."""

    def claim(self) -> Work | None:
        """Take the next job; None: nothing to do.

        Raises:
            FlceTuneError: the queue cannot be asked at the moment.
        """


class StoreQueue:
    """The jobs of a database that an executor can do."""

    def __init__(self, store: Store, owner: str, lease_seconds: float, executor: Executor) -> None:
        self._store = store
        self._owner = owner
        self._lease_seconds = lease_seconds
        self._executor = executor

    def claim(self) -> Work | None:
        """Take the next job."""
        wanted = self._executor.selectors()
        job = self._store.claim_job(self._owner, self._lease_seconds, wanted)
        if job is None:
            return None
        return StoreWork(self._store, job, self._owner, self._lease_seconds, self._executor)


class StoreWork:
    """A job of a database; its sweep writes there, too."""

    def __init__(
        self, store: Store, job: Job, owner: str, lease_seconds: float, executor: Executor
    ) -> None:
        self.id = job.id
        self.lease_seconds = lease_seconds
        self._store = store
        self._job = job
        self._owner = owner
        self._executor = executor

    def start(self) -> JobProcess:
        """Begin the sweep."""
        site = self._executor.site(self._job.spec["device"])
        return JobProcess(self._store.url, self._job, site)

    def renew(self) -> bool | None:
        """Extend the lease."""
        job = self._store.renew_lease(self.id, self._owner, self.lease_seconds)
        return None if job is None else job.cancel_requested

    def finish(self, state: JobState, message: str) -> None:
        """End the job."""
        self._store.finish_job(self.id, self._owner, state, message)

    def release(self) -> None:
        """Give the job back."""
        self._store.release_job(self.id, self._owner)

    def close(self) -> None:
        """Nothing is left to do."""
