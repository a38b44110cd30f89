"""A service whose jobs measure nothing: they write rows, one after the other, and resume.

    python -P benchmarks/service/fake_jobs.py '{"database_url": "sqlite:////tmp/x"}' DIR

For tests of what must hold whenever the service dies, and of hours under load. A job runs in a
thread, so that it dies with the service; in DIR it holds a lock while it runs, and leaves a file
``JOB.twice`` if somebody else has that: two run the same job at once.
"""

from __future__ import annotations

import fcntl
import json
import sys
import threading
from pathlib import Path

from flce_tune.service import queue
from flce_tune.service.app import run
from flce_tune.service.executors import Site
from flce_tune.service.job_process import Outcome
from flce_tune.service.settings import ServiceSettings
from flce_tune.tuning_db.records import (
    DeviceRecord,
    Job,
    JobState,
    Measurement,
    ProblemRecord,
    Status,
    ToolchainRecord,
    Winner,
    canonical_config,
)
from flce_tune.tuning_db.store import Store

DEVICE = DeviceRecord("cpu", "Fake CPU", "0.0", 4, 0)
TOOLCHAIN = ToolchainRecord("0", "", "", "", "fake")
CONFIGS = [{"strategy": "chunked", "chunk": 1 << power} for power in range(4, 12)]
SECONDS = 0.03  # per config


class FakeProcess:
    """As ``JobProcess``, but a thread that writes what a sweep would."""

    folder: Path

    def __init__(self, url: str, job: Job, _site: Site) -> None:
        self._store = Store.open(url)
        self._job = job
        self._stop = threading.Event()
        self._outcome: Outcome | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def wait(self, seconds: float) -> Outcome | None:
        self._thread.join(seconds)
        return self._outcome

    def stop(self, _grace_seconds: float) -> None:
        self._stop.set()

    def kill(self) -> None:
        self._stop.set()
        self._thread.join()
        self._store.close()

    def _run(self) -> None:
        with (self.folder / self._job.id).open("w") as held:
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                (self.folder / f"{self._job.id}.twice").touch()
            self._outcome = self._sweep()

    def _sweep(self) -> Outcome:
        given = self._job.spec["problems"][0]
        problem = ProblemRecord(
            "train", "float32", "fp32", given["hidden"], given["vocab"], given["tokens"]
        )
        known = self._store.measured_configs(DEVICE, problem, given["tokens"], TOOLCHAIN)
        for number, config in enumerate(CONFIGS):
            if self._stop.wait(SECONDS):
                return Outcome(None)
            if canonical_config(config) in known:
                continue
            self._store.add_measurement(
                Measurement(
                    DEVICE, TOOLCHAIN, problem, given["tokens"], config, Status.OK,
                    samples_ms=(1.0 + number,), median_ms=1.0 + number, workspace_bytes=number,
                )
            )  # fmt: skip
            self._store.add_event(self._job.id, "measurement", {"config": canonical_config(config)})
        first = self._store.measurements(device=DEVICE, problem=problem, limit=1)
        self._store.set_winners(DEVICE, problem, [Winner(first[0], 2.0, 3.0)])
        return Outcome(JobState.SUCCEEDED)


if __name__ == "__main__":
    FakeProcess.folder = Path(sys.argv[2])
    queue.JobProcess = FakeProcess  # type: ignore[misc,assignment]
    run(ServiceSettings(**json.loads(sys.argv[1])))
