"""Takes jobs from the queue and sees them through.

The store knows everything: a job belongs to whoever holds its lease, and a lease that nobody
renews runs out. So a runner may die at any moment; the job is claimed again, by this service
once restarted or by another one on the same database, and the sweep resumes where its
measurements stop.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable

from flce_tune.errors import StoreError
from flce_tune.service.job_process import JobProcess, Outcome
from flce_tune.service.metrics import Metrics
from flce_tune.service.settings import ServiceSettings
from flce_tune.tuning_db.records import Job, JobState
from flce_tune.tuning_db.store import Store

log = logging.getLogger(__name__)


class JobRunner:
    """A thread that runs one job after the other, each in a process of its own."""

    def __init__(
        self,
        store: Store,
        settings: ServiceSettings,
        metrics: Metrics,
        on_finished: Callable[[], None],
    ) -> None:
        self._store = store
        self._settings = settings
        self._metrics = metrics
        self._on_finished = on_finished
        self._owner = f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="job runner")

    def start(self) -> None:
        """Begin to take jobs."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the running sweep and give its job back to the queue; returns when that is done."""
        self._stopping.set()
        self._thread.join()

    @property
    def alive(self) -> bool:
        """Whether jobs are being taken."""
        return self._thread.is_alive()

    def _loop(self) -> None:
        while not self._stopping.is_set():
            try:
                job = self._store.claim_job(self._owner, self._settings.lease_seconds)
                if job is not None:
                    self._run(job)
                    continue
            except (StoreError, OSError) as error:
                log.warning("no job could be started, trying again: %s", error)
            self._stopping.wait(self._settings.poll_seconds)

    def _run(self, job: Job) -> None:
        log.info("job %s: starting", job.id)
        process = JobProcess(self._store.url, job)
        try:
            self._supervise(job, process)
        finally:
            process.kill()

    def _supervise(self, job: Job, process: JobProcess) -> None:
        lease = _Lease(self._store, job.id, self._owner, self._settings.lease_seconds)
        outcome: Outcome | None = None
        while outcome is None:
            outcome = process.wait(min(self._settings.poll_seconds, lease.interval))
            lease.renew_if_due()
            if lease.lost:
                self._metrics.lease_losses.inc()
                log.warning("job %s: lease lost, leaving it to its new owner", job.id)
                return
            if lease.cancel_requested or self._stopping.is_set():
                process.stop(self._settings.stop_seconds)
        self._finish(job, outcome, cancelled=lease.cancel_requested)

    def _finish(self, job: Job, outcome: Outcome, *, cancelled: bool) -> None:
        if outcome.state is not None:
            state, message = outcome.state, outcome.message
        elif cancelled:
            state, message = JobState.CANCELLED, outcome.message or "cancelled while running"
        else:
            log.info("job %s: given back to the queue", job.id)
            self._store.release_job(job.id, self._owner)
            return
        log.info("job %s: %s %s", job.id, state.value, message)
        self._on_finished()
        self._store.finish_job(job.id, self._owner, state, message)


class _Lease:
    """Our claim to a job; lost when somebody else has it, or might have it by now."""

    def __init__(self, store: Store, job_id: str, owner: str, seconds: float) -> None:
        self._store = store
        self._job_id = job_id
        self._owner = owner
        self._seconds = seconds
        self._renewed_at = time.monotonic()
        self._due_at = self._renewed_at
        self.interval = min(1.0, seconds / 4)  # also how soon a cancellation is noticed
        self.lost = False
        self.cancel_requested = False

    def renew_if_due(self) -> None:
        now = time.monotonic()
        if now < self._due_at:
            return
        self._due_at = now + self.interval
        try:
            job = self._store.renew_lease(self._job_id, self._owner, self._seconds)
        except StoreError as error:
            log.warning("job %s: lease not renewed: %s", self._job_id, error)
            self.lost = now - self._renewed_at > self._seconds - self.interval
            return
        if job is None:
            self.lost = True
        else:
            self._renewed_at = now
            self.cancel_requested = job.cancel_requested
