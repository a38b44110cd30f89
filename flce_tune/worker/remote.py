"""The queue of a service, seen from a machine that cannot reach its database.

A job's sweep writes to a database of its own on this machine, which begins with what the service
knows of the job's problems: so the sweep resumes where measurements stop, whoever took them. What
it adds is sent on about once a second. The service is not needed in between: what could not be
sent is sent later, even when the job has gone to somebody else by then.
"""

from __future__ import annotations

import io
import logging
import tempfile
from dataclasses import dataclass
from pathlib import Path

from flce_tune.client import Client
from flce_tune.dispatch.convert import device_slug
from flce_tune.errors import FlceTuneError, RefusedError
from flce_tune.service.executors import Executor, meant
from flce_tune.service.job_process import JobProcess
from flce_tune.service.schemas import JobSpec
from flce_tune.service.schemas_work import ClaimView
from flce_tune.tuning_db.interchange import dump, import_file
from flce_tune.tuning_db.records import JobState
from flce_tune.tuning_db.store import Store
from flce_tune.worker.outbox import Letter, Outbox

log = logging.getLogger(__name__)

LATER = frozenset({401, 403, 429, 502, 503, 504})
"""Refusals that may be over later: of the caller, or for want of something."""


@dataclass(frozen=True, slots=True)
class Link:
    """What ties one worker to a service."""

    client: Client  # gives up at once, for whoever asks comes again
    patient: Client  # tries for about as long as a lease lasts; to begin and end a job
    owner: str  # unique to one start of one worker
    executor: Executor  # what it does jobs on


class RemoteQueue:
    """The jobs of a service that a worker's executor can do."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._unsent: list[RemoteWork] = []

    def claim(self) -> RemoteWork | None:
        """Take the next job, once what earlier ones left unsent has arrived.

        Raises:
            ServiceError: the service refused, or gave no answer.
        """
        while self._unsent:
            self._unsent[0].deliver_late()
            self._unsent.pop(0)
        link = self._link
        claimed = link.client.claim(link.owner, link.executor.selectors())
        return None if claimed is None else RemoteWork(link, claimed, self._unsent)


class RemoteWork:
    """A job of a service; a ``Work`` for the runner.

    Args:
        link: to the service.
        claimed: the job.
        unsent: where it puts itself when it is closed with something unsent.
    """

    def __init__(self, link: Link, claimed: ClaimView, unsent: list[RemoteWork]) -> None:
        self.id = claimed.job.id
        self.lease_seconds = claimed.lease_seconds
        self._link = link
        self._spec = claimed.job.spec
        self._unsent = unsent
        self._refusal: str | None = None  # why the service takes no more results of it
        self._end: tuple[JobState, str] | None = None  # that the service has not heard of
        self._folder = tempfile.TemporaryDirectory(prefix="flce-tune-worker-")
        self._store = Store.open(f"sqlite:///{Path(self._folder.name) / 'job.sqlite3'}")
        self._outbox: Outbox | None = None

    def start(self) -> JobProcess:
        """Fetch what is known, and begin the sweep.

        Raises:
            ServiceError: the service refused, or gave no answer.
            InterchangeError: what it knows is of another version.
        """
        self._fetch_known(self._spec)
        job = self._store.submit_job(self._spec.model_dump(mode="json"))
        self._outbox = Outbox(self._store, job.id)
        return JobProcess(self._store.url, job, self._link.executor.site(self._spec.device))

    def renew(self) -> bool | None:
        """Send what is new, and keep the job."""
        try:
            self._send_all(self._link.client)
            lease = self._link.client.report(self.id, self._link.owner)
        except RefusedError as error:
            if error.kind == "lease-lost":
                return None
            if error.status in LATER:
                raise
            self._refusal = str(error)
            return True
        return lease.cancel_requested

    def finish(self, state: JobState, message: str) -> None:
        """Send the rest, and end the job."""
        if self._refusal is not None:
            state, message = JobState.FAILED, f"the service refused its results: {self._refusal}"
        else:
            self._end = state, message
            self._send_all(self._link.patient)
        self._link.patient.finish(self.id, self._link.owner, state, message)
        self._end = None

    def release(self) -> None:
        """Send the rest, and give the job back."""
        self._send_all(self._link.patient)
        self._link.patient.release(self.id, self._link.owner)

    def close(self) -> None:
        """Be done with it; what is unsent stays for ``deliver_late``."""
        unsent = self._end is not None or (self._outbox is not None and self._outbox.has_results)
        if unsent and self._refusal is None:
            self._unsent.append(self)
        else:
            self._discard()

    def deliver_late(self) -> None:
        """Send what is left, as this job's while that is ours, else as measurements alone.

        A job whose end was not heard is ended, so that nobody begins it again.

        Raises:
            ServiceError: it did not arrive; try again later.
        """
        try:
            try:
                self._send_all(self._link.client)
                if self._end is not None:
                    self._link.client.finish(self.id, self._link.owner, *self._end)
            except RefusedError as error:
                if error.kind != "lease-lost":
                    raise
                self._import_all()
        except RefusedError as error:
            if error.status in LATER:
                raise
            log.error("job %s: the service refused its last results: %s", self.id, error)
        self._discard()

    def _fetch_known(self, spec: JobSpec) -> None:
        link = self._link
        device, *_ = meant(spec.device, link.executor.devices()).values()
        for problem in spec.problems:
            with tempfile.TemporaryFile(dir=self._folder.name) as file:
                try:
                    link.patient.export(file, device=device_slug(device), problem=problem)
                except RefusedError as error:
                    if error.kind == "unknown-device":
                        return
                    raise
                import_file(self._store, file, source="the service's export")
            link.patient.report(self.id, link.owner)

    def _send_all(self, client: Client) -> None:
        if self._outbox is None:  # not even begun
            return
        for letter in self._outbox.letters():
            self._send(client, letter)

    def _send(self, client: Client, letter: Letter) -> None:
        fronts = [winner for front in letter.fronts.values() for winner in front]
        measurements = [*letter.measurements, *(winner.measurement for winner in fronts)]
        if measurements:
            client.send_results(self.id, self._link.owner, dump(measurements, fronts))
        if letter.events:
            events = [(event.id, event.kind, event.data) for event in letter.events]
            client.report(self.id, self._link.owner, events)

    def _import_all(self) -> None:
        for letter in self._outbox.letters() if self._outbox is not None else ():
            if letter.measurements:
                document = dump(letter.measurements, [])
                self._link.client.import_(io.BytesIO(document.encode()))

    def _discard(self) -> None:
        try:
            self._store.close()
            self._folder.cleanup()
        except (FlceTuneError, OSError) as error:
            log.warning("%s was not removed: %s", self._folder.name, error)
