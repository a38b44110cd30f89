"""Takes jobs from a queue and sees them through.

The queue knows everything: a job belongs to whoever holds its lease, and a lease that nobody
renews runs out. So a runner may die at any moment; the job is claimed again, by this process
once restarted or by another one, and the sweep resumes where its measurements stop.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable

from flce_tune.errors import FlceTuneError, InterchangeError
from flce_tune.service.job_process import JobProcess, Outcome
from flce_tune.service.queue import Queue, Work
from flce_tune.tuning_db.records import JobState

log = logging.getLogger(__name__)


def new_owner() -> str:
    """A name for one start of one worker."""
    return f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"


class JobRunner:
    """A thread that runs one job after the other, each in a process of its own.

    Args:
        queue: where they come from.
        poll_seconds: how often it is asked while there is nothing to do.
        stop_seconds: a sweep told to stop gets this long before it is killed.
        away_seconds: how long to wait once there was nothing to measure a job on.
        on_finished: called when a job has ended.
        on_lost: called when one had to be left, because its lease was not renewed.
    """

    def __init__(
        self,
        queue: Queue,
        *,
        poll_seconds: float,
        stop_seconds: float,
        away_seconds: float = 30.0,
        on_finished: Callable[[], None] = lambda: None,
        on_lost: Callable[[], None] = lambda: None,
    ) -> None:
        self._queue = queue
        self._poll_seconds = poll_seconds
        self._stop_seconds = stop_seconds
        self._away_seconds = away_seconds
        self._on_finished = on_finished
        self._on_lost = on_lost
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
                work = self._queue.claim()
                if work is not None:
                    self._run(work)
                    continue
            except (FlceTuneError, OSError) as error:
                log.warning("trying again: %s", error)
            self._stopping.wait(self._poll_seconds)

    def _run(self, work: Work) -> None:
        log.info("job %s: starting", work.id)
        try:
            process = self._start(work)
            if process is None:
                return
            try:
                self._supervise(work, process)
            finally:
                process.kill()
        finally:
            work.close()

    def _start(self, work: Work) -> JobProcess | None:
        """Begin the sweep; None if the job is at fault. If it is not, others may have it."""
        try:
            return work.start()
        except InterchangeError as error:
            self._finish(work, Outcome(JobState.FAILED, str(error)), cancelled=False)
            return None
        except (FlceTuneError, OSError):
            with contextlib.suppress(FlceTuneError):
                work.release()
            raise

    def _supervise(self, work: Work, process: JobProcess) -> None:
        lease = _Lease(work)
        outcome: Outcome | None = None
        while outcome is None:
            outcome = process.wait(min(self._poll_seconds, lease.interval))
            lease.renew_if_due()
            if lease.lost:
                self._on_lost()
                log.warning("job %s: lease lost, leaving it to its new owner", work.id)
                return
            if lease.cancel_requested or self._stopping.is_set():
                process.stop(self._stop_seconds)
        self._finish(work, outcome, cancelled=lease.cancel_requested)

    def _finish(self, work: Work, outcome: Outcome, *, cancelled: bool) -> None:
        if outcome.state is not None:
            state, message = outcome.state, outcome.message
        elif cancelled:
            state, message = JobState.CANCELLED, outcome.message or "cancelled while running"
        else:
            log.info("job %s: given back to the queue %s", work.id, outcome.message)
            work.release()
            if not self._stopping.is_set():  # there is no place for it now
                self._stopping.wait(self._away_seconds)
            return
        log.info("job %s: %s %s", work.id, state.value, message)
        self._on_finished()
        work.finish(state, message)


class _Lease:
    """Our claim to a job; lost when somebody else has it, or might have it by now."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._renewed_at = time.monotonic()
        self._due_at = self._renewed_at
        self.interval = min(1.0, work.lease_seconds / 4)  # also how soon a cancellation is noticed
        self.lost = False
        self.cancel_requested = False

    def renew_if_due(self) -> None:
        now = time.monotonic()
        if now < self._due_at:
            return
        self._due_at = now + self.interval
        try:
            wanted = self._work.renew()
        except FlceTuneError as error:
            log.warning("job %s: lease not renewed: %s", self._work.id, error)
            left = self._work.lease_seconds - (time.monotonic() - self._renewed_at)
            self.lost = left < self.interval
            return
        if wanted is None:
            self.lost = True
        else:
            self._renewed_at = now
            self.cancel_requested = wanted
