"""Tuning jobs: submit, list, inspect, cancel, follow."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from typing import Annotated, Any
from uuid import UUID

import anyio.to_thread
from fastapi import APIRouter, Header, Query, Request, Response
from sse_starlette import EventSourceResponse, ServerSentEvent

from flce_tune.dispatch.convert import problem_of
from flce_tune.errors import UnknownStrategyError
from flce_tune.kernels import strategies
from flce_tune.kernels.problem import Problem
from flce_tune.service.auth import Submitter, SubmitterDep, require_admin
from flce_tune.service.dependencies import FeedsDep, StoreDep
from flce_tune.service.devices import means
from flce_tune.service.errors import ApiError, invalid, not_found, responses
from flce_tune.service.feeds import Feeds
from flce_tune.service.lookup import preset_of
from flce_tune.service.schemas import JobRequest, JobSpec, JobView, Page, ProblemSpec
from flce_tune.sweep.presets import problems_for
from flce_tune.tuning_db.records import Job, JobEvent, JobState
from flce_tune.tuning_db.store import Store

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])

_MISSES_READ = 10_000

EventId = Annotated[int, Header(alias="Last-Event-ID", ge=0, le=2**63 - 1)]


@router.post(
    "",
    status_code=202,
    responses=responses(400, 401, 403, 404, 409, 413, 422, 429, 503)
    | {202: {"headers": {"Location": {"schema": {"type": "string"}}}}},
)
def submit(
    body: JobRequest,
    store: StoreDep,
    request: Request,
    response: Response,
    scope: SubmitterDep,
    idempotency_key: Annotated[str | None, Header(min_length=1, max_length=200)] = None,
) -> JobView:
    """Queue a job. The same Idempotency-Key again answers with the job it made the first time."""
    if body.priority > 0:
        require_admin(request, scope)
    spec = _spec(body, store).model_dump(mode="json")
    job = store.submit_job(spec, priority=body.priority, idempotency_key=idempotency_key)
    if not _asks_for(job, spec):
        raise ApiError(
            409,
            "idempotency-key-reused",
            f"this Idempotency-Key belongs to job {job.id}, which asks for something else: "
            "use a new key for a new job",
        )
    response.headers["Location"] = f"/v1/jobs/{job.id}"
    return JobView.of(job)


@router.get("", responses=responses(422, 503))
def list_jobs(
    store: StoreDep,
    state: Annotated[list[JobState] | None, Query(description="any of these")] = None,
    cursor: Annotated[UUID | None, Query(description="'next' of the page before")] = None,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
) -> Page[JobView]:
    """List jobs, newest first."""
    before = None if cursor is None else str(cursor)
    if before is not None and store.job(before) is None:
        raise invalid(f"no job {before}: a cursor is the 'next' of an earlier page")
    found = store.jobs(states=state, before=before, limit=limit + 1)
    return Page(
        items=[JobView.of(job) for job in found[:limit]],
        next=found[limit - 1].id if len(found) > limit else None,
    )


@router.get("/{job_id}", responses=responses(404, 422, 503))
def inspect(job_id: UUID, store: StoreDep) -> JobView:
    """Say how far a job is."""
    return JobView.of(_job(store, job_id))


@router.post(
    "/{job_id}/cancel",
    status_code=202,
    dependencies=[Submitter],
    responses=responses(401, 403, 404, 409, 422, 429, 503),
)
def cancel(job_id: UUID, store: StoreDep) -> JobView:
    """Cancel a job: a queued one at once, a running one as soon as its worker has stopped."""
    _job(store, job_id)
    store.request_cancel(str(job_id))
    job = _job(store, job_id)
    if job.state in (JobState.SUCCEEDED, JobState.FAILED):
        raise ApiError(409, "job-finished", f"job {job.id} has already {job.state.value}")
    return JobView.of(job)


_EVENT_SCHEMA = {
    "type": "object",
    "description": "one event",
    "required": ["id", "event", "data"],
    "properties": {
        "id": {"type": "string", "description": "for Last-Event-ID"},
        "event": {"type": "string", "examples": ["state", "progress", "measurement", "winners"]},
        "data": {"type": "string", "contentMediaType": "application/json"},
    },
}


@router.get(
    "/{job_id}/events",
    response_class=EventSourceResponse,
    responses=responses(404, 422, 503)
    | {
        200: {
            "description": "one event per change, until the job has ended",
            "content": {"text/event-stream": {"schema": _EVENT_SCHEMA}},
        }
    },
)
async def follow(
    job_id: UUID, store: StoreDep, feeds: FeedsDep, last_event_id: EventId = 0
) -> EventSourceResponse:
    """Follow a job live. Send the last event's id as Last-Event-ID to resume where you were."""
    await anyio.to_thread.run_sync(_job, store, job_id)
    return EventSourceResponse(_events(feeds, str(job_id), last_event_id), ping=15)


async def _events(feeds: Feeds, job_id: str, after: int) -> AsyncIterator[ServerSentEvent]:
    async for event in feeds.follow(job_id, after):
        yield _server_sent(event)


def _server_sent(event: JobEvent) -> ServerSentEvent:
    data = {"created_at": event.created_at.isoformat(), **event.data}
    return ServerSentEvent(data=json.dumps(data), event=event.kind, id=str(event.id))


def _job(store: Store, job_id: UUID) -> Job:
    job = store.job(str(job_id))
    if job is None:
        raise not_found("unknown-job", f"no job {job_id}")
    return job


def _asks_for(job: Job, spec: dict[str, Any]) -> bool:
    """Whether a job is what was asked for; what was missed most changes between two attempts."""
    varies = {"problems": None} if spec["missed"] is not None else {}
    return {**job.spec, **varies} == {**spec, **varies}


def _spec(body: JobRequest, store: Store) -> JobSpec:
    try:
        for name in body.options.strategies or ():
            strategies.require_tunable(name)
    except UnknownStrategyError as error:
        raise invalid(str(error)) from error
    problems = body.problems
    if body.preset is not None:
        preset = preset_of(body.preset)
        found = problems_for(preset, body.tokens, body.dtype, body.mode)
        problems = [ProblemSpec.of(problem) for problem in found]
    if body.missed is not None:
        problems = _missed(body.device, body.missed, store)
    return JobSpec(
        device=body.device,
        problems=problems,
        options=body.options,
        preset=body.preset,
        missed=body.missed,
    )


def _missed(device: str, count: int, store: Store) -> list[ProblemSpec]:
    """What was missed most on the devices that a job may run on, each problem once."""
    found: dict[Problem, ProblemSpec] = {}
    for miss in store.misses(limit=_MISSES_READ):
        if len(found) < count and means(device, miss.device):
            with contextlib.suppress(ValueError):  # of another version
                problem = problem_of(miss.problem, miss.tokens)
                found.setdefault(problem, ProblemSpec.of(problem))
    if not found:
        raise not_found(
            "nothing-missed", f"nothing was missed on a device {device!r}; /v1/misses lists all"
        )
    return [*found.values()]
