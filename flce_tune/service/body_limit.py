"""A limit on what a request may send."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class BodyLimit:
    """ASGI middleware: reading more than ``max_bytes`` of a body ends in a 413.

    ``exceptions`` are the limits of paths that have their own.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, exceptions: Mapping[str, int]) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._exceptions = exceptions

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, with its body counted as it is read."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = Headers(scope=scope).get("content-length", "0")
        size = int(declared) if declared.isdecimal() else 0
        limit = self._exceptions.get(scope["path"], self._max_bytes)
        seen = 0

        async def limited() -> Message:
            # Raised where the body is read, so that it is answered like every other error.
            nonlocal seen
            if size > limit:
                raise _too_large(limit)
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > limit:
                raise _too_large(limit)
            return message

        await self._app(scope, limited, send)


def _too_large(limit: int) -> HTTPException:
    return HTTPException(413, f"the body may have {limit} bytes at most")
