"""Server-sent events of one job, through interruptions."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from flce_tune.client.transport import AGAIN, Retries, Transport, refusal
from flce_tune.errors import RefusedError, ServiceError
from flce_tune.tuning_db.records import JobState

SILENCE_S = 60.0  # the service says something every 15 seconds


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to a job."""

    id: int
    kind: str  # "state", "progress", "measurement", "winners", "log"
    data: Mapping[str, Any]

    @property
    def last(self) -> bool:
        """Whether the job has ended with it."""
        return self.kind == "state" and JobState(self.data["state"]).final


def follow(transport: Transport, retries: Retries, path: str, after: int) -> Iterator[Event]:
    """The events with ids above ``after``, until the job has ended.

    Raises:
        RefusedError, UnreachableError: and there was no event for as long as ``retries`` says.
    """
    attempt, end = 0, time.monotonic() + retries.seconds
    while True:
        failure: ServiceError | None = None
        try:
            for event in _connection(transport, path, after):
                yield event
                if event.last:
                    return
                after, attempt, end = event.id, 0, time.monotonic() + retries.seconds
        except httpx.HTTPError as error:
            failure = transport.unreachable(error)
        except RefusedError as error:
            if error.status not in AGAIN:
                raise
            failure = error
        wait = retries.wait(attempt, None)
        if failure is not None and time.monotonic() + wait > end:
            raise failure
        time.sleep(wait)
        attempt += 1


def _connection(transport: Transport, path: str, after: int) -> Iterator[Event]:
    headers = {"Last-Event-ID": str(after), "Accept": "text/event-stream"}
    timeout = httpx.Timeout(transport.http.timeout.connect, read=SILENCE_S)
    with transport.http.stream("GET", path, headers=headers, timeout=timeout) as response:
        if not response.is_success:
            response.read()
            raise refusal(response)
        fields: dict[str, str] = {}
        for line in response.iter_lines():
            name, _, value = line.partition(": ")
            if name in ("id", "event", "data"):
                fields[name] = value
            elif not line and fields.keys() >= {"id", "event", "data"}:
                yield Event(int(fields["id"]), fields["event"], json.loads(fields["data"]))
                fields = {}
