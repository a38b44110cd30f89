"""Two GPUs side by side, problem by problem."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse

from flce_tune.dispatch.convert import device_slug
from flce_tune.dispatch.snapshot import Snapshot
from flce_tune.service.dependencies import LookupDep, StoreDep
from flce_tune.service.devices import find_device
from flce_tune.service.pages import catalog
from flce_tune.service.pages.formats import problem_label
from flce_tune.service.pages.render import PageRoute, page
from flce_tune.service.pages.session import ViewerDep
from flce_tune.sweep.charts import side_by_side
from flce_tune.sweep.comparison import Difference, compare, geometric_mean
from flce_tune.tuning_db.records import DeviceRecord, Winner

router = APIRouter(include_in_schema=False, route_class=PageRoute)

PER_PAGE = 50

DeviceName = Annotated[str, Query(max_length=300)]


@router.get("/compare")
def compare_page(
    request: Request,
    store: StoreDep,
    lookup: LookupDep,
    viewer: ViewerDep,
    a: DeviceName = "",
    b: DeviceName = "",
    number: Annotated[int, Query(alias="page", ge=1, le=100_000)] = 1,
) -> HTMLResponse:
    """Compare the fastest winners of two devices."""
    snapshot = lookup.snapshot()
    devices = [d for d in catalog.all_devices(snapshot, store.devices()) if d in snapshot.fronts]
    slugs = [device_slug(device) for device in devices]
    first, last = (slugs[0], slugs[-1]) if slugs else ("", "")
    chosen = {"a": a or first, "b": b or last}
    context: dict[str, Any] = {"devices": devices, "names": None, "charts": {}}
    if a and b:
        left, right = find_device(devices, a), find_device(devices, b)
        chosen = {"a": device_slug(left), "b": device_slug(right)}
        context |= _comparison(snapshot, left, right, number)
    return page(request, "compare.html", chosen=chosen, **context)


def _comparison(
    snapshot: Snapshot, a: DeviceRecord, b: DeviceRecord, number: int
) -> dict[str, Any]:
    found = compare(_winners(snapshot, a), _winners(snapshot, b), by_device=False)
    both = [one for one in found if one.ratio is not None]
    ordered = [*both, *(one for one in found if one.ratio is None)]  # what compares comes first
    shown = ordered[(number - 1) * PER_PAGE : number * PER_PAGE]
    return {
        "differences": shown,
        "both": len(both),
        "count": len(found),
        "mean": geometric_mean(found),
        "number": number,
        "pages": max(1, -(-len(found) // PER_PAGE)),
        "names": _names(a, b),
        "charts": _charts([one for one in shown if one.ratio is not None], _names(a, b)),
    }


def _charts(both: list[Difference], names: tuple[str, str]) -> dict[str, Any]:
    if not both:
        return {}
    chart = side_by_side({problem_label(one.problem): one for one in both}, names)
    return {"times": chart.to_dict()}


def _names(a: DeviceRecord, b: DeviceRecord) -> tuple[str, str]:
    """Names that differ, also for two builds of one GPU."""
    if a.name != b.name:
        return a.name, b.name
    return f"{a.name}, {a.sm_count} SMs", f"{b.name}, {b.sm_count} SMs"


def _winners(snapshot: Snapshot, device: DeviceRecord) -> list[Winner]:
    return [winner for front in snapshot.fronts[device].values() for winner in front]
