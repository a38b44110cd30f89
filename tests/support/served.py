"""A transport for httpx clients into an application under Starlette's test client.

That client may be built on another HTTP library than ours (httpx2), whose requests and responses
are its own; so a request is made again there, and its answer here.
"""

from __future__ import annotations

import httpx
from starlette.testclient import TestClient


class ServedTransport(httpx.BaseTransport):
    """Hands every request to a test client."""

    def __init__(self, served: TestClient) -> None:
        self._served = served

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        answer = self._served.request(
            request.method,
            str(request.url),
            content=request.read(),
            headers=list(request.headers.multi_items()),
            follow_redirects=False,
        )
        headers = [
            (name, value)
            for name, value in answer.headers.multi_items()
            if name.lower() not in ("content-encoding", "transfer-encoding")
        ]
        return httpx.Response(answer.status_code, headers=headers, content=answer.content)
