"""What one service process is told."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field

from flce_tune.errors import ServiceError


@dataclass(frozen=True, slots=True)
class ServiceSettings:
    """Everything ``create_app`` and ``run`` need; the command line fills it in.

    Raises:
        ServiceError: it would listen beyond loopback without a token and without ``insecure``.
    """

    database_url: str  # SQLAlchemy URL
    host: str = "127.0.0.1"
    port: int = 8000
    token: str | None = field(default=None, repr=False)  # bearer token that writes need
    insecure: bool = False  # listen beyond loopback although anybody may write
    run_jobs: bool = True  # False: serve only, leave the queue to other processes
    lease_seconds: float = 30.0  # a running job nobody vouched for this long is taken over
    poll_seconds: float = 0.5  # how often the queue and the events of a watched job are read
    stop_seconds: float = 10.0  # a sweep told to stop gets this long before it is killed
    max_body_bytes: int = 1 << 20

    def __post_init__(self) -> None:
        if self.token == "":
            raise ServiceError("the token is empty: give a real one, or none")
        if self.token is None and not self.insecure and not _is_loopback(self.host):
            raise ServiceError(
                f"refusing to listen on {self.host} without a token, because anybody who reaches "
                "it could submit jobs: set FLCE_TUNE_TOKEN, listen on 127.0.0.1, or accept the "
                "risk with --insecure"
            )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
