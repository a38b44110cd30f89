"""Ctrl-C that stops cleanly."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def stop_on_signal(announce: Callable[[], None]) -> Iterator[Callable[[], bool]]:
    """Yield a function that says whether SIGINT or SIGTERM came.

    The first one calls ``announce`` and only asks to stop; a second SIGINT raises
    KeyboardInterrupt. Handlers are put back afterwards. Use it from the main thread.
    """
    stopped = threading.Event()

    def handle(number: int, frame: FrameType | None) -> None:
        if stopped.is_set():
            signal.default_int_handler(number, frame)
        stopped.set()
        announce()

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stopped.is_set
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
