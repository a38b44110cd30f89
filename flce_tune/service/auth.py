"""Who may do what: bearer tokens, their scopes, and a limit on wrong ones."""

from __future__ import annotations

import hmac
import threading
import time
from collections import OrderedDict, deque
from typing import Annotated

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from flce_tune.service.errors import ApiError
from flce_tune.service.metrics import Metrics
from flce_tune.service.settings import ServiceSettings
from flce_tune.tuning_db.records import Scope
from flce_tune.tuning_db.store import Store
from flce_tune.tuning_db.tokens import digest

MAX_AGE_SECONDS = 1.0
"""How long a revoked token may still pass."""


class Gate:
    """Judges tokens: the one in the settings, which may do everything, and the stored ones.

    While there is neither, everybody may do everything. Thread-safe.
    """

    def __init__(self, store: Store, settings: ServiceSettings, metrics: Metrics) -> None:
        self._store = store
        self._settings = settings
        self._metrics = metrics
        self._failures = FailureLimit(settings.max_refused_tokens, settings.refused_tokens_seconds)
        self._lock = threading.Lock()
        self._scopes: dict[str, Scope | None] = {}  # by digest; None: revoked
        self._read_at: float | None = None

    @property
    def open(self) -> bool:
        """Whether there is no token at all, so that everybody may do everything.

        Raises:
            StoreError: the tokens cannot be read.
        """
        return self._settings.token is None and not self._stored()

    def admit(self, client: str, token: str | None, needed: Scope) -> Scope:
        """Return what the caller may do, which is ``needed`` or more.

        Raises:
            ApiError: 401 without a valid token, 403 if it allows too little, 429 after too many
                wrong ones from this address.
            StoreError: the tokens cannot be read.
        """
        scopes = self._stored()
        if self._settings.token is None and not scopes:
            return Scope.ADMIN
        if (wait := self._failures.wait(client)) > 0:
            raise ApiError(
                429,
                "too-many-wrong-tokens",
                f"too many wrong tokens came from {client}: try again in {wait:.0f} s",
                headers={"Retry-After": f"{wait:.0f}"},
            )
        scope = None if token is None else self._scope_of(token, scopes)
        if scope is None:
            self._metrics.refused_tokens.inc()
            if token is not None:
                self._failures.note(client)
            raise ApiError(
                401,
                "unauthorized",
                "this needs the header 'Authorization: Bearer TOKEN' with a valid token; "
                "`flce-tune token create` makes one",
                headers={"WWW-Authenticate": "Bearer"},
            )
        self.require(scope, needed)
        return scope

    def require(self, scope: Scope, needed: Scope) -> None:
        """Check a scope.

        Raises:
            ApiError: 403 if it is not enough.
        """
        if not scope.covers(needed):
            self._metrics.refused_tokens.inc()
            raise ApiError(
                403,
                "scope-too-small",
                f"this needs a token of scope {needed.value!r}, yours has {scope.value!r}",
            )

    def _scope_of(self, token: str, scopes: dict[str, Scope | None]) -> Scope | None:
        single = self._settings.token
        if single is not None and hmac.compare_digest(digest(token), digest(single)):
            return Scope.ADMIN
        return scopes.get(digest(token))

    def _stored(self) -> dict[str, Scope | None]:
        with self._lock:
            now = time.monotonic()
            if self._read_at is None or now - self._read_at > MAX_AGE_SECONDS:
                self._scopes = {
                    token.digest: token.scope if token.revoked_at is None else None
                    for token in self._store.tokens()
                }
                self._read_at = now
            return self._scopes


class FailureLimit:
    """Counts failures by address, of the last ``seconds`` only. Thread-safe, of bounded size."""

    _MAX_CLIENTS = 10_000

    def __init__(self, limit: int, seconds: float) -> None:
        self._limit = limit
        self._seconds = seconds
        self._lock = threading.Lock()
        self._times: OrderedDict[str, deque[float]] = OrderedDict()

    def note(self, client: str) -> None:
        """Count one failure."""
        with self._lock:
            times = self._times.setdefault(client, deque(maxlen=self._limit))
            times.append(time.monotonic())
            self._times.move_to_end(client)
            if len(self._times) > self._MAX_CLIENTS:
                self._times.popitem(last=False)

    def wait(self, client: str) -> float:
        """How many seconds this address has to wait; 0: none."""
        with self._lock:
            times = self._times.get(client)
            if times is None or len(times) < self._limit:
                return 0.0
            return max(0.0, times[0] + self._seconds - time.monotonic())


_bearer = HTTPBearer(auto_error=False, description="needed where the service has tokens")
_Credentials = Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]


def _admit(request: Request, credentials: _Credentials, needed: Scope) -> Scope:
    gate: Gate = request.app.state.gate
    client = "?" if request.client is None else request.client.host
    return gate.admit(client, None if credentials is None else credentials.credentials, needed)


def _reader(request: Request, credentials: _Credentials) -> Scope:
    return _admit(request, credentials, Scope.READ)


def _submitter(request: Request, credentials: _Credentials) -> Scope:
    return _admit(request, credentials, Scope.SUBMIT)


def _worker(request: Request, credentials: _Credentials) -> Scope:
    return _admit(request, credentials, Scope.WORK)


def require_admin(request: Request, scope: Scope) -> None:
    """Check that a caller who was admitted may do what only administrators may.

    Raises:
        ApiError: 403 if not.
    """
    gate: Gate = request.app.state.gate
    gate.require(scope, Scope.ADMIN)


Reader = Depends(_reader)
SubmitterDep = Annotated[Scope, Depends(_submitter)]
Submitter = Depends(_submitter)
Worker = Depends(_worker)
