"""Job processes that are stopped, killed or orphaned in the middle of a real sweep."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from flce_tune.service import child
from flce_tune.service.executors import LocalSite
from flce_tune.service.job_process import JobProcess, Outcome, sweep_options
from flce_tune.service.schemas import JobSpec
from flce_tune.sweep.events import SweepOptions
from flce_tune.tuning_db.records import Job, JobState
from flce_tune.tuning_db.store import Store

CPU = LocalSite(("cpu",))
LONG = {
    "device": "cpu",
    "problems": [{"tokens": 16384, "hidden": 64, "vocab": 8192, "dtype": "float32"}],
}

ORPHAN = """
import sys, time
from flce_tune.service import child
from flce_tune.service.executors import LocalSite
from flce_tune.service.job_process import JobProcess
from flce_tune.tuning_db.store import Store
with Store.open(sys.argv[1]) as store:
    process = JobProcess(store.url, store.job(sys.argv[2]), LocalSite(("cpu",)))
print(process.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture
def job(store: Store) -> Job:
    return store.submit_job(LONG)


@pytest.fixture
def process(store: Store, job: Job) -> Iterator[JobProcess]:
    started = JobProcess(store.url, job, CPU)
    while not any(event.kind == "progress" for event in store.events(job.id)):
        assert started.wait(0.1) is None
    yield started
    started.kill()


def end_of(process: JobProcess) -> Outcome:
    while (outcome := process.wait(0.1)) is None:
        pass
    return outcome


def is_running(pid: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False


def test_a_command_calls_a_function_in_a_new_interpreter():
    command = child.command("builtins", "print", "from there")
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "from there\n"


def test_a_sweep_told_to_stop_stops(process: JobProcess):
    process.stop(grace_seconds=60)
    assert end_of(process) == Outcome(None)


def test_a_sweep_that_does_not_stop_is_killed(process: JobProcess):
    os.kill(process.pid, signal.SIGSTOP)
    process.stop(grace_seconds=0)
    outcome = end_of(process)
    assert outcome.state is None
    assert "killed" in outcome.message


def test_a_sweep_that_dies_is_a_failure_that_says_how(process: JobProcess):
    os.kill(process.pid, signal.SIGKILL)
    outcome = end_of(process)
    assert outcome.state is JobState.FAILED
    assert "SIGKILL" in outcome.message


def test_a_sweep_dies_with_the_service(store: Store, job: Job):
    service = subprocess.Popen(
        [sys.executable, "-P", "-c", ORPHAN, store.url, job.id], stdout=subprocess.PIPE, text=True
    )
    pid = int(service.stdout.readline())
    while not any(event.kind == "progress" for event in store.events(job.id)):
        time.sleep(0.1)
    service.kill()
    service.wait()
    service.stdout.close()
    while is_running(pid):
        time.sleep(0.1)  # the test's time limit ends a wait in vain


def test_a_sweep_is_as_thorough_as_its_job_says():
    asked = {"strategies": ["full"], "budget": 7, "quick": True, "time_limit_s": 45.5}
    assert sweep_options(JobSpec(**LONG, options=asked)) == SweepOptions(
        ("full",), budget=7, quick=True, time_limit_s=45.5
    )
    assert sweep_options(JobSpec(**LONG)) == SweepOptions()


def test_a_job_nobody_can_read_fails(store: Store):
    process = JobProcess(store.url, store.submit_job({"device": "cpu", "problems": []}), CPU)
    outcome = end_of(process)
    assert outcome.state is JobState.FAILED
    assert "problems" in outcome.message
