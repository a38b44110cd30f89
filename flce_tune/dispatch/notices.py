"""Warnings that a training run sees once, however often their cause returns."""

from __future__ import annotations

import threading
import warnings


class TuningWarning(UserWarning):
    """Something about stored tuning results deserves attention; training goes on."""


class Notices:
    """Warns once per topic. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._given: set[str] = set()

    def once(self, topic: str, message: str) -> None:
        """Warn with ``message``, unless ``topic`` was warned about before."""
        with self._lock:
            if topic in self._given:
                return
            self._given.add(topic)
        warnings.warn(message, TuningWarning, stacklevel=3)
