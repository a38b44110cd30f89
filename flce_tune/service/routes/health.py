"""Whether the service lives, and whether it can do its work."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel

from flce_tune.service.dependencies import MetricsDep, StoreDep
from flce_tune.service.errors import ApiError, responses
from flce_tune.service.runner import JobRunner
from flce_tune.version import __version__

router = APIRouter(tags=["health"])
figures = APIRouter(tags=["health"])


class Health(BaseModel):
    """Good news; bad news comes as an error document."""

    status: str
    version: str


@router.get("/healthz")
async def live() -> Health:
    """Answer as long as the process serves at all; waits for nothing, not even a thread."""
    return Health(status="ok", version=__version__)


@router.get("/readyz", responses=responses(503))
def ready(request: Request, store: StoreDep) -> Health:
    """Check that the database answers, its schema is this version's, and jobs are being taken."""
    store.jobs(limit=1)
    runner: JobRunner | None = request.app.state.runner
    if runner is not None and not runner.alive:
        raise ApiError(503, "runner-dead", "no job is being taken any more: restart the service")
    return Health(status="ready", version=__version__)


@figures.get(
    "/metrics",
    response_class=Response,
    responses={200: {"description": "for Prometheus", "content": {"text/plain": {}}}},
)
def metrics(metrics: MetricsDep) -> Response:
    """Figures of this process and the database, in Prometheus' text format."""
    return Response(metrics.text(), media_type=CONTENT_TYPE_LATEST)
