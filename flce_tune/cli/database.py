"""The tuning database a command works on: the one the settings name."""

from __future__ import annotations

import typer

from flce_tune import settings
from flce_tune.settings import Settings
from flce_tune.tuning_db.store import Store


def load_settings() -> Settings:
    """What the environment says.

    Raises:
        typer.BadParameter: a variable holds what its field does not accept.
    """
    try:
        return settings.load()
    except ValueError as error:
        raise typer.BadParameter(f"a setting in the environment: {error}") from error


def open_for_reading() -> Store | None:
    """The database, read-only; None if there is none yet.

    Raises:
        StoreError: it cannot be used.
    """
    config = load_settings()
    path = config.database_path
    if path is not None and not path.exists():
        return None
    return Store.open(config.database_url, create=False, read_only=True)


def open_for_writing() -> Store:
    """The database, created if need be.

    Raises:
        StoreError: it cannot be used.
    """
    return Store.open(load_settings().database_url)
