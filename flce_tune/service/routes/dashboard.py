"""The dashboard: devices, winners and jobs on one page, rendered here."""

from __future__ import annotations

import functools
import itertools
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse
from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.templating import Jinja2Templates

from flce_tune.errors import InvalidConfigError
from flce_tune.kernels.config import Config
from flce_tune.service.dependencies import StoreDep
from flce_tune.service.schemas import DeviceView, JobView, WinnerView
from flce_tune.tuning_db.records import Winner
from flce_tune.version import __version__

JOBS_SHOWN = 20

router = APIRouter(include_in_schema=False)

_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
}


@router.get("/")
def overview(request: Request, store: StoreDep) -> HTMLResponse:
    """Show what was measured, what won, and what is being tuned."""
    winners = sorted(store.winners(), key=_problem_key)
    context = {
        "version": __version__,
        "devices": [DeviceView.of(record) for record in store.devices()],
        "problems": [
            _problem(list(front)) for _, front in itertools.groupby(winners, key=_problem_key)
        ],
        "jobs": [JobView.of(job) for job in store.jobs(limit=JOBS_SHOWN)],
    }
    return _templates().TemplateResponse(request, "overview.html", context, headers=_HEADERS)


@functools.cache
def _templates() -> Jinja2Templates:
    loader = PackageLoader("flce_tune.service")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined)
    environment.filters["size"] = format_bytes
    environment.filters["ms"] = format_ms
    return Jinja2Templates(env=environment)


def _problem_key(winner: Winner) -> tuple[Any, ...]:
    device, problem = winner.measurement.device, winner.measurement.problem
    return (
        device.name,
        device.sm_count,
        problem.hidden,
        problem.vocab,
        problem.token_bucket,
        problem.dtype,
        problem.mode,
        problem.accumulate,
        problem.features,
    )


def _problem(front: list[Winner]) -> dict[str, Any]:
    """One problem on one device, with its Pareto front, fastest first."""
    measured = front[0].measurement
    front.sort(key=lambda winner: winner.measurement.median_ms or 0.0)
    return {
        "device": measured.device,
        "problem": measured.problem,
        "winners": [(_config_text(winner), WinnerView.of(winner)) for winner in front],
    }


def _config_text(winner: Winner) -> str:
    try:
        return str(Config.from_dict(winner.measurement.config))
    except InvalidConfigError:
        return str(dict(winner.measurement.config))


def format_bytes(count: int | None) -> str:
    """For a reader, e.g. ``5.04 GB``; an en dash where nothing is known."""
    if count is None:
        return "–"
    value, units = float(count), ["B", "KB", "MB", "GB", "TB"]
    while value >= 1000 and len(units) > 1:
        value /= 1000
        units.pop(0)
    return f"{value:.3g} {units[0]}"


def format_ms(milliseconds: float | None) -> str:
    """For a reader, e.g. ``12.3 ms``; an en dash where nothing is known."""
    return "–" if milliseconds is None else f"{milliseconds:.3g} ms"
