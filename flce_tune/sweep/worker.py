"""Runs a bench in a process of its own, which may crash, hang or be killed.

The worker is started as a fresh interpreter (or forked from one, see ``nursery``), not through
``multiprocessing``: that would run the caller's ``__main__`` again, which starts a second sweep if
the script has no main guard. It keeps its inputs (and, on a GPU, its context) from call to call;
when a call kills it, the next call starts another one.

The process is the leader of its own session: Ctrl-C in the terminal reaches the parent alone,
which then ends the worker together with any compiler it may have started.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, Pipe
from typing import IO, Any, Literal, Protocol

import torch

from flce_tune.errors import SweepError
from flce_tune.kernels.problem import Problem
from flce_tune.sweep.failures import CandidateError, classify, death
from flce_tune.sweep.measure import Bench, BenchFactory
from flce_tune.tuning_db.records import Status

Method = Literal["compile", "trial", "check_ragged", "time", "time_plain"]

START_TIMEOUT_S = 300.0  # for importing torch and making the inputs on a busy machine
POLL_S = 0.1  # how often a waiting parent looks at should_stop
LAST_WORDS = 1500  # bytes of stderr kept when a worker dies

# The garbage collector rests during the imports, which leave it nothing to find.
_BOOT = """
import gc, os, sys
gc.disable()
descriptor, parent, visible, *sys.path[:] = sys.argv[1:]
if visible:
    os.environ["CUDA_VISIBLE_DEVICES"] = visible
from flce_tune.sweep.worker_main import main
gc.freeze()
gc.enable()
main(int(descriptor), int(parent))
"""


class StoppedError(Exception):
    """``should_stop`` said so while a candidate was running."""


class Runner(Protocol):
    """Calls a bench, here or elsewhere."""

    def prepare(self) -> None:
        """Start what takes long to start, without waiting for it. Not necessary, only sooner."""

    def call(self, method: Method, *args: object, timeout_s: float) -> Any:
        """Call a method of the bench.

        Raises:
            CandidateError: the call failed; others may still work.
            SweepError: there can be no bench for this problem.
            StoppedError: ``should_stop`` said so.
        """

    def close(self) -> None:
        """Let go of the bench."""


class LocalRunner:
    """Calls a bench in this process: no isolation, no timeout."""

    def __init__(
        self, make_bench: BenchFactory, problem: Problem, device: torch.device, seed: int
    ) -> None:
        self._make: Callable[[], Bench] = functools.partial(make_bench, problem, device, seed)
        self._bench: Bench | None = None

    def prepare(self) -> None:
        """Do nothing: the first call makes the bench."""

    def call(self, method: Method, *args: object, timeout_s: float) -> Any:
        """Call a method of the bench; its exceptions become CandidateErrors."""
        if self._bench is None:
            try:
                self._bench = self._make()
            except Exception as error:
                raise SweepError(f"the problem cannot be set up: {classify(error)}") from error
        try:
            return getattr(self._bench, method)(*args)
        except Exception as error:
            raise classify(error) from error

    def close(self) -> None:
        """Drop the bench and its tensors."""
        self._bench = None


class Process(Protocol):
    """A process that serves calls, as ``subprocess.Popen`` has it."""

    @property
    def pid(self) -> int:
        """Its id, also that of its session once it works."""

    def wait(self, timeout: float | None = None) -> int:
        """Return its exit code; raises ``subprocess.TimeoutExpired``."""

    def kill(self) -> None:
        """Kill it, if it still runs."""


Start = Callable[[int, IO[bytes]], Process]
"""Starts a process that serves a socket, whose output goes to a file."""


class Worker:
    """Calls a bench in another process."""

    def __init__(
        self,
        make_bench: BenchFactory,
        problem: Problem,
        device: torch.device,
        seed: int,
        should_stop: Callable[[], bool] | None = None,
        *,
        visible: str | None = None,  # the GPUs the process sees, as CUDA names them; None: as here
        start: Start | None = None,  # what starts the process; None: a fresh interpreter
    ) -> None:
        self._begin = start or self._fresh
        self._arguments = pickle.dumps((make_bench, problem, str(device), seed))
        self._visible = visible or ""
        self._should_stop = should_stop or (lambda: False)
        self._process: Process | None = None
        self._connection: Connection[Any, Any] | None = None
        self._stderr: IO[bytes] | None = None
        self._ready = False  # the bench is made

    @property
    def pid(self) -> int | None:
        """The process id of the running worker; None while there is none."""
        return None if self._process is None else self._process.pid

    def prepare(self) -> None:
        """Start the process where none runs; it makes its bench by itself."""
        with self._killed_on_error():
            if self._process is None:
                self._start()

    def call(self, method: Method, *args: object, timeout_s: float) -> Any:
        """Call a method of the bench, starting a worker where none runs."""
        self.prepare()
        with self._killed_on_error():
            if not self._ready:
                self._await_bench()
            return self._exchange((method, args), timeout_s)

    def close(self) -> None:
        """End the worker and all it has started. Safe to call twice."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.wait()
        for resource in (self._connection, self._stderr):
            if resource is not None:
                resource.close()
        self._connection = self._stderr = None
        self._ready = False

    @contextlib.contextmanager
    def _killed_on_error(self) -> Iterator[None]:
        """Keep the worker only after an answer: after anything else nobody knows its state."""
        try:
            yield
        except _AnsweredError as answer:
            raise answer.error from None
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        ours, theirs = Pipe()
        self._connection = ours
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the worker
        with theirs:
            self._process = self._begin(theirs.fileno(), self._stderr)
        ours.send_bytes(self._arguments)

    def _fresh(self, descriptor: int, output: IO[bytes]) -> Process:
        return subprocess.Popen(
            [
                sys.executable,
                "-c",
                _BOOT,
                str(descriptor),
                str(os.getpid()),
                self._visible,
                *filter(None, sys.path),
            ],
            pass_fds=(descriptor,),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )

    def _await_bench(self) -> None:
        try:
            self._receive(START_TIMEOUT_S)
        except (CandidateError, _AnsweredError) as error:
            reason = error.error if isinstance(error, _AnsweredError) else error
            raise SweepError(f"the problem cannot be set up: {reason}") from None
        self._ready = True

    def _exchange(self, request: tuple[Method, tuple[object, ...]], timeout_s: float) -> Any:
        assert self._connection is not None
        try:
            self._connection.send(request)
        except OSError:
            raise self._death() from None
        return self._receive(timeout_s)

    def _receive(self, timeout_s: float) -> Any:
        assert self._connection is not None
        deadline = time.monotonic() + timeout_s
        while not self._connection.poll(POLL_S):
            if self._should_stop():
                raise StoppedError
            if time.monotonic() > deadline:
                raise CandidateError(Status.TIMEOUT, f"no answer within {timeout_s:g} s")
        try:
            kind, value = self._connection.recv()
        except (EOFError, OSError):
            raise self._death() from None
        if kind == "value":
            return value
        status, message, errors, fatal = value
        error = CandidateError(status, message, errors)
        raise error if fatal else _AnsweredError(error)

    def _death(self) -> CandidateError:
        assert self._process is not None
        assert self._stderr is not None
        try:
            exit_code = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return CandidateError(Status.CRASH, "the worker closed its connection and hangs")
        size = self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, size - LAST_WORDS))
        return death(exit_code, self._stderr.read().decode(errors="replace"))


class _AnsweredError(Exception):
    """The worker reported a failure and is fit for the next candidate."""

    def __init__(self, error: CandidateError) -> None:
        super().__init__(error)
        self.error = error
