"""Logging in: a token, pasted once."""

from __future__ import annotations

import re
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse

from flce_tune.service.auth import Gate
from flce_tune.service.errors import ApiError
from flce_tune.service.pages.render import PageRoute, page
from flce_tune.service.pages.session import (
    client_of,
    forget,
    look,
    refuse_other_sites,
    remember,
)
from flce_tune.tuning_db.records import Scope

router = APIRouter(include_in_schema=False, route_class=PageRoute)

_OURS = re.compile(r"/(?![/\\])[\x20-\x7e]*")  # a path of this service, not another host's

After = Annotated[str, Query(max_length=2000)]


async def _form(request: Request) -> dict[str, str]:
    form = await request.form()
    return {key: value for key, value in form.items() if isinstance(value, str)}


FormDep = Annotated[dict[str, str], Depends(_form)]


@router.get("/login")
def login_page(request: Request, after: After = "/") -> HTMLResponse:
    """Ask for a token."""
    request.state.viewer = look(request)
    return page(request, "login.html", after=_path(after), error="")


@router.post("/login")
def login(request: Request, form: FormDep) -> Response:
    """Keep the token, if it is a valid one, and go where the viewer wanted to."""
    refuse_other_sites(request)
    gate: Gate = request.app.state.gate
    token, after = form.get("token", "").strip(), _path(form.get("after", "/"))
    try:
        gate.admit(client_of(request), token or None, Scope.READ)
    except ApiError as error:
        wrong = "this is no valid token" if error.status == 401 else error.detail
        answer = page(request, "login.html", error.status, after=after, error=wrong)
        answer.headers.update(error.headers or {})
        forget(answer)
        return answer
    response = RedirectResponse(after, 303)
    if token:
        remember(request, response, token)
    return response


@router.post("/logout")
def logout(request: Request) -> RedirectResponse:
    """Forget the token."""
    refuse_other_sites(request)
    response = RedirectResponse("/", 303)
    forget(response)
    return response


def _path(after: str) -> str:
    return after if _OURS.fullmatch(after) else "/"
