"""Claims to problems: whoever holds one is the only one to sweep it on its kind of device.

A claim is a lease in the tuning database that a thread keeps renewing. If this process is killed
or its host lost, the lease runs out; others on the same host see at once that it is gone.
"""

from __future__ import annotations

import logging
import threading
import time
from types import TracebackType

from flce_tune.errors import StoreError
from flce_tune.sweep.processes import is_gone, unique_owner
from flce_tune.tuning_db.records import DeviceRecord, ProblemRecord, SweepLease
from flce_tune.tuning_db.store import Store

log = logging.getLogger(__name__)

LEASE_S = 60.0
RENEWALS = 4  # within the time of one lease


class Claim:
    """One problem that is ours for now."""

    def __init__(self, device: DeviceRecord, problem: ProblemRecord, owner: str) -> None:
        self.device = device
        self.problem = problem
        self.owner = owner
        self.lost = False  # somebody else has it, or might have it by now
        self.renewed_at = time.monotonic()


class Claims:
    """All claims of one sweep. A context manager: its thread renews them until the end."""

    def __init__(self, store: Store, seconds: float = LEASE_S) -> None:
        self._store = store
        self._seconds = seconds
        self._held: set[Claim] = set()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="sweep leases", daemon=True)

    def __enter__(self) -> Claims:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._thread.join()

    def claim(
        self, device: DeviceRecord, problem: ProblemRecord
    ) -> tuple[Claim | None, SweepLease]:
        """Ask for a problem. Without a claim, the lease tells who has it."""
        claim = Claim(device, problem, unique_owner())
        lease = self._store.claim_sweep(device, problem, claim.owner, self._seconds)
        if lease.owner != claim.owner and lease.owner is not None and is_gone(lease.owner):
            lease = self._store.claim_sweep(
                device, problem, claim.owner, self._seconds, dead_owner=lease.owner
            )
        if lease.owner != claim.owner:
            return None, lease
        self._held.add(claim)
        return claim, lease

    def release(self, claim: Claim, *, finished: str | None = None) -> None:
        """Give a problem back; ``finished`` says what was done with it, if all of it was."""
        self._held.discard(claim)
        self._store.release_sweep(claim.device, claim.problem, claim.owner, finished=finished)

    def _keep(self) -> None:
        while not self._ended.wait(self._seconds / RENEWALS):
            for claim in list(self._held):
                self._renew(claim)

    def _renew(self, claim: Claim) -> None:
        now = time.monotonic()
        try:
            ours = self._store.renew_sweep(claim.device, claim.problem, claim.owner, self._seconds)
        except StoreError as error:
            log.warning("the lease of %s was not renewed: %s", claim.problem, error)
            ours = now - claim.renewed_at < self._seconds * (1 - 1 / RENEWALS)
        else:
            claim.renewed_at = now
        if not ours and claim in self._held:
            claim.lost = True
