"""A worker: takes jobs of a service, one after the other, until told to stop."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from flce_tune.client import Client, Retries
from flce_tune.errors import FlceTuneError
from flce_tune.service.executors import Executor, LocalExecutor
from flce_tune.service.runner import JobRunner, new_owner
from flce_tune.worker.remote import Link, RemoteQueue

log = logging.getLogger(__name__)

PATIENCE_S = 20.0


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """What one worker is told."""

    server: str  # base URL of the service
    token: str | None = field(default=None, repr=False)
    executor: Executor = field(default_factory=LocalExecutor)  # what it does jobs on
    poll_seconds: float = 2.0  # how often the service is asked for a job
    stop_seconds: float = 10.0  # a sweep told to stop gets this long before it is killed


def work(settings: WorkerSettings, should_stop: Callable[[], bool]) -> None:
    """Take jobs until ``should_stop``, which is asked all the time, says so.

    A running job is given back then.

    Raises:
        FlceTuneError: the worker broke.
    """
    owner = new_owner()
    once = Retries(seconds=0)
    with (
        Client(settings.server, token=settings.token, retries=once) as client,
        Client(settings.server, token=settings.token, retries=Retries(PATIENCE_S)) as patient,
    ):
        queue = RemoteQueue(Link(client, patient, owner, settings.executor))
        runner = JobRunner(
            queue, poll_seconds=settings.poll_seconds, stop_seconds=settings.stop_seconds
        )
        log.info("worker %s: %s for %s", owner, settings.executor, settings.server)
        runner.start()
        while runner.alive and not should_stop():
            time.sleep(0.1)
        broken = not runner.alive
        runner.stop()
    if broken:
        raise FlceTuneError("the worker broke; its log says why")
