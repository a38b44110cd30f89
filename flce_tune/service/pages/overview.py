"""``/``: devices, what is covered, what training asked for, the latest jobs, how to use it."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from flce_tune.service.dependencies import LookupDep, StoreDep
from flce_tune.service.pages import catalog
from flce_tune.service.pages.jobs import job_lines
from flce_tune.service.pages.render import PageRoute, page
from flce_tune.service.pages.session import ViewerDep

router = APIRouter(include_in_schema=False, route_class=PageRoute)

JOBS_SHOWN = 5
MISSES_SHOWN = 10
LAYERS_SHOWN = 40


@router.get("/")
def overview(
    request: Request, store: StoreDep, lookup: LookupDep, viewer: ViewerDep
) -> HTMLResponse:
    """Show where the fleet stands."""
    snapshot = lookup.snapshot()
    devices = catalog.all_devices(snapshot, store.devices())
    return page(
        request,
        "overview.html",
        devices=catalog.device_lines(snapshot, devices),
        coverage=catalog.coverage(snapshot, [d for d in devices if snapshot.fronts.get(d)]),
        layers_shown=LAYERS_SHOWN,
        misses=store.misses(limit=MISSES_SHOWN),
        jobs=job_lines(store, store.jobs(limit=JOBS_SHOWN)),
        base_url=str(request.base_url).rstrip("/"),
        private=request.app.state.settings.private,
    )
