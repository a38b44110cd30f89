"""Fills Triton's disk cache on all cores before anything is measured.

A config compiles the same kernels for a few tokens as for many, so small problems in several
worker processes leave their binaries where the measuring worker finds them.
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
from flce_tune.sweep.places import Place
from flce_tune.sweep.worker import StoppedError

TOKENS = 256  # divisible by all that Triton specialises on, like most real token counts


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
    small = dataclasses.replace(problem, tokens=min(TOKENS, problem.tokens))
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
        with contextlib.closing(worker), contextlib.suppress(queue.Empty, SweepError, StoppedError):
            while True:
                config = todo.get_nowait()
                try:
                    worker.call("compile", config, timeout_s=timeout_s)
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
