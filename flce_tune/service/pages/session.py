"""Who looks at a page: a token pasted once, kept in a cookie, and no writes from other sites."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request, Response

from flce_tune.service.auth import Gate
from flce_tune.service.errors import ApiError
from flce_tune.tuning_db.records import Scope

COOKIE = "flce_tune_token"


class LoginRequiredError(Exception):
    """The page is not for those who have shown no token; the browser is sent to ``/login``."""


@dataclass(frozen=True, slots=True)
class Viewer:
    """What whoever asks for a page may do; ``scope`` is None for a stranger."""

    scope: Scope | None
    open: bool  # no token exists: everybody may do everything, and nobody logs in

    @property
    def may_submit(self) -> bool:
        """Whether forms that change something will be taken."""
        return self.scope is not None and self.scope.covers(Scope.SUBMIT)


def look(request: Request) -> Viewer:
    """Say who asks.

    Raises:
        StoreError: the tokens cannot be read.
    """
    gate: Gate = request.app.state.gate
    if gate.open:
        return Viewer(Scope.ADMIN, open=True)
    token = _token(request)
    if token is None:
        return Viewer(None, open=False)
    try:
        return Viewer(gate.admit(client_of(request), token, Scope.READ), open=False)
    except ApiError as error:
        # Dropped, else each page would count as one more wrong token.
        request.state.useless_cookie = error.status == 401
        return Viewer(None, open=False)


def _viewer(request: Request) -> Viewer:
    viewer = look(request)
    if viewer.scope is None and request.app.state.settings.private:
        raise LoginRequiredError
    request.state.viewer = viewer
    return viewer


def _submitter(request: Request, viewer: ViewerDep) -> Scope:
    refuse_other_sites(request)
    if viewer.scope is None:
        raise LoginRequiredError
    gate: Gate = request.app.state.gate
    gate.require(viewer.scope, Scope.SUBMIT)
    return viewer.scope


ViewerDep = Annotated[Viewer, Depends(_viewer)]
SubmitterDep = Annotated[Scope, Depends(_submitter)]


def refuse_other_sites(request: Request) -> None:
    """Check that a form was sent by one of our pages.

    Browsers say where a form comes from, in ``Sec-Fetch-Site`` (only over TLS or to this machine)
    and in ``Origin``. What says neither is no browser, and has no cookie that is not its own.

    Raises:
        ApiError: 403, another site sent it.
    """
    site = request.headers.get("sec-fetch-site")
    origin = request.headers.get("origin")
    if site is not None:
        ours = site in ("same-origin", "none")
    else:
        ours = origin is None or origin.partition("://")[2] == request.headers.get("host")
    if not ours:
        raise ApiError(403, "cross-site", f"this form was sent by another site ({origin})")


def remember(request: Request, response: Response, token: str) -> None:
    """Keep a token until the browser is closed; scripts and other sites do not get at it."""
    response.set_cookie(
        COOKIE, token, httponly=True, samesite="strict", secure=request.url.scheme == "https"
    )


def forget(response: Response) -> None:
    """Drop the token."""
    response.delete_cookie(COOKIE, httponly=True, samesite="strict")


def client_of(request: Request) -> str:
    """The address a request came from."""
    return "?" if request.client is None else request.client.host


def _token(request: Request) -> str | None:
    """The cookie's token, or the header's: a proxy may add one."""
    kind, _, value = request.headers.get("authorization", "").partition(" ")
    return value if kind.lower() == "bearer" else request.cookies.get(COOKIE)
