"""The worker process: makes its bench, then answers calls until its parent goes away."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import pickle
import signal
import sys
from multiprocessing.connection import Connection
from typing import Any

import torch

from flce_tune.sweep.failures import classify
from flce_tune.sweep.measure import Bench
from flce_tune.tuning_db.records import Status

_PR_SET_PDEATHSIG = 1


def main(descriptor: int, parent: int) -> None:
    """Serve one parent process over an inherited socket."""
    connection: Connection[Any, Any] = Connection(descriptor)
    _die_with(parent)
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    make_bench, problem, device_name, seed = pickle.loads(connection.recv_bytes())
    device = torch.device(device_name)
    try:
        bench: Bench = make_bench(problem, device, seed)
    except Exception as error:  # noqa: BLE001 - reported to the parent
        connection.send(_failure(error, device))
        return
    connection.send(("value", None))
    _serve(connection, bench, device)


def _serve(connection: Connection[Any, Any], bench: Bench, device: torch.device) -> None:
    while True:
        try:
            method, args = connection.recv()
        except EOFError:
            return
        try:
            answer = ("value", getattr(bench, method)(*args))
        except Exception as error:  # noqa: BLE001 - a candidate may raise anything
            answer = _failure(error, device)
        connection.send(answer)


def _failure(error: Exception, device: torch.device) -> tuple[str, Any]:
    """Report an exception, and whether it left the device unusable for this process."""
    failure = classify(error)
    fatal = not _device_works(device)
    error.__traceback__ = None  # which holds the candidate's tensors
    if device.type == "cuda" and not fatal:
        torch.cuda.empty_cache()
    status = Status.CRASH if fatal else failure.status
    return "error", (status, failure.message, failure.errors, fatal)


def _device_works(device: torch.device) -> bool:
    if device.type != "cuda":
        return True
    try:
        torch.cuda.synchronize(device)
        torch.zeros(1, device=device).item()
    except RuntimeError:
        return False
    return True


def _die_with(parent: int) -> None:
    """Have the kernel end this process when its parent's thread ends, however that happens."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
