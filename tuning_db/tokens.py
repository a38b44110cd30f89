"""Queries on the service's tokens; each takes the session it runs in.

Only digests are stored. A token is 256 random bits, which no guessing finds, so that a fast hash
protects it as well as a slow one would.
"""

from __future__ import annotations

import hashlib
import secrets

from sqlalchemy import select
from sqlalchemy.orm import Session

from flce_tune.tuning_db.models import TokenRow
from flce_tune.tuning_db.records import Scope
from flce_tune.tuning_db.rows import now

PREFIX = "flce_"
"""What every token begins with, so that scanners for leaked secrets can know it."""


def generate() -> str:
    """Make a new token."""
    return PREFIX + secrets.token_urlsafe(32)


def digest(token: str) -> str:
    """Turn a token into what is stored of it."""
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).hexdigest()


def add(session: Session, name: str, hashed: str, scope: Scope) -> TokenRow:
    """Store a token.

    Raises:
        ValueError: there is one of that name, revoked or not.
    """
    if find(session, name) is not None:
        raise ValueError(f"there is a token {name!r} already; names are never used again")
    row = TokenRow(name=name, digest=hashed, scope=scope, created_at=now(session))
    session.add(row)
    session.flush()
    return row


def find(session: Session, name: str) -> TokenRow | None:
    """Find a token by its name."""
    return session.scalars(select(TokenRow).where(TokenRow.name == name)).one_or_none()


def find_all(session: Session) -> list[TokenRow]:
    """List the tokens, oldest first."""
    return list(session.scalars(select(TokenRow).order_by(TokenRow.id)))


def revoke(session: Session, name: str) -> TokenRow | None:
    """Make a token useless for good; None: there is none of that name."""
    row = find(session, name)
    if row is not None and row.revoked_at is None:
        row.revoked_at = now(session)
    return row
