"""What every request gets: an id, a line in the log, a place in the metrics, safe headers."""

from __future__ import annotations

import logging
import re
import time
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from flce_tune.service.errors import unexpected_error
from flce_tune.service.logs import request_id
from flce_tune.service.metrics import Metrics

log = logging.getLogger(__name__)

_ACCEPTED_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_THIS_MACHINE = re.compile(r"(localhost|127\.0\.0\.1|\[::1\])(:\d+)?")

SECURITY_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",  # pages have their own
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class Observe:
    """ASGI middleware; the outermost, so that refusals and defects are seen as well."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, watched."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.perf_counter()
        given = Headers(scope=scope).get("x-request-id", "")
        current = given if _ACCEPTED_ID.fullmatch(given) else uuid.uuid4().hex
        token = request_id.set(current)
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                headers = MutableHeaders(scope=message)
                headers["X-Request-ID"] = current
                for name, value in SECURITY_HEADERS.items():
                    headers.setdefault(name, value)
                if _is_trustworthy(scope):
                    headers["Cross-Origin-Opener-Policy"] = "same-origin"
                self._note(scope, message["status"], time.perf_counter() - began)
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception as error:
            if not started:
                await unexpected_error(Request(scope), error)(scope, receive, watched)
            raise  # whoever serves us logs the traceback
        finally:
            request_id.reset(token)

    def _note(self, scope: Scope, status: int, seconds: float) -> None:
        method = scope["method"] if scope["method"] in _METHODS else "other"
        # The pattern, not the path: a label per job would never end.
        route = getattr(scope.get("route"), "path", None) or "other"
        self._metrics.observe_request(method, route, status, seconds)
        fields = {"status": status, "ms": round(seconds * 1000, 2), "client": _client(scope)}
        log.info("%s %s", scope["method"], scope["path"], extra={"fields": fields})


def _is_trustworthy(scope: Scope) -> bool:
    """Whether browsers trust our origin; where they do not, this policy is an error to them."""
    host = Headers(scope=scope).get("host", "")
    return scope["scheme"] == "https" or _THIS_MACHINE.fullmatch(host) is not None


_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


def _client(scope: Scope) -> str | None:
    client = scope.get("client")
    return None if client is None else str(client[0])
