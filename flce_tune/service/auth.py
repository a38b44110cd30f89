"""Who may write."""

from __future__ import annotations

import hmac
from typing import Annotated

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from flce_tune.service.errors import ApiError

_bearer = HTTPBearer(auto_error=False, description="needed where the service has a token")


def require_token(
    request: Request,
    credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)],
) -> None:
    """Let the request pass if the service has no token, or if it came with that token."""
    token: str | None = request.app.state.settings.token
    if token is None:
        return
    given = credentials.credentials if credentials is not None else ""
    if not hmac.compare_digest(given.encode(), token.encode()):
        raise ApiError(
            401,
            "unauthorized",
            "this needs the header 'Authorization: Bearer TOKEN' with the service's token",
            headers={"WWW-Authenticate": "Bearer"},
        )


Writer = Depends(require_token)
