"""HTTP/1.1 over plain sockets: little enough that the load, not its maker, is measured."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence


class Connection:
    """One kept-alive connection to a service on loopback."""

    def __init__(self, port: int) -> None:
        self._port = port

    async def __aenter__(self) -> Connection:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()

    async def ask(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        """Send a request; status and body of its answer."""
        self._writer.write(request(method, path, body))
        head = await self._reader.readuntil(b"\r\n\r\n")
        lines = head.lower().split(b"\r\n")
        lengths = [line for line in lines if line.startswith(b"content-length:")]
        size = int(lengths[0].split(b":")[1]) if lengths else 0  # a 204 has none
        answer = await self._reader.readexactly(size)
        return int(lines[0].split(b" ")[1]), answer


async def events(port: int, path: str) -> AsyncIterator[bytes]:
    """The ids of server-sent events, as they come."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request("GET", path))
        async for line in reader:
            if line.startswith(b"id: "):
                yield line[4:].strip()
    finally:
        writer.close()


def request(method: str, path: str, body: bytes = b"") -> bytes:
    """The bytes of a request."""
    head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def quantile(seconds: Sequence[float], fraction: float) -> float:
    """A quantile, in milliseconds."""
    ordered = sorted(seconds)
    return round(ordered[min(len(ordered) - 1, int(fraction * len(ordered)))] * 1000, 2)
