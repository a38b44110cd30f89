"""What was measured, what won, and which config to use."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from fastapi.routing import APIRoute

from flce_tune.dispatch.convert import device_of, problem_record
from flce_tune.kernels import strategies
from flce_tune.kernels.problem import Problem
from flce_tune.service.dependencies import LookupDep, StoreDep
from flce_tune.service.devices import find_device
from flce_tune.service.errors import responses
from flce_tune.service.lookup import Lookup, problem_of
from flce_tune.service.schemas import (
    BestView,
    ConfigQuery,
    DeviceView,
    ExplanationView,
    MeasurementQuery,
    MeasurementView,
    Page,
    PresetView,
    ProblemSpec,
    ResultQuery,
    WinnerView,
)
from flce_tune.sweep.interval import median_interval
from flce_tune.sweep.presets import PRESETS
from flce_tune.tuning_db.records import DeviceRecord, Measurement, Winner

router = APIRouter(prefix="/v1", tags=["results"])


class _KnownAnswers(APIRoute):
    """Gives answers that were given before without parsing the question again.

    A private service always goes the long way, on which it asks for a token.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Look first, then do what any route does."""
        long_way = super().get_route_handler()

        async def handler(request: Request) -> Response:
            state = request.app.state
            if not state.settings.private:
                lookup: Lookup = state.lookup
                answer = lookup.known_answer(request.scope["query_string"])
                if answer is not None:
                    return Response(answer, media_type="application/json")
            return await long_way(request)

        return handler


configs = APIRouter(prefix="/v1/configs", tags=["results"], route_class=_KnownAnswers)


@configs.get("/best", response_model=BestView, responses=responses(404, 409, 422, 503))
def best(query: Annotated[ConfigQuery, Query()], request: Request, lookup: LookupDep) -> Response:
    """Answer with the config to use for a problem on a device, and the rule that chose it."""

    def work_out() -> bytes:
        return _best(query, lookup).model_dump_json().encode()

    answer = lookup.answer(request.scope["query_string"], work_out)
    return Response(answer, media_type="application/json")


def _best(query: ConfigQuery, lookup: Lookup) -> BestView:
    device, problem = lookup.device(query), problem_of(query)
    choice = lookup.dispatcher().choose(
        problem, device_of(device), workspace_limit=query.workspace_limit
    )
    winner = choice.winner
    measured = _measured(winner, problem, device)
    return BestView(
        config=choice.config.to_dict(),
        rule=choice.rule,
        detail=choice.detail,
        expected_ms=measured and measured.median_ms,
        expected_interval_ms=measured and median_interval(measured.samples_ms),
        workspace_bytes=strategies.workspace(choice.config, problem),
        device=DeviceView.of(device),
        problem=ProblemSpec.of(problem),
        winner=None if winner is None else WinnerView.of(winner),
    )


@router.get("/explain", responses=responses(404, 409, 422, 503))
def explain(query: Annotated[ConfigQuery, Query()], lookup: LookupDep) -> ExplanationView:
    """Tell every rule that was tried for a problem on a device, and what each one found."""
    device, problem = lookup.device(query), problem_of(query)
    explanation = lookup.dispatcher().explain(
        problem, device_of(device), workspace_limit=query.workspace_limit
    )
    return ExplanationView.model_validate(explanation.to_dict())


@router.get("/measurements", responses=responses(404, 409, 422, 503))
def measurements(
    query: Annotated[MeasurementQuery, Query()], store: StoreDep
) -> Page[MeasurementView]:
    """List measurements in the order they were stored, failures included."""
    found = store.measurements(
        device=find_device(store.devices(), query.device) if query.device else None,
        status=query.status,
        after_id=query.cursor,
        limit=query.limit + 1,
    )
    page = found[: query.limit]
    return Page(
        items=[MeasurementView.of(m) for m in page if query.fits(m)],
        next=str(page[-1].id) if len(found) > query.limit else None,
    )


@router.get("/winners", responses=responses(404, 409, 422, 503))
def winners(query: Annotated[ResultQuery, Query()], store: StoreDep) -> Page[WinnerView]:
    """List the time/workspace Pareto fronts, fastest first."""
    device = find_device(store.devices(), query.device) if query.device else None
    found = store.winners(device=device, architecture=query.architecture)
    return Page(items=[WinnerView.of(w) for w in found if query.fits(w.measurement)])


@router.get("/devices", responses=responses(503))
def devices(store: StoreDep) -> Page[DeviceView]:
    """List the devices that anything was measured on."""
    return Page(items=[DeviceView.of(record) for record in store.devices()])


@router.get("/presets")
def presets() -> Page[PresetView]:
    """List the models whose sizes are known by name."""
    return Page(
        items=[
            PresetView(
                name=preset.name,
                hidden=preset.hidden,
                vocab=preset.vocab,
                softcap=preset.softcap,
                tokens=list(preset.tokens),
                dtype=preset.dtype,
                features=list(preset.features),
            )
            for preset in PRESETS.values()
        ]
    )


def _measured(winner: Winner | None, problem: Problem, device: DeviceRecord) -> Measurement | None:
    """The winner's measurement, if it was of this device and class of problems."""
    if winner is None:
        return None
    measured = winner.measurement
    same = (measured.device, measured.problem) == (device, problem_record(problem))
    return measured if same else None
