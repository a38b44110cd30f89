"""Fills Triton's disk cache on all cores before anything is measured.

A config compiles the same kernels for a small problem as for a large one that leaves the same
remainders, so small problems in several worker processes leave their binaries where the measuring
worker finds them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import threading
from collections.abc import Callable, Sequence

from flce_tune.errors import SweepError
from flce_tune.kernels.config import Config
from flce_tune.kernels.problem import Problem
from flce_tune.sweep.failures import CandidateError
from flce_tune.sweep.measure import BenchFactory
from flce_tune.sweep.places import Place, PlaceLostError
from flce_tune.sweep.worker import StoppedError

CHUNK = 256  # tokens
PARTS = 4  # the first, the last and those between them have kernels of their own
LARGEST_SLAB = 16896  # vocabulary columns
HIDDEN = 512
REMAINDER = 256  # the largest block; kernels differ by what is left of a size, and by little else


def precompile(
    configs: Sequence[Config],
    problem: Problem,
    place: Place,
    make_bench: BenchFactory,
    *,
    timeout_s: float,
    processes: int | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> dict[Config, CandidateError]:
    """Compile the kernels of all configs in parallel; return those that failed, and how.

    Raises:
        StoppedError: ``should_stop`` said so.
    """
    small = shrunk(problem)
    todo: queue.SimpleQueue[Config] = queue.SimpleQueue()
    for config in configs:
        todo.put(config)
    failures: dict[Config, CandidateError] = {}
    cancelled = threading.Event()

    def stopped() -> bool:
        return cancelled.is_set() or (should_stop is not None and should_stop())

    def work() -> None:
        worker = place.runner(make_bench, small, 0, stopped)
        # A worker that cannot start leaves its share to the others, and at last to the measuring.
        over = contextlib.suppress(queue.Empty, SweepError, StoppedError, PlaceLostError)
        with contextlib.closing(worker), over:
            while True:
                config = todo.get_nowait()
                try:
                    worker.call("compile", shrunk_config(config, problem), timeout_s=timeout_s)
                except CandidateError as error:
                    failures[config] = error

    count = min(processes or place.processes(small), len(configs))
    threads = [threading.Thread(target=work, name=f"precompile-{i}") for i in range(count)]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    finally:
        cancelled.set()
    if should_stop is not None and should_stop():
        raise StoppedError
    return failures


def shrunk(problem: Problem) -> Problem:
    """A small problem for which a shrunk config compiles what it compiles for this one."""
    return dataclasses.replace(
        problem,
        tokens=_shrunk(problem.tokens, PARTS * CHUNK),
        hidden=_shrunk(problem.hidden, HIDDEN),
        vocab=_shrunk(problem.vocab, PARTS * LARGEST_SLAB),
    )


def shrunk_config(config: Config, problem: Problem) -> Config:
    """The config with chunks that cut the shrunk problem into several where they cut this one."""
    if config.chunk is None or config.chunk >= problem.tokens:
        return config
    return dataclasses.replace(config, chunk=min(config.chunk, CHUNK))


def _shrunk(size: int, least: int) -> int:
    return min(size, least + size % REMAINDER)
