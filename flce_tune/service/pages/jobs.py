"""Jobs: the list, one job with its live progress, and how to cancel it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Annotated, Any
from uuid import UUID

import anyio.to_thread
from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse, RedirectResponse
from sse_starlette import EventSourceResponse, ServerSentEvent

from flce_tune.service.dependencies import FeedsDep, StoreDep
from flce_tune.service.errors import not_found
from flce_tune.service.feeds import Feeds
from flce_tune.service.pages import progress
from flce_tune.service.pages.progress import Progress
from flce_tune.service.pages.render import PageRoute, fragment, page
from flce_tune.service.pages.session import SubmitterDep, Viewer, ViewerDep
from flce_tune.service.routes import jobs as api
from flce_tune.service.schemas import JobView
from flce_tune.tuning_db.records import Job, JobState
from flce_tune.tuning_db.store import Store

router = APIRouter(include_in_schema=False, route_class=PageRoute)

PER_PAGE = 25


@dataclass(frozen=True, slots=True)
class JobLine:
    """A job in a list."""

    job: JobView
    title: str
    done: int = 0  # of the running stage
    total: int = 0


def job_lines(store: Store, jobs: Sequence[Job]) -> list[JobLine]:
    """Jobs for a list; how far the running ones are costs one query each."""
    lines = []
    for job in jobs:
        view, so_far = JobView.of(job), Progress(len(job.spec["problems"]))
        if job.state is JobState.RUNNING:
            latest = store.latest_event(job.id, ["progress", "measurement"])
            so_far.add([latest] if latest is not None else [])
        lines.append(JobLine(view, progress.title(view.spec), so_far.done, so_far.total))
    return lines


@router.get("/jobs")
def list_page(
    request: Request,
    store: StoreDep,
    viewer: ViewerDep,
    state: Annotated[JobState | None, Query()] = None,
    before: Annotated[UUID | None, Query()] = None,
) -> HTMLResponse:
    """List jobs, newest first."""
    found = store.jobs(
        states=None if state is None else [state],
        before=None if before is None else str(before),
        limit=PER_PAGE + 1,
    )
    return page(
        request,
        "jobs.html",
        lines=job_lines(store, found[:PER_PAGE]),
        next=found[PER_PAGE - 1].id if len(found) > PER_PAGE else None,
        counts=store.count_jobs(),
        state=state,
        before=before,
    )


@router.get("/jobs/{job_id}")
def job_page(job_id: UUID, request: Request, store: StoreDep, viewer: ViewerDep) -> HTMLResponse:
    """Show a job; the part that changes is kept up to date by ``/jobs/{job_id}/live``."""
    job = _job(store, job_id)
    so_far, after = Progress(len(job.spec.problems)), 0
    while events := store.events(job.id, after):
        so_far.add(events)
        after = events[-1].id
    return page(request, "job.html", **_context(job, so_far, viewer))


@router.get("/jobs/{job_id}/live", response_class=EventSourceResponse)
async def live(
    job_id: UUID, store: StoreDep, feeds: FeedsDep, viewer: ViewerDep
) -> EventSourceResponse:
    """Send the changing part of a job's page whenever it changes, then the event "ended"."""
    job = await anyio.to_thread.run_sync(_job, store, job_id)
    return EventSourceResponse(_panels(store, feeds, job, viewer), ping=15)


async def _panels(
    store: Store, feeds: Feeds, job: JobView, viewer: Viewer
) -> AsyncIterator[ServerSentEvent]:
    so_far = Progress(len(job.spec.problems))
    async with contextlib.aclosing(feeds.batches(job.id, 0)) as batches:
        async for events in batches:
            so_far.add(events)
            job = await anyio.to_thread.run_sync(_job, store, UUID(job.id))
            yield ServerSentEvent(data=fragment("_job.html", **_context(job, so_far, viewer)))
    yield ServerSentEvent(event="ended", data="")


@router.post("/jobs/{job_id}/cancel")
def cancel(job_id: UUID, store: StoreDep, scope: SubmitterDep) -> RedirectResponse:
    """Cancel a job and show it."""
    api.cancel(job_id, store)
    return RedirectResponse(f"/jobs/{job_id}", 303)


def _context(job: JobView, so_far: Progress, viewer: Viewer) -> dict[str, Any]:
    return {
        "job": job,
        "title": progress.title(job.spec),
        "progress": so_far,
        "slug": progress.slug,
        "now": datetime.now(timezone.utc),
        "viewer": viewer,
    }


def _job(store: Store, job_id: UUID) -> JobView:
    job = store.job(str(job_id))
    if job is None:
        raise not_found("unknown-job", f"there is no job {job_id}")
    return JobView.of(job)
