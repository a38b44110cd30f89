"""A limit on what a request may send."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class BodyLimit:
    """ASGI middleware: reading more than ``max_bytes`` of a body ends in a 413."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, with its body counted as it is read."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = Headers(scope=scope).get("content-length", "0")
        size = int(declared) if declared.isdecimal() else 0
        seen = 0

        async def limited() -> Message:
            # Raised where the body is read, so that it is answered like every other error.
            nonlocal seen
            if size > self._max_bytes:
                raise self._too_large()
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._max_bytes:
                raise self._too_large()
            return message

        await self._app(scope, limited, send)

    def _too_large(self) -> HTTPException:
        return HTTPException(413, f"the body may have {self._max_bytes} bytes at most")
