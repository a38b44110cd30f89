"""One job, run in a process of its own.

GPU work, crashes and running out of memory stay in there. The process dies with the one that
started it: the pipe between them breaks, and it kills itself with all its workers, so that a
job which another service takes over is never run twice at once.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, Pipe
from typing import Any

from flce_tune.errors import FlceTuneError
from flce_tune.kernels.config import Config
from flce_tune.kernels.problem import Problem
from flce_tune.service import child
from flce_tune.service.executors import PlacesAwayError, Site
from flce_tune.service.schemas import JobSpec
from flce_tune.sweep.events import Stage, SweepEvents, SweepOptions, SweepReport
from flce_tune.sweep.missed import clear_misses
from flce_tune.sweep.sweep import sweep
from flce_tune.tuning_db.records import Job, JobState, Measurement, Winner
from flce_tune.tuning_db.store import Store

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How the process ended; ``state`` is None if it stopped as told, or found no place."""

    state: JobState | None
    message: str = ""


class JobProcess:
    """A running job, seen from the process that started it. For use by one thread."""

    def __init__(self, database_url: str, job: Job, site: Site) -> None:
        self._connection, theirs = Pipe()
        self._process = subprocess.Popen(
            child.command(__name__, main.__name__, str(theirs.fileno())),
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # to be killed as one group; and no Ctrl-C from our terminal
        )
        theirs.close()
        self._outcome: Outcome | None = None
        self._kill_at: float | None = None
        self._send((database_url, job.id, dict(job.spec), site))

    @property
    def pid(self) -> int:
        """Of the process, which also leads its own process group."""
        return self._process.pid

    def wait(self, seconds: float) -> Outcome | None:
        """Wait for the end, ``seconds`` at most. None: still running."""
        if self._outcome is None and self._connection.poll(seconds):
            self._receive()
        if self._outcome is None:
            if self._kill_at is not None and time.monotonic() >= self._kill_at:
                self.kill()
            return None
        self.kill()
        self._connection.close()
        return self._outcome

    def stop(self, grace_seconds: float) -> None:
        """Ask the sweep to end after the running config; kill it once the grace is over."""
        if self._kill_at is None:
            self._kill_at = time.monotonic() + grace_seconds
            self._send("stop")

    def kill(self) -> None:
        """End the process and all its workers now. Safe to call twice."""
        if self._process.returncode is None:
            os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()

    def _send(self, message: object) -> None:
        try:
            self._connection.send(message)
        except OSError:
            log.debug("job process %d has gone already", self.pid)

    def _receive(self) -> None:
        try:
            self._outcome = self._connection.recv()
        except (EOFError, ConnectionResetError):
            self._outcome = self._died()

    def _died(self) -> Outcome:
        code = self._process.wait()
        if self._kill_at is not None:
            return Outcome(None, "killed, because it did not stop in time")
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        return Outcome(JobState.FAILED, f"the sweep's process ended {how}")


class JobEvents(SweepEvents):
    """Writes what a sweep reports as events of its job, with the place where there are several."""

    def __init__(self, store: Store, job_id: str, place: str | None = None) -> None:
        self._store = store
        self._job_id = job_id
        self._place = place

    def at(self, place: str) -> JobEvents:
        """Name the place in each event."""
        return JobEvents(self._store, self._job_id, place)

    def on_place_lost(self, place: str, reason: str, dropped: bool) -> None:
        """Say which, and why."""
        then = "left alone from now on" if dropped else "tried once more"
        self._add("log", text=f"{place} was lost and is {then}: {reason}")

    def on_start(self, problem: Problem, total: int) -> None:
        """Say which problem is being swept."""
        self._add("progress", problem=asdict(problem), done=0, total=total)

    def on_stage(self, stage: Stage, total: int) -> None:
        """Say which stage the problem is in."""
        self._add("progress", stage=stage, done=0, total=total)

    def on_measurement(self, measurement: Measurement, done: int, total: int) -> None:
        """Say how one config fared."""
        self._add(
            "measurement",
            done=done,
            total=total,
            config=str(Config.from_dict(measurement.config)),
            status=measurement.status.value,
            median_ms=measurement.median_ms,
            message=measurement.message,
        )

    def on_winners(self, winners: Sequence[Winner]) -> None:
        """Say what won."""
        self._add(
            "winners",
            winners=[
                {
                    "config": dict(winner.measurement.config),
                    "median_ms": winner.measurement.median_ms,
                    "workspace_bytes": winner.measurement.workspace_bytes,
                    "default_ms": winner.default_ms,
                    "eager_ms": winner.eager_ms,
                }
                for winner in winners
            ],
        )

    def _add(self, kind: str, **data: object) -> None:
        if self._place is not None:
            data["place"] = self._place
        self._store.add_event(self._job_id, kind, data)


def main(descriptor: str) -> None:
    """Run the job that comes over an inherited socket, and tell the outcome over it."""
    connection: Connection[Any, Any] = Connection(int(descriptor))
    database_url, job_id, spec, site = connection.recv()
    stop = threading.Event()
    threading.Thread(target=_obey, args=(connection, stop), daemon=True).start()
    connection.send(_run(database_url, job_id, spec, site, stop))


def _obey(connection: Connection[Any, Any], stop: threading.Event) -> None:
    try:
        while True:
            connection.recv()
            stop.set()
    except (EOFError, OSError):
        os.killpg(0, signal.SIGKILL)


def _run(
    database_url: str, job_id: str, raw_spec: dict[str, Any], site: Site, stop: threading.Event
) -> Outcome:
    """Run the sweep. Isolates: whatever it raises becomes the outcome."""
    try:
        spec = JobSpec.model_validate(raw_spec)
        problems = [problem.problem() for problem in spec.problems]
        with (
            Store.open(database_url, create=False) as store,
            site.places(len(problems)) as places,
        ):
            report = sweep(
                problems,
                store,
                places,
                sweep_options(spec),
                events=JobEvents(store, job_id),
                should_stop=stop.is_set,
            )
            clear_misses(report, store)
    except PlacesAwayError as error:
        return Outcome(None, str(error))
    except FlceTuneError as error:
        return Outcome(JobState.FAILED, str(error))
    except Exception as error:
        log.exception("job %s failed", job_id)
        return Outcome(JobState.FAILED, f"{type(error).__name__}: {error}")
    return _judge(report)


def _judge(report: SweepReport) -> Outcome:
    """A sweep that found nothing at all raises; here some problems may lack winners."""
    if report.interrupted:
        return Outcome(None)
    errors = [f"{_describe(p.problem)}: {p.error}" for p in report.problems if p.error is not None]
    return Outcome(JobState.SUCCEEDED, "; ".join(errors))


def _describe(problem: Problem) -> str:
    return f"N={problem.tokens} D={problem.hidden} V={problem.vocab} {problem.dtype} {problem.mode}"


def sweep_options(spec: JobSpec) -> SweepOptions:
    """As the sweep takes them."""
    options = spec.options.model_dump()
    if options["strategies"] is not None:
        options["strategies"] = tuple(options["strategies"])
    return SweepOptions(**options)
