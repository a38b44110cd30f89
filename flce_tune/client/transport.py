"""Requests that are tried again, and errors that say what to do."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from flce_tune.errors import RefusedError, UnreachableError
from flce_tune.version import __version__

AGAIN = frozenset({429, 502, 503, 504})
"""Statuses of a service, or of a proxy before it, that will be another one soon."""


@dataclass(frozen=True, slots=True)
class Retries:
    """How often, and how patiently, a request is sent again that may succeed later."""

    seconds: float = 30.0  # after which no new attempt is made; 0: one attempt only
    first_wait: float = 0.25  # doubled after every attempt, each time a random part of it
    longest_wait: float = 5.0

    def wait(self, attempt: int, asked_for: float | None) -> float:
        """Seconds to wait after the ``attempt``-th attempt, counted from 0.

        Args:
            attempt: how many have failed, less one.
            asked_for: what the service's ``Retry-After`` says, if anything.
        """
        longest = min(self.longest_wait, self.first_wait * 2 ** min(attempt, 30))
        return max(asked_for or 0.0, random.uniform(longest / 2, longest))


class Transport:
    """One service. Every request it sends may be sent twice: what it does twice is done once.

    Raises:
        UnreachableError: the URL is none.
    """

    def __init__(
        self,
        base_url: str,
        token: str | None,
        timeout_s: float,
        retries: Retries,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        if not base_url.startswith(("http://", "https://")):
            raise UnreachableError(
                f"{base_url!r} is no address of a service: it begins with http:// or https://"
            )
        headers = {"User-Agent": f"flce-tune/{__version__}"}
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        self.http = httpx.Client(
            base_url=base_url, headers=headers, timeout=timeout_s, transport=transport
        )
        self._shown = httpx.URL(base_url).copy_with(userinfo=b"")
        self._retries = retries

    def send(self, method: str, path: str, **request: Any) -> httpx.Response:
        """Send a request until it is answered; returns an answer below 400.

        Raises:
            RefusedError: the service said no.
            UnreachableError: it did not answer in time.
        """
        end = time.monotonic() + self._retries.seconds
        attempt = 0
        while True:
            asked_for = None
            try:
                response = self.http.request(method, path, **request)
            except httpx.HTTPError as error:
                failure: Exception = self.unreachable(error)
            else:
                if response.is_success:
                    return response
                failure = refusal(response)
                if response.status_code not in AGAIN:
                    raise failure
                asked_for = _seconds(response.headers)
            wait = self._retries.wait(attempt, asked_for)
            if time.monotonic() + wait > end:
                raise failure
            time.sleep(wait)
            attempt += 1

    def unreachable(self, error: httpx.HTTPError) -> UnreachableError:
        """Say that no answer came."""
        reason = str(error) or type(error).__name__
        return UnreachableError(
            f"no answer from the service at {self._shown} ({reason}); check the address, and that "
            "`flce-tune serve` runs there"
        )


def refusal(response: httpx.Response) -> RefusedError:
    """What an answer of 300 and above says."""
    try:
        document = response.json()
        kind = str(document["type"]).rpartition(":")[2]
        detail = str(document["detail"])
    except (ValueError, TypeError, KeyError):
        kind = "not-a-service"
        detail = (
            f"{response.request.url.copy_with(userinfo=b'', query=None)} answered "
            f"{response.status_code} {response.reason_phrase}, and not as flce-tune does: "
            "check the address"
        )
    return RefusedError(detail, status=response.status_code, kind=kind)


def _seconds(headers: Mapping[str, str]) -> float | None:
    """What ``Retry-After`` says, where it is a number."""
    given = headers.get("retry-after", "")
    return float(given) if given.isdecimal() else None
