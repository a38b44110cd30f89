"""What is known of a device, and of a problem on all devices."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query, Request
from fastapi.responses import HTMLResponse

from flce_tune.service.dependencies import LookupDep, StoreDep
from flce_tune.service.devices import find_device
from flce_tune.service.pages import catalog
from flce_tune.service.pages.render import PageRoute, page
from flce_tune.service.pages.session import ViewerDep

router = APIRouter(include_in_schema=False, route_class=PageRoute)

PER_PAGE = 25

DeviceName = Annotated[str, Path(max_length=300)]
ProblemName = Annotated[str, Path(max_length=300)]


@router.get("/devices/{device}")
def device_page(
    device: DeviceName,
    request: Request,
    store: StoreDep,
    lookup: LookupDep,
    viewer: ViewerDep,
    number: Annotated[int, Query(alias="page", ge=1, le=100_000)] = 1,
) -> HTMLResponse:
    """List what was tuned on a device."""
    snapshot = lookup.snapshot()
    record = find_device(catalog.all_devices(snapshot, store.devices()), device)
    fronts = snapshot.fronts.get(record, {})
    problems = sorted({*fronts, *store.problems(record)}, key=catalog.order)
    shown = problems[(number - 1) * PER_PAGE : number * PER_PAGE]
    return page(
        request,
        "device.html",
        device=record,
        lines=[(problem, fronts.get(problem, ())) for problem in shown],
        count=len(problems),
        number=number,
        pages=max(1, -(-len(problems) // PER_PAGE)),
    )


@router.get("/problems/{problem}")
def problem_page(
    problem: ProblemName, request: Request, store: StoreDep, lookup: LookupDep, viewer: ViewerDep
) -> HTMLResponse:
    """Compare the devices a problem was tuned on."""
    snapshot = lookup.snapshot()
    known = catalog.all_problems(snapshot, store.problems())
    record = catalog.find_problem(known, problem)
    fronts = catalog.fronts_of(snapshot, record)
    return page(request, "problem.html", problem=record, fronts=fronts)
