"""The client: a method for each thing the service can do."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, BinaryIO, Literal, TypeVar

import httpx
from pydantic import BaseModel, TypeAdapter, ValidationError
from typing_extensions import Self

from flce_tune.client.stream import Event, follow
from flce_tune.client.transport import Retries, Transport, refusal
from flce_tune.errors import ServiceError
from flce_tune.service.schemas import (
    BestView,
    DeviceView,
    ExplanationView,
    ImportView,
    JobRequest,
    JobView,
    Page,
    ProblemSpec,
    WinnerView,
)
from flce_tune.service.schemas_compare import ComparisonView
from flce_tune.service.schemas_work import ClaimView, LeaseView
from flce_tune.tuning_db.records import JobState

TIMEOUT_S = 10.0
_BLOCK = 1 << 16
View = TypeVar("View", bound=BaseModel)


class Client:
    """A service, for use by one thread at a time.

    Every method may raise RefusedError, when the service says no, and UnreachableError, when it
    did not answer in time; before that, requests are sent again as ``retries`` says. That is safe
    for all of them: what came twice is done once.

    Args:
        base_url: of the service, http or https.
        token: see ``flce-tune token``; sent to this service alone.
        timeout_s: for the connection, and for each wait for more data.
        retries: how long to try again what may succeed later.
        transport: what sends the requests; for tests.
    """

    def __init__(
        self,
        base_url: str,
        *,
        token: str | None = None,
        timeout_s: float = TIMEOUT_S,
        retries: Retries | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._retries = retries or Retries()
        self._transport = Transport(base_url, token, timeout_s, self._retries, transport)

    def close(self) -> None:
        """Close all connections."""
        self._transport.http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Results

    def devices(self) -> list[DeviceView]:
        """List the devices that anything was measured on."""
        return self._ask(Page[DeviceView], "GET", "/v1/devices").items

    def winners(self, **filters: Any) -> list[WinnerView]:
        """List winners, fastest first; filters as in ``GET /v1/winners``."""
        return self._ask(Page[WinnerView], "GET", "/v1/winners", params=_given(filters)).items

    def best(self, **query: Any) -> BestView:
        """Find the config for a problem on a device; query as in ``GET /v1/configs/best``."""
        return self._ask(BestView, "GET", "/v1/configs/best", params=_given(query))

    def explain(self, **query: Any) -> ExplanationView:
        """Tell what each rule found; query as in ``GET /v1/configs/best``."""
        return self._ask(ExplanationView, "GET", "/v1/explain", params=_given(query))

    def compare(
        self, a: str, b: str, *, by: Literal["device", "toolchain"] = "device", **filters: Any
    ) -> ComparisonView:
        """Compare two devices or two toolchains; filters as in ``GET /v1/compare``."""
        sides = {"a": a, "b": b, "by": by}
        return self._ask(ComparisonView, "GET", "/v1/compare", params=sides | _given(filters))

    # Jobs

    def submit(self, request: JobRequest, *, idempotency_key: str | None = None) -> JobView:
        """Queue a job; with a key used before, return the job it made then."""
        headers = {"Idempotency-Key": idempotency_key or uuid.uuid4().hex}
        body = request.model_dump(mode="json", exclude_defaults=True)
        return self._ask(JobView, "POST", "/v1/jobs", json=body, headers=headers)

    def job(self, job_id: str) -> JobView:
        """Say how far a job is."""
        return self._ask(JobView, "GET", f"/v1/jobs/{job_id}")

    def jobs(self, *states: JobState) -> Iterator[JobView]:
        """List jobs, newest first, page by page; without states, those of all."""
        query: dict[str, Any] = {"state": [state.value for state in states]}
        while True:
            page = self._ask(Page[JobView], "GET", "/v1/jobs", params=query)
            yield from page.items
            if page.next is None:
                return
            query["cursor"] = page.next

    def cancel(self, job_id: str) -> JobView:
        """Cancel a job: a queued one at once, a running one once its worker has stopped."""
        return self._ask(JobView, "POST", f"/v1/jobs/{job_id}/cancel")

    def follow(self, job_id: str, after: int = 0) -> Iterator[Event]:
        """The events of a job with ids above ``after``, live, until it has ended."""
        return follow(self._transport, self._retries, f"/v1/jobs/{job_id}/events", after)

    # Whole databases

    def export(
        self,
        file: BinaryIO,
        *,
        device: str | None = None,
        problem: ProblemSpec | None = None,
        winners_only: bool = False,
    ) -> None:
        """Write measurements and winners to ``file``, from where it stands, as one document."""
        query = _given({"device": device, "winners_only": winners_only or None})
        if problem is not None:
            query |= problem.model_dump(mode="json")
        start = file.tell()
        with self._streamed("/v1/export", query) as response:
            file.seek(start)
            file.truncate()
            for block in response.iter_bytes(_BLOCK):
                file.write(block)

    def import_(self, file: BinaryIO) -> ImportView:
        """Add the measurements and winners of a document; winners count as unverified."""
        start = file.tell()
        return self._ask(
            ImportView,
            "POST",
            "/v1/import",
            content=_Blocks(file, start),
            headers={"Content-Type": "application/json"},
        )

    # Work

    def claim(self, owner: str, devices: Iterable[str]) -> ClaimView | None:
        """Take the next job that one of ``devices`` can do; None: nothing to do."""
        body = {"owner": owner, "devices": [*devices]}
        response = self._transport.send("POST", "/v1/jobs/claim", json=body)
        return None if response.status_code == 204 else _read(ClaimView, response)

    def report(
        self, job_id: str, owner: str, events: Iterable[tuple[int, str, Mapping[str, Any]]] = ()
    ) -> LeaseView:
        """Keep a job, and add events: number, kind, data. Numbers seen before are skipped."""
        told = [{"number": number, "kind": kind, "data": data} for number, kind, data in events]
        body = {"owner": owner, "events": told}
        return self._ask(LeaseView, "POST", f"/v1/jobs/{job_id}/report", json=body)

    def send_results(self, job_id: str, owner: str, document: str) -> None:
        """Add what a job's worker measured, and the fronts of what it has finished."""
        self._transport.send(
            "POST",
            f"/v1/jobs/{job_id}/results",
            params={"owner": owner},
            content=document,
            headers={"Content-Type": "application/json"},
        )

    def finish(self, job_id: str, owner: str, state: JobState, message: str) -> JobView:
        """End a job."""
        body = {"owner": owner, "state": state.value, "message": message}
        return self._ask(JobView, "POST", f"/v1/jobs/{job_id}/finish", json=body)

    def release(self, job_id: str, owner: str) -> None:
        """Give a job back to the queue."""
        self._transport.send("POST", f"/v1/jobs/{job_id}/release", json={"owner": owner})

    def _ask(self, view: type[View], method: str, path: str, **request: Any) -> View:
        return _read(view, self._transport.send(method, path, **request))

    @contextmanager
    def _streamed(self, path: str, query: Mapping[str, Any]) -> Iterator[httpx.Response]:
        """One attempt, because what came of it may have been used already."""
        try:
            with self._transport.http.stream("GET", path, params=query) as response:
                if not response.is_success:
                    response.read()
                    raise refusal(response)
                yield response
        except httpx.HTTPError as error:
            raise self._transport.unreachable(error) from error


class _Blocks:
    """A file in pieces, from the same place each time it is sent."""

    def __init__(self, file: BinaryIO, start: int) -> None:
        self._file = file
        self._start = start

    def __iter__(self) -> Iterator[bytes]:
        self._file.seek(self._start)
        while block := self._file.read(_BLOCK):
            yield block


def _given(query: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in query.items() if value is not None}


def _read(view: type[View], response: httpx.Response) -> View:
    try:
        return TypeAdapter(view).validate_json(response.content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"])) or "answer"
        raise ServiceError(
            f"{response.request.url.copy_with(userinfo=b'', query=None)} gave an answer that this "
            f"version does not read ({place}: {first['msg']}): use the service's version of "
            "flce-tune, or a newer one"
        ) from error
