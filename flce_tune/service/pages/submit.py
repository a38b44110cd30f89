"""The form that submits a job."""

from __future__ import annotations

import hashlib
import re
import uuid
from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse
from pydantic import ValidationError

from flce_tune.dispatch.convert import device_slug
from flce_tune.kernels import strategies
from flce_tune.service.dependencies import LookupDep, StoreDep
from flce_tune.service.errors import ApiError
from flce_tune.service.lookup import Lookup
from flce_tune.service.pages import catalog
from flce_tune.service.pages.render import PageRoute, page
from flce_tune.service.pages.session import SubmitterDep, ViewerDep
from flce_tune.service.routes import jobs as api
from flce_tune.service.schemas import JobRequest
from flce_tune.sweep.presets import PRESETS
from flce_tune.tuning_db.store import Store

router = APIRouter(include_in_schema=False, route_class=PageRoute)

Values = Mapping[str, list[str]]

FIELDS = (
    "device", "source", "preset", "hidden", "vocab", "tokens", "dtype", "mode", "strategies",
    "budget", "time_limit_s", "priority", "quick",
)  # fmt: skip
LIMITS = ("budget", "time_limit_s")
DEFAULTS: Values = {"device": ["auto"], "source": ["preset"], "priority": ["0"]}
NAMES = {
    "device": "Device",
    "preset": "Model",
    "hidden": "Hidden size",
    "vocab": "Vocabulary",
    "tokens": "Tokens",
    "dtype": "Data type",
    "mode": "Mode",
    "strategies": "Strategies",
    "budget": "Budget",
    "time_limit_s": "Time limit",
    "priority": "Priority",
}


async def _form(request: Request) -> Values:
    form = await request.form()
    return {key: [v for v in form.getlist(key) if isinstance(v, str)] for key in form}


@router.get("/submit")
def form_page(
    request: Request, store: StoreDep, lookup: LookupDep, viewer: ViewerDep
) -> HTMLResponse:
    """Show the form, filled in with what the address gives."""
    query = request.query_params
    given = {key: query.getlist(key) for key in FIELDS if key in query}
    if "hidden" in given:
        given.setdefault("source", ["sizes"])
    return _page(request, _selectors(store, lookup), {**DEFAULTS, **given})


@router.post("/submit")
def submit(
    request: Request,
    store: StoreDep,
    lookup: LookupDep,
    scope: SubmitterDep,
    values: Annotated[Values, Depends(_form)],
) -> Response:
    """Queue the job and show it; or show the form again, with what is wrong."""
    try:
        body = JobRequest.model_validate(job_request(values))
        job = api.submit(body, store, request, Response(), scope, _idempotency_key(values, body))
    except ValidationError as error:
        wrong = [_explain(e["loc"], e["msg"]) for e in error.errors()]
        return _page(request, _selectors(store, lookup), values, wrong)
    except ApiError as error:
        wrong = [(_field_of(error), error.detail)]
        return _page(request, _selectors(store, lookup), values, wrong, error.status)
    return RedirectResponse(f"/jobs/{job.id}", 303)


def job_request(values: Values) -> dict[str, Any]:
    """What the API would be sent; checking it is the API's business."""
    tokens = re.split(r"[\s,;]+", _one(values, "tokens"))
    counts = [count for count in tokens if count]
    mode, dtype = _one(values, "mode") or "train", _one(values, "dtype") or None
    options: dict[str, Any] = {"quick": bool(_one(values, "quick"))}
    if values.get("strategies"):
        options["strategies"] = values["strategies"]
    options |= {name: given for name in LIMITS if (given := _one(values, name))}
    body: dict[str, Any] = {
        "device": _one(values, "device") or "auto",
        "options": options,
        "priority": _one(values, "priority") or 0,
    }
    if _one(values, "source") == "sizes":
        sizes = {"hidden": _one(values, "hidden"), "vocab": _one(values, "vocab"), "mode": mode}
        if dtype is not None:
            sizes["dtype"] = dtype
        return body | {"problems": [{**sizes, "tokens": count} for count in counts or [""]]}
    return body | {
        "preset": _one(values, "preset"),
        "tokens": counts,
        "dtype": dtype,
        "mode": mode,
    }


def _idempotency_key(values: Values, body: JobRequest) -> str | None:
    """One per form and content: the same form sent again, but changed, is another job."""
    key = _one(values, "key")
    if not key:
        return None
    return "form-" + hashlib.sha256(f"{key} {body.model_dump_json()}".encode()).hexdigest()


def _page(
    request: Request,
    selectors: list[str],
    values: Values,
    errors: list[tuple[str, str]] | None = None,
    status: int = 422,
) -> HTMLResponse:
    seen = list(dict.fromkeys(errors or ()))
    return page(
        request,
        "submit.html",
        status if seen else 200,
        values=values,
        one=lambda name: _one(values, name),
        errors=seen,
        names=NAMES,
        selectors=selectors,
        presets=list(PRESETS.values()),
        strategies=strategies.names(),
        key=_one(values, "key") or uuid.uuid4().hex,
    )


def _selectors(store: Store, lookup: Lookup) -> list[str]:
    """Devices to suggest: kinds, then the architectures and ids of those that were measured."""
    devices = catalog.all_devices(lookup.snapshot(), store.devices())
    gpus = [device for device in devices if device.kind != "cpu"]
    known = [device.architecture for device in gpus] + list(map(device_slug, gpus))
    return ["auto", "cpu", "cuda", "cuda:0", *dict.fromkeys(known)]


def _one(values: Values, name: str) -> str:
    return (values.get(name) or [""])[0].strip()


def _explain(location: tuple[int | str, ...], message: str) -> tuple[str, str]:
    """A field of the form and what is wrong with it."""
    known = [part for part in location if part in NAMES]
    text = message.removeprefix("Value error, ")
    return (str(known[-1]) if known else "", text[:1].lower() + text[1:])


def _field_of(error: ApiError) -> str:
    return {"unknown-preset": "preset", "scope-too-small": "priority"}.get(error.kind, "")
