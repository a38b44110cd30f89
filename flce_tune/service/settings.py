"""What one service process is told."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field

from flce_tune.errors import ServiceError
from flce_tune.service.executors import Executor, LocalExecutor


@dataclass(frozen=True, slots=True)
class ServiceSettings:
    """Everything ``create_app`` and ``run`` need; the command line fills it in.

    Raises:
        ServiceError: the token is empty.
    """

    database_url: str  # SQLAlchemy URL
    host: str = "127.0.0.1"
    port: int = 8000
    token: str | None = field(default=None, repr=False)  # may do everything, beside the stored ones
    insecure: bool = False  # listen beyond loopback although anybody may write
    private: bool = False  # reads need a token, too
    run_jobs: bool = True  # False: serve only, leave the queue to other processes
    executor: Executor = field(default_factory=LocalExecutor)  # what jobs are done on
    lease_seconds: float = 30.0  # a running job nobody vouched for this long is taken over
    poll_seconds: float = 0.5  # how often the queue and the events of a watched job are read
    stop_seconds: float = 10.0  # a sweep told to stop gets this long before it is killed
    max_body_bytes: int = 1 << 20
    max_import_bytes: int = 1 << 30  # of an export that somebody uploads; kept on disk meanwhile
    max_refused_tokens: int = 10  # from one address, in the time below; then it has to wait
    refused_tokens_seconds: float = 60.0

    def __post_init__(self) -> None:
        if self.token == "":
            raise ServiceError("the token is empty: give a real one, or none")

    def refuse_exposure(self, *, has_tokens: bool) -> None:
        """Check that nobody beyond this machine could write without a token.

        Args:
            has_tokens: whether the database holds any.

        Raises:
            ServiceError: somebody could, and it is not said to be wanted (``insecure``).
        """
        protected = self.token is not None or has_tokens
        if not protected and not self.insecure and not _is_loopback(self.host):
            raise ServiceError(
                f"refusing to listen on {self.host} without a token, because anybody who reaches "
                "it could submit jobs: make one with `flce-tune token create` or set "
                "FLCE_TUNE_TOKEN, listen on 127.0.0.1, or accept the risk with --insecure"
            )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
