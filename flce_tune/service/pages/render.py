"""Turns templates into answers, and errors into pages."""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine
from http import HTTPStatus
from typing import Any
from urllib.parse import quote

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, RedirectResponse
from fastapi.routing import APIRoute
from jinja2 import Environment, PackageLoader, StrictUndefined

from flce_tune.dispatch.convert import device_slug
from flce_tune.errors import StoreError
from flce_tune.service.errors import ApiError, store_failure
from flce_tune.service.pages import formats
from flce_tune.service.pages.session import LoginRequiredError, Viewer, forget
from flce_tune.version import __version__

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; form-action 'self'; base-uri 'none'; "
    "frame-ancestors 'none'",
    "Referrer-Policy": "same-origin",  # with "no-referrer" forms would come from "null"
    "Cache-Control": "private, no-cache",
}


def page(request: Request, template: str, status: int = 200, **context: Any) -> HTMLResponse:
    """Render a whole page."""
    viewer = getattr(request.state, "viewer", None) or Viewer(None, open=False)
    common = {"version": __version__, "viewer": viewer, "path": request.url.path}
    return HTMLResponse(fragment(template, **(common | context)), status, headers=HEADERS)


def fragment(template: str, **context: Any) -> str:
    """Render a template, or a part of a page."""
    return _environment().get_template(template).render(**context)


@functools.cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("flce_tune.service"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for name in ("ms", "interval", "mib", "gib", "moment", "config", "shape", "kind", "models"):
        environment.filters[name] = getattr(formats, name)
    environment.filters["device_slug"] = device_slug
    environment.filters["problem_slug"] = formats.problem_slug
    environment.globals["ratio"] = formats.ratio
    environment.globals["duration"] = formats.duration
    return environment


class PageRoute(APIRoute):
    """Answers with pages for people, also where it fails."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Do what any route does, and turn its errors into pages."""
        handle = super().get_route_handler()

        async def answer(request: Request) -> Response:
            try:
                return await handle(request)
            except LoginRequiredError:
                return _to_login(request)
            except ApiError as error:
                return _error(request, error)
            except RequestValidationError as error:
                return _error(request, _refused(error))
            except StoreError as error:
                return _error(request, store_failure(error))

        async def handler(request: Request) -> Response:
            response = await answer(request)
            if getattr(request.state, "useless_cookie", False):
                forget(response)
            return response

        return handler


def _error(request: Request, error: ApiError) -> Response:
    title = HTTPStatus(error.status).phrase
    response = page(request, "error.html", error.status, title=title, detail=error.detail)
    response.headers.update(error.headers or {})
    return response


def _refused(error: RequestValidationError) -> ApiError:
    first = error.errors()[0]
    where = ".".join(map(str, first["loc"]))
    return ApiError(422, "invalid-request", f"{where}: {first['msg']}")


def _to_login(request: Request) -> Response:
    after = request.url.path if request.method == "GET" else "/"
    if request.method == "GET" and request.url.query:
        after += f"?{request.url.query}"
    return RedirectResponse(f"/login?after={quote(after, safe='')}", 303)
