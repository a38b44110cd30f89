"""What was asked for and had no exact answer: the list of what to sweep next."""

from __future__ import annotations

import threading
from datetime import datetime, timezone
from typing import TYPE_CHECKING

from flce_tune.tuning_db.records import DeviceRecord, Miss, ProblemRecord

if TYPE_CHECKING:
    from flce_tune.tuning_db.store import Store

_Key = tuple[DeviceRecord, ProblemRecord]


class Misses:
    """Bounded record of misses in memory. Thread-safe; writes nothing until told to.

    The dispatcher remembers its choices, so a process notes each problem class about once and
    ``Miss.count`` counts processes rather than calls.
    """

    def __init__(self, capacity: int = 1024) -> None:
        self._capacity = capacity
        self._lock = threading.Lock()
        self._noted: dict[_Key, Miss] = {}

    def note(self, device: DeviceRecord, problem: ProblemRecord, tokens: int) -> None:
        """Record one miss. When full, problems not seen before are dropped."""
        now = datetime.now(timezone.utc)
        key = (device, problem)
        with self._lock:
            before = self._noted.get(key)
            if before is None and len(self._noted) >= self._capacity:
                return
            count = 1 if before is None else before.count + 1
            self._noted[key] = Miss(device, problem, tokens, count, now)

    def pending(self) -> list[Miss]:
        """What was noted since the last flush."""
        with self._lock:
            return list(self._noted.values())

    def flush(self, store: Store) -> int:
        """Write what is pending to ``store`` and forget it; returns how many.

        Raises:
            StoreError: it cannot be written; nothing is forgotten.
        """
        pending = self.pending()
        if not pending:
            return 0
        store.note_misses(pending)
        with self._lock:
            for miss in pending:
                key = (miss.device, miss.problem)
                if self._noted.get(key) is miss:
                    del self._noted[key]
        return len(pending)
