"""Fills Triton's disk cache on the cores that the measuring leaves free.

Worker processes that do not touch the GPU run the op on the real sizes, without storage, so they
leave what the measuring worker asks Triton for, and it compiles nothing; see ``absent``. What is
measured first is compiled first.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from flce_tune.errors import SweepError
from flce_tune.kernels.config import Config
from flce_tune.kernels.problem import Problem
from flce_tune.sweep.failures import CandidateError
from flce_tune.sweep.measure import BenchFactory
from flce_tune.sweep.places import Place, PlaceLostError
from flce_tune.sweep.worker import POLL_S, StoppedError
from flce_tune.tuning_db.records import Status


@dataclass(frozen=True, slots=True)
class _Task:
    """The kernels of one config, on the problem or on its ragged neighbour."""

    config: Config
    ragged: bool


class Precompiler:
    """Compiles in the background, in several worker processes, until it is closed."""

    def __init__(
        self,
        configs: Iterable[Config],
        problem: Problem,
        place: Place,
        make_bench: BenchFactory,
        *,
        timeout_s: float,
        urgent: int = 0,
        processes: int | None = None,
    ) -> None:
        """Start on ``configs`` in their order, then on all of them for the ragged neighbour.

        The first ``urgent`` ones are compiled for both before the others.
        """
        self._problem = problem
        self._place = place
        self._make_bench = make_bench
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._closed = threading.Event()
        self._failures: dict[Config, CandidateError] = {}
        listed = list(configs)
        parts = (listed[:urgent], listed[urgent:])
        self._todo = dict.fromkeys(_Task(c, r) for p in parts for r in (False, True) for c in p)
        self._doing: set[_Task] = set()
        self._done: set[_Task] = set()
        self.count = len(self._todo)
        self._threads = [
            threading.Thread(target=self._work, name=f"precompile-{i}")
            for i in range(processes or place.compilers())
        ]
        self._alive = len(self._threads)
        for thread in self._threads:
            thread.start()

    def waiting(self, config: Config, *, ragged: bool = False) -> bool:
        """Whether some of a config's kernels are still to come."""
        task = _Task(config, ragged)
        with self._changed:
            return self._alive > 0 and (task in self._todo or task in self._doing)

    def prefer(self, configs: Sequence[Config], *, ragged: bool) -> None:
        """Compile what these configs need next; for the neighbour, which comes last, that alone.

        Those without tiles, which take no time, go first: there is something to measure then.
        Whatever still compiles for a race takes cores from those that are timed.
        """
        wanted = [_Task(c, ragged) for c in sorted(configs, key=_has_tiles)]
        with self._changed:
            first = [t for t in wanted if t not in self._done and t not in self._doing]
            self._todo = dict.fromkeys(first) | ({} if ragged else self._todo)
            self._changed.notify_all()

    def ready_first(
        self,
        configs: Sequence[Config],
        *,
        ragged: bool,
        hurry: Callable[[], bool],
        should_stop: Callable[[], bool],
    ) -> Iterator[Config]:
        """Yield configs in their order, but those that wait for nothing first.

        With nothing to wait for or in a ``hurry``, in their order alone.

        Raises:
            StoppedError: ``should_stop`` said so.
        """
        self.prefer(configs, ragged=ragged)
        left = list(configs)
        while left:
            ready = (c for c in left if hurry() or not self.waiting(c, ragged=ragged))
            first = next(ready, None)
            if first is not None:
                left.remove(first)
                yield first
                continue
            self.wait(POLL_S)
            if should_stop():
                raise StoppedError

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when something has been compiled, nothing is to come, or the time is over."""
        with self._changed:
            if self._alive and (self._todo or self._doing):
                self._changed.wait(timeout_s)

    def failures(self) -> dict[Config, CandidateError]:
        """The configs that failed so far, and how."""
        with self._changed:
            return dict(self._failures)

    def join(self) -> None:
        """Wait until everything has been compiled."""
        with self._changed:
            self._changed.wait_for(lambda: not self._alive or not (self._todo or self._doing))

    def close(self) -> None:
        """Stop compiling and end the workers. Safe to call twice."""
        self._closed.set()
        with self._changed:
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        worker = self._place.compiler(self._make_bench, self._problem, self._closed.is_set)
        try:
            with contextlib.closing(worker), contextlib.suppress(StoppedError, PlaceLostError):
                works = False
                while (task := self._next()) is not None:
                    self._compile(worker.call, task, works)
                    works = True
        except SweepError as error:  # its share is left to the others, and at last to the measuring
            warnings.warn(f"flce-tune: cannot compile ahead: {error}", stacklevel=1)
        finally:
            with self._changed:
                self._alive -= 1
                self._changed.notify_all()

    def _next(self) -> _Task | None:
        """Wait for something to do; None once closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed.is_set() or self._todo)
            if self._closed.is_set():
                return None
            task = next(iter(self._todo))
            del self._todo[task]
            self._doing.add(task)
            return task

    def _compile(self, call: Callable[..., object], task: _Task, works: bool) -> None:
        """Do a task; ``works`` says that the worker has done one before.

        Raises:
            SweepError: the first one went wrong, and not in a compiler: another Triton or torch?
        """
        try:
            call("compile", task.config, task.ragged, timeout_s=self._timeout_s)
        except CandidateError as error:
            # Of the neighbour the check on it will tell, and of an error that is not a compiler's
            # the measuring: it may be for want of a GPU.
            if error.status is Status.ERROR:
                if not works:
                    raise SweepError(str(error)) from error
            elif not task.ragged:
                with self._changed:
                    self._failures[task.config] = error
        finally:
            with self._changed:
                self._doing.remove(task)
                self._done.add(task)
                self._changed.notify_all()


def _has_tiles(config: Config) -> bool:
    return any((config.logits, config.dx, config.dw))
