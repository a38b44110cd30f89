"""What can go wrong with one candidate, as a status the database knows."""

from __future__ import annotations

import math
import signal

import torch

from flce_tune.errors import FlceTuneError
from flce_tune.sweep.check import WrongResultError
from flce_tune.sweep.resources import HopelessKernelError
from flce_tune.tuning_db.records import Status

MESSAGE_LIMIT = 2000  # characters of a compiler's complaint that are worth keeping


class CandidateError(FlceTuneError):
    """One candidate failed; the sweep goes on without it."""

    def __init__(
        self, status: Status, message: str, errors: dict[str, float] | None = None
    ) -> None:
        super().__init__(status, message)
        self.status = status
        self.message = shorten(message)
        self.errors = {k: v for k, v in (errors or {}).items() if math.isfinite(v)}

    def __str__(self) -> str:
        return f"{self.status.value}: {self.message}"


def classify(error: BaseException) -> CandidateError:
    """Name the kind of failure an exception raised by a candidate is."""
    message = f"{type(error).__name__}: {error}"
    if isinstance(error, CandidateError):
        return error
    if isinstance(error, HopelessKernelError):
        return CandidateError(Status.OUT_OF_RESOURCES, str(error))
    if isinstance(error, WrongResultError):
        return CandidateError(Status.WRONG_RESULT, str(error), error.errors)
    return CandidateError(_status(error), message)


def _status(error: BaseException) -> Status:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return Status.OUT_OF_MEMORY
    # Triton is optional, so its errors are told apart by name.
    kind = type(error)
    text = str(error)
    if kind.__name__ == "OutOfResources":
        return Status.OUT_OF_RESOURCES
    if kind.__module__.startswith("triton.compiler") or kind.__name__ == "PTXASError":
        return Status.COMPILE_ERROR
    if "PassManager::run failed" in text or "ptxas" in text:
        return Status.COMPILE_ERROR
    if "DefaultCPUAllocator" in text:
        return Status.OUT_OF_MEMORY
    return Status.ERROR


def death(exit_code: int, last_words: str) -> CandidateError:
    """Describe a worker that died: its exit code (negative: a signal) and the end of its stderr."""
    if exit_code < 0:
        try:
            how = f"killed by {signal.Signals(-exit_code).name}"
        except ValueError:
            how = f"killed by signal {-exit_code}"
    else:
        how = f"exited with code {exit_code}"
    if exit_code == -signal.SIGKILL:
        how += ", perhaps because the system ran out of memory"
    message = f"the worker was {how}" if exit_code < 0 else f"the worker {how}"
    return CandidateError(Status.CRASH, f"{message}\n{last_words}".strip())


def shorten(text: str) -> str:
    """Keep the beginning and the end of a long text."""
    if len(text) <= MESSAGE_LIMIT:
        return text
    half = MESSAGE_LIMIT // 2
    return f"{text[:half]}\n[...]\n{text[-half:]}"
