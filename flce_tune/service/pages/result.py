"""The winners of one problem on one device, its charts, and what training gets."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse

from flce_tune.dispatch.choice import Choice
from flce_tune.dispatch.convert import device_of, problem_of
from flce_tune.service.dependencies import LookupDep, StoreDep
from flce_tune.service.devices import find_device
from flce_tune.service.errors import not_found
from flce_tune.service.lookup import Lookup
from flce_tune.service.pages import catalog
from flce_tune.service.pages.problems import DeviceName, ProblemName
from flce_tune.service.pages.render import PageRoute, page
from flce_tune.service.pages.session import ViewerDep
from flce_tune.sweep.charts import charts
from flce_tune.sweep.results import ProblemResults, gather, tile_times
from flce_tune.tuning_db.records import DeviceRecord, Measurement, ProblemRecord, Winner
from flce_tune.tuning_db.store import Store

router = APIRouter(include_in_schema=False, route_class=PageRoute)

MIB = 1 << 20


@router.get("/problems/{problem}/{device}")
def result_page(
    problem: ProblemName,
    device: DeviceName,
    request: Request,
    store: StoreDep,
    lookup: LookupDep,
    viewer: ViewerDep,
    limit: Annotated[str, Query(max_length=20, pattern=r"^\s*\d*\s*$")] = "",
) -> HTMLResponse:
    """Show the winners of a problem on a device, the charts, and what training gets."""
    snapshot = lookup.snapshot()
    device_record = find_device(catalog.all_devices(snapshot, store.devices()), device)
    of_device = snapshot.fronts.get(device_record, {})
    known = catalog.all_problems(snapshot, store.problems(device_record))
    record = catalog.find_problem(known, problem)
    front = of_device.get(record, ())
    results = _results(store, device_record, record, front)
    if results is None:
        raise not_found(
            "unknown-problem", f"{device_record.name} has not measured the problem {problem!r}"
        )
    mib = int(limit) if limit.strip() else None
    choice = _choice(lookup, device_record, record, mib)
    return page(
        request,
        "result.html",
        device=device_record,
        problem=record,
        results=results,
        failures=_failures(results),
        winners=[(winner, _is(winner, choice)) for winner in front],
        toolchain=results.measurements[0].toolchain,
        verified=any(winner.verified for winner in front),
        shipped=bool(front) and all(map(catalog.is_shipped, front)),
        choice=choice,
        limit=mib,
        charts=_specs(results),
        base_url=str(request.base_url).rstrip("/"),
        private=request.app.state.settings.private,
    )


def _results(
    store: Store, device: DeviceRecord, problem: ProblemRecord, front: tuple[Winner, ...]
) -> ProblemResults | None:
    """What was measured; of results that ship with the package, the winners only."""
    measured: list[Measurement] = store.measurements(device=device, problem=problem)
    measured = measured or [winner.measurement for winner in front]
    gathered = gather(measured, front)
    return gathered[0] if gathered else None


def _choice(
    lookup: Lookup, device: DeviceRecord, record: ProblemRecord, mib: int | None
) -> Choice | None:
    """What training is told; None for a problem that this version cannot express."""
    try:
        problem, known = problem_of(record), device_of(device)
    except ValueError:
        return None
    limit = None if mib is None else mib * MIB
    return lookup.dispatcher().choose(problem, known, workspace_limit=limit)


def _is(winner: Winner, choice: Choice | None) -> bool:
    chosen = None if choice is None else choice.winner
    return chosen is not None and chosen.measurement.config == winner.measurement.config


def _failures(results: ProblemResults) -> list[tuple[str, str, int]]:
    return sorted((s, status, count) for (s, status), count in results.failures.items())


def _specs(results: ProblemResults) -> dict[str, Any]:
    """The charts as Vega-Lite, without those that would say nothing or that a table says."""
    left_out = {"failures"} if _has_tiles_to_compare(results) else {"failures", "tiles"}
    drawn = charts(results)
    return {name: chart.to_dict() for name, chart in drawn.items() if name not in left_out}


def _has_tiles_to_compare(results: ProblemResults) -> bool:
    times = tile_times(results.timed)
    return len(times) > len({time.gemm for time in times})
