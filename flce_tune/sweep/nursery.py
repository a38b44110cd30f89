"""Workers forked from one process that has imported torch and the compiler already.

A fresh interpreter takes seconds for its imports, and a dozen of them that import at the same time
hold each other up: on a 16-core GPU machine the first of 15 was ready after 20 s, one by itself
after 6. Only for workers that touch no GPU, which a fork would not survive; on Linux alone, where
workers die with the process that forked them.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import IO, NoReturn

from flce_tune.errors import SweepError
from flce_tune.sweep.worker import StoppedError

PRELOADED = ("flce_tune.kernels.triton.backend", "flce_tune.kernels.hopper.launch")
"""What compilers import besides the worker; not there without a Triton that has it."""
POLL_S = 0.02
_FORK, _EXIT_CODE = b"f", b"c"
_REQUEST, _REPLY = struct.Struct("=ci"), struct.Struct("=i")
_RUNNING = 256  # is no exit code
_READY = b"r"  # sent once, after the imports
GONE = "the process that starts compilers is gone"

_BOOT = """
import os, sys
descriptor, visible, *sys.path[:] = sys.argv[1:]
os.environ["CUDA_VISIBLE_DEVICES"] = visible
from flce_tune.sweep.nursery import serve
serve(int(descriptor))
"""


def can_fork() -> bool:
    """Whether workers can be forked here."""
    return sys.platform == "linux"


class Nursery:
    """Starts workers; several threads may ask at the same time."""

    def __init__(self, visible: str) -> None:  # the GPUs that workers see, as CUDA names them
        """Start the process, without waiting for it."""
        self._socket, theirs = socket.socketpair()
        self._lock = threading.Lock()
        self._ready = False  # it has imported what it needs
        self._process = subprocess.Popen(
            [sys.executable, "-c", _BOOT, str(theirs.fileno()), visible, *filter(None, sys.path)],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        theirs.close()

    def start(
        self,
        descriptor: int,
        output: IO[bytes],
        should_stop: Callable[[], bool] = lambda: False,
    ) -> Forked:
        """Fork a worker that serves a socket; see ``worker_main.main``.

        Raises:
            SweepError: the process is gone.
            StoppedError: ``should_stop`` said so while the process was importing.
        """
        self._await_imports(should_stop)
        return Forked(self, self._ask(_FORK, 0, (descriptor, output.fileno())))

    def exit_code(self, pid: int) -> int | None:
        """What a worker ended with, minus the signal that killed it; None while it runs."""
        code = self._ask(_EXIT_CODE, pid)
        return None if code == _RUNNING else code

    def close(self) -> None:
        """End the process and all its workers. Safe to call twice."""
        self._socket.close()
        self._process.kill()
        self._process.wait()

    def _await_imports(self, should_stop: Callable[[], bool]) -> None:
        with self._lock:
            while not self._ready:
                if select.select([self._socket], [], [], POLL_S)[0]:
                    if not self._socket.recv(1):
                        raise SweepError(GONE)
                    self._ready = True
                elif should_stop():
                    raise StoppedError

    def _ask(self, kind: bytes, pid: int, descriptors: tuple[int, ...] = ()) -> int:
        with self._lock:
            try:
                socket.send_fds(self._socket, [_REQUEST.pack(kind, pid)], descriptors)
                (answer,) = _REPLY.unpack(self._socket.recv(_REPLY.size, socket.MSG_WAITALL))
            except (OSError, struct.error) as error:
                raise SweepError(GONE) from error
        number: int = answer
        return number


class Forked:
    """A worker process that is not a child of this one; as ``subprocess.Popen``."""

    def __init__(self, nursery: Nursery, pid: int) -> None:
        self._nursery = nursery
        self.pid = pid

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code when the process has ended.

        Raises:
            subprocess.TimeoutExpired: it has not.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with contextlib.suppress(SweepError):
            while (code := self._nursery.exit_code(self.pid)) is None:
                if deadline is not None and time.monotonic() > deadline:
                    raise subprocess.TimeoutExpired("worker", timeout or 0.0)
                time.sleep(POLL_S)
            return code
        return -signal.SIGKILL  # with the process that forked it

    def kill(self) -> None:
        """Kill the process, if it still runs."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


def serve(descriptor: int) -> None:
    """Fork workers for the process at the other end of a socket, until it is gone."""
    connection = socket.socket(fileno=descriptor)
    importlib.import_module("flce_tune.sweep.worker_main")
    for name in PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.freeze()  # the workers' collections leave what they share alone
    connection.sendall(_READY)
    while True:
        message, descriptors, _, _ = socket.recv_fds(connection, _REQUEST.size, 2)
        if not message:
            return
        kind, pid = _REQUEST.unpack(message)
        answer = _fork(connection, *descriptors) if kind == _FORK else _exit_code(pid)
        connection.sendall(_REPLY.pack(answer))


def _fork(connection: socket.socket, descriptor: int, output: int) -> int:
    pid = os.fork()
    if pid == 0:
        _work(connection, descriptor, output)
    os.close(descriptor)
    os.close(output)
    return pid


def _work(connection: socket.socket, descriptor: int, output: int) -> NoReturn:
    """Be a worker from here on."""
    code = 1
    try:
        os.setsid()
        connection.close()
        for stream in (1, 2):
            os.dup2(output, stream)
        os.close(output)
        from flce_tune.sweep.worker_main import main

        main(descriptor, os.getppid())
        code = 0
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else 1
    except Exception:  # noqa: BLE001 - nothing above may go on in this process
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(code)


def _exit_code(pid: int) -> int:
    try:
        ended, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:  # nobody's child: it was asked for before
        return 0
    return os.waitstatus_to_exitcode(status) if ended else _RUNNING
