"""Settings: the only reader of the environment.

Each field is read from ``FLCE_TUNE_<NAME>``. Nothing is read at import; ``load()`` is called
where a command or the first op call needs it.
"""

from __future__ import annotations

from pathlib import Path

import platformdirs
from pydantic import ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict


class Settings(BaseSettings):
    """What the environment says."""

    model_config = SettingsConfigDict(
        env_prefix="FLCE_TUNE_", env_ignore_empty=True, extra="ignore"
    )

    db: str | None = None
    """A path or SQLAlchemy URL of the tuning database; None: a file in the user data directory."""
    url: str | None = None
    """Base URL of a service to fetch the snapshot from."""
    token: str | None = None
    """Bearer token for that service."""
    workspace_limit: int | None = None
    """Default byte budget of the op beyond its inputs and gradients."""
    cache_dir: Path | None = None
    """Where downloaded snapshots are kept; None: the user cache directory."""

    record_misses: bool = True
    """Whether a process notes, when it ends, the problems it found no exact result for."""

    @property
    def database_url(self) -> str:
        """The SQLAlchemy URL of the tuning database."""
        if self.db is None:
            path = Path(platformdirs.user_data_dir("flce-tune")) / "tuning.sqlite3"
        elif "://" in self.db:
            return self.db
        else:
            path = Path(self.db).expanduser()
        return f"sqlite:///{path}"

    @property
    def database_path(self) -> Path | None:
        """The file of a SQLite database; None if it is another kind, or in memory."""
        scheme, _, rest = self.database_url.partition("://")
        name = rest.partition("?")[0].removeprefix("/")
        return Path(name) if scheme.partition("+")[0] == "sqlite" and name else None

    @property
    def cache_path(self) -> Path:
        """The folder downloaded snapshots are kept in. Nothing is created."""
        return self.cache_dir or Path(platformdirs.user_cache_dir("flce-tune"))


def load() -> Settings:
    """Read the environment now.

    Raises:
        ValueError: a variable holds something else than its field accepts; the message names it.
    """
    try:
        return Settings()
    except ValidationError as error:
        first = error.errors()[0]
        variable = "FLCE_TUNE_" + "_".join(map(str, first["loc"])).upper()
        raise ValueError(f"{variable}={first['input']!r}: {first['msg']}") from error
