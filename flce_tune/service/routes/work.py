"""For workers: take a job, report on it, end it or give it back.

A worker has a job for as long as it reports; whoever claims with the same ``owner`` again before
that ends gets the same job. All of it can be repeated: what was done before changes nothing.
"""

from __future__ import annotations

from typing import Annotated
from uuid import UUID

import anyio.to_thread
from fastapi import APIRouter, Query, Request, Response

from flce_tune.errors import InterchangeError
from flce_tune.service import space
from flce_tune.service.auth import Worker
from flce_tune.service.dependencies import LookupDep, MetricsDep, SettingsDep, StoreDep
from flce_tune.service.errors import ApiError, invalid, not_found, responses
from flce_tune.service.metrics import Metrics
from flce_tune.service.schemas import JobView
from flce_tune.service.schemas_work import (
    MAX_MEASUREMENTS,
    ClaimRequest,
    ClaimView,
    FinishRequest,
    LeaseView,
    Owned,
    Owner,
    ReportRequest,
)
from flce_tune.service.uploads import DOCUMENT_BODY, uploaded
from flce_tune.tuning_db.document import Document
from flce_tune.tuning_db.records import JobState
from flce_tune.tuning_db.store import Store

router = APIRouter(prefix="/v1/jobs", tags=["work"], dependencies=[Worker])

_ERRORS = responses(400, 401, 403, 404, 409, 413, 422, 429, 503)


@router.post(
    "/claim",
    response_model=ClaimView,
    responses=responses(400, 401, 403, 413, 422, 429, 503)
    | {204: {"description": "nothing to do"}},
)
def claim(body: ClaimRequest, store: StoreDep, settings: SettingsDep) -> Response | ClaimView:
    """Take the next job that one of the worker's devices can do."""
    job = store.claim_job(body.owner, settings.lease_seconds, body.devices)
    if job is None:
        return Response(status_code=204)
    return ClaimView(job=JobView.of(job), lease_seconds=settings.lease_seconds)


@router.post("/{job_id}/report", responses=_ERRORS)
def report(
    job_id: UUID, body: ReportRequest, store: StoreDep, settings: SettingsDep, metrics: MetricsDep
) -> LeaseView:
    """Keep a job, and add its events. Those whose number came before are skipped."""
    events = [(event.number, event.kind, event.data) for event in body.events]
    job = store.report_job(str(job_id), body.owner, settings.lease_seconds, events)
    if job is None:
        raise _lost(store, job_id, metrics)
    return LeaseView(lease_seconds=settings.lease_seconds, cancel_requested=job.cancel_requested)


@router.post(
    "/{job_id}/results",
    status_code=204,
    openapi_extra=DOCUMENT_BODY,
    responses=_ERRORS,
)
async def results(
    job_id: UUID,
    owner: Annotated[Owner, Query()],
    request: Request,
    store: StoreDep,
    lookup: LookupDep,
    metrics: MetricsDep,
) -> None:
    """Add what a job's worker measured, and replace the fronts of what it has finished.

    Measurements that came before are skipped; the winners are verified.
    """
    async with uploaded(request) as file:

        def run() -> None:
            try:
                document = Document.read(file, "document")
                if document.count > MAX_MEASUREMENTS:
                    raise invalid(
                        f"{document.count} measurements came, {MAX_MEASUREMENTS} are accepted at "
                        "once: send them in parts"
                    )
                measurements = list(document.measurements())
                for position, measurement in enumerate(measurements):
                    space.check(position, measurement)
                fronts = document.winner_records()
            except InterchangeError as error:
                raise invalid(str(error)) from error
            if not store.add_results(str(job_id), owner, measurements, fronts):
                raise _lost(store, job_id, metrics)
            if fronts:
                lookup.forget()

        await anyio.to_thread.run_sync(run)


@router.post("/{job_id}/finish", responses=_ERRORS)
def finish(job_id: UUID, body: FinishRequest, store: StoreDep, metrics: MetricsDep) -> JobView:
    """End a job."""
    state = JobState(body.state)
    done = store.finish_job(str(job_id), body.owner, state, body.message)
    job = store.job(str(job_id))
    if job is None or (not done and job.state is not state):
        raise _lost(store, job_id, metrics)
    return JobView.of(job)


@router.post("/{job_id}/release", status_code=204, responses=_ERRORS)
def release(job_id: UUID, body: Owned, store: StoreDep, metrics: MetricsDep) -> None:
    """Give a job back to the queue; the next to claim it goes on where its measurements stop."""
    if not store.release_job(str(job_id), body.owner):
        raise _lost(store, job_id, metrics)


def _lost(store: Store, job_id: UUID, metrics: Metrics) -> ApiError:
    if store.job(str(job_id)) is None:
        return not_found("unknown-job", f"no job {job_id}")
    metrics.lease_losses.inc()
    return ApiError(
        409,
        "lease-lost",
        f"job {job_id} is not yours any more: it has ended, or another worker took it over after "
        "you had not reported in time; leave it, and claim the next",
    )
