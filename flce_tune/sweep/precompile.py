"""Fills Triton's disk cache on the cores that the measuring leaves free.

A config compiles the same kernels for a small problem as for a large one that leaves the same
remainders, so small problems in several worker processes leave their binaries where the measuring
worker finds them. What is measured first is compiled first.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

from flce_tune.errors import SweepError
from flce_tune.kernels.config import Config
from flce_tune.kernels.problem import Problem
from flce_tune.sweep.failures import CandidateError
from flce_tune.sweep.measure import BenchFactory
from flce_tune.sweep.places import Place, PlaceLostError
from flce_tune.sweep.worker import POLL_S, StoppedError

CHUNK = 256  # tokens
PARTS = 4  # the first, the last and those between them have kernels of their own
LARGEST_SLAB = 16896  # vocabulary columns
HIDDEN = 512
REMAINDER = 256  # the largest block; kernels differ by what is left of a size, and by little else

Kernel = tuple[object, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class _Task:
    """The kernels of one config, on the problem or on its ragged neighbour."""

    config: Config
    ragged: bool

    @property
    def kernels(self) -> frozenset[Kernel]:
        c = self.config
        tiles = (("logits", c.logits), ("dx", c.dx), ("dw", c.dw))
        return frozenset((self.ragged, c.strategy, c.accumulator, *one) for one in tiles if one[1])


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
        processes: int | None = None,
    ) -> None:
        """Start on ``configs`` in their order, then on all of them for the ragged neighbour."""
        self._problem = problem
        self._small = shrunk(problem)
        self._place = place
        self._make_bench = make_bench
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._closed = threading.Event()
        self._failures: dict[Config, CandidateError] = {}
        self._todo = _without_repetition([_Task(c, r) for r in (False, True) for c in configs])
        self._doing: list[_Task] = []
        self.count = len(self._todo)
        processes = processes or (place.processes(self._small) if self._todo else 0)
        self._threads = [
            threading.Thread(target=self._work, name=f"precompile-{i}")
            for i in range(min(processes, self.count))
        ]
        self._alive = len(self._threads)
        for thread in self._threads:
            thread.start()

    def waiting(self, config: Config, *, ragged: bool = False) -> bool:
        """Whether some of a config's kernels are still to come."""
        wanted = _Task(config, ragged).kernels
        with self._changed:
            to_come = [*self._todo, *self._doing] if self._alive else []
            return any(task.kernels & wanted for task in to_come)

    def prefer(self, configs: Sequence[Config], *, ragged: bool) -> None:
        """Compile what these configs need next; for the neighbour, which comes last, that alone.

        Whatever still compiles then takes the device from those that are timed on it.
        """
        wanted = frozenset[Kernel]().union(*(_Task(c, ragged).kernels for c in configs))
        with self._changed:
            if ragged:
                self._todo = [task for task in self._todo if task.kernels & wanted]
            self._todo.sort(key=lambda task: not task.kernels & wanted)

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
            if self._alive:
                self._changed.wait(timeout_s)

    def failures(self) -> dict[Config, CandidateError]:
        """The configs that failed so far, and how."""
        with self._changed:
            return dict(self._failures)

    def join(self) -> None:
        """Wait until everything has been compiled."""
        for thread in self._threads:
            thread.join()

    def close(self) -> None:
        """Stop compiling and end the workers. Safe to call twice."""
        self._closed.set()
        self.join()

    def _work(self) -> None:
        worker = self._place.runner(self._make_bench, self._small, 0, self._closed.is_set)
        # A worker that cannot start leaves its share to the others, and at last to the measuring.
        over = contextlib.suppress(SweepError, StoppedError, PlaceLostError)
        try:
            with contextlib.closing(worker), over:
                while (task := self._next()) is not None:
                    self._compile(worker.call, task)
        finally:
            with self._changed:
                self._alive -= 1
                self._changed.notify_all()

    def _next(self) -> _Task | None:
        with self._changed:
            if self._closed.is_set() or not self._todo:
                return None
            self._doing.append(self._todo.pop(0))
            return self._doing[-1]

    def _compile(self, call: Callable[..., object], task: _Task) -> None:
        config = shrunk_config(task.config, self._problem)
        try:
            call("compile", config, task.ragged, timeout_s=self._timeout_s)
        except CandidateError as error:
            if not task.ragged:  # that is for the check on the neighbour to say
                with self._changed:
                    self._failures[task.config] = error
        finally:
            with self._changed:
                self._doing.remove(task)
                self._changed.notify_all()


def _without_repetition(tasks: Sequence[_Task]) -> list[_Task]:
    """Drop those whose kernels all are in earlier ones."""
    known: set[Kernel] = set()
    kept = []
    for task in tasks:
        if not task.kernels <= known:
            kept.append(task)
        known |= task.kernels
    return kept


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
