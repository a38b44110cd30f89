"""Time, memory and patience."""

from __future__ import annotations

import gc
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import torch

GIB = 2**30


class OutOfTime(BaseException):
    """Something took longer than it was given; not an Exception, so that no library eats it."""


class Deadline:
    """A point in time that work must not pass."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def remaining(self) -> float:
        """Seconds left; negative once the deadline has passed."""
        return self._end - time.monotonic()


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raise OutOfTime inside the block once it has run for ``seconds`` (main thread only)."""
    if seconds <= 0:
        raise OutOfTime("no time left")

    def expire(_signal: int, _frame: FrameType | None) -> None:
        raise OutOfTime(f"gave up after {seconds:.0f} s")

    begin = time.monotonic()
    outer_handler = signal.signal(signal.SIGALRM, expire)
    # Rings again each second: an exception raised inside a callback of the interpreter is lost.
    outer_seconds, _ = signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, outer_handler)
        if outer_seconds:  # somebody else's alarm was set: let it go on
            left = outer_seconds - (time.monotonic() - begin)
            signal.setitimer(signal.ITIMER_REAL, max(left, 1e-3))


class Stopwatch:
    """Times one step: CUDA events on a GPU, the wall clock on a CPU.

    On a GPU some milliseconds of matrix products are queued first, a fifth of one each, so that
    the host runs ahead of the device as it does in training. A step that waits for the device
    still pays for it.
    """

    def __init__(self, device: torch.device, products: int = 10) -> None:
        self.device, self._products = device, products
        if device.type == "cuda":
            self._filler = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)
            self._sink = torch.empty_like(self._filler)

    def time(self, step: Callable[[], object]) -> float:
        """Milliseconds of one call of ``step``."""
        if self.device.type != "cuda":
            begin = time.perf_counter()
            step()
            return (time.perf_counter() - begin) * 1e3
        start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        for _ in range(self._products):
            torch.mm(self._filler, self._filler, out=self._sink)
        start.record()
        step()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end))


def peak_above(step: Callable[[], object], device: torch.device) -> int | None:
    """Peak bytes ``step`` allocates beyond what is held now; None on a CPU."""
    gc.collect()
    if device.type != "cuda":
        step()
        return None
    torch.cuda.synchronize(device)
    held = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - held


def release(device: torch.device) -> None:
    """Give cached memory back, so that one implementation's leftovers do not starve the next."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def half_quartile_range(samples: list[float]) -> float:
    """Half the interquartile range; 0 for fewer than four samples."""
    if len(samples) < 4:
        return 0.0
    first, _, third = statistics.quantiles(samples, n=4)
    return (third - first) / 2
