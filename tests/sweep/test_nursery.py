"""Workers forked from a process that has imported torch."""

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import pytest
from processes import gone

from flce_tune.errors import SweepError
from flce_tune.sweep.failures import CandidateError
from flce_tune.sweep.nursery import Nursery, can_fork
from flce_tune.sweep.worker import StoppedError, Worker
from flce_tune.tuning_db.records import Status

pytestmark = pytest.mark.skipif(not can_fork(), reason="workers are forked on Linux alone")


SUPPORT = str(Path(__file__).parent / "support")  # on the path of whatever is started here


@pytest.fixture(scope="module")
def nursery():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SUPPORT)
        nursery = Nursery("-1")
    yield nursery
    nursery.close()


@pytest.fixture
def make_worker(nursery, planted, problem, cpu):
    workers = []

    def make(of=nursery):
        workers.append(Worker(planted.Puppet, problem, cpu, 0, start=of.start))
        return workers[-1]

    yield make
    for worker in workers:
        worker.close()


def test_forked_workers_are_processes_of_their_own(make_worker):
    first, second = make_worker(), make_worker()
    assert first.call("time", "say", "hello", timeout_s=60) == "hello"
    assert second.call("time", "say", "there", timeout_s=60) == "there"
    assert len({first.pid, second.pid, os.getpid()}) == 3
    assert first.call("time", "environment", "CUDA_VISIBLE_DEVICES", timeout_s=60) == "-1"
    assert os.getsid(first.pid) == first.pid


def test_what_ended_one_is_told_and_the_next_call_has_another(make_worker):
    worker = make_worker()
    with pytest.raises(CandidateError, match="exited with code 7") as quitting:
        worker.call("time", "quit", 7, timeout_s=60)
    assert quitting.value.status is Status.CRASH
    worker.call("time", "say", "again", timeout_s=60)
    os.kill(worker.pid, signal.SIGSEGV)
    with pytest.raises(CandidateError, match="SIGSEGV"):
        worker.call("time", "say", "nothing", timeout_s=60)
    with pytest.raises(CandidateError, match="no answer within"):
        worker.call("time", "hang", timeout_s=0.5)
    assert worker.call("time", "say", "still", timeout_s=60) == "still"


def test_a_closed_worker_is_gone(make_worker):
    worker = make_worker()
    worker.call("time", "say", "hello", timeout_s=60)
    pid = worker.pid
    worker.close()
    assert gone(pid)


def test_workers_end_with_the_process_that_forked_them(make_worker):
    nursery = Nursery("-1")
    worker = make_worker(nursery)
    worker.call("time", "say", "hello", timeout_s=60)
    pid = worker.pid
    nursery.close()
    assert gone(pid)
    with pytest.raises(CandidateError):
        worker.call("time", "say", "hello", timeout_s=60)
    with pytest.raises(SweepError, match="starts compilers is gone"):
        worker.call("time", "say", "hello", timeout_s=60)


def test_nobody_waits_for_imports_that_are_not_wanted_any_more():
    nursery = Nursery("-1")
    begin = time.monotonic()
    try:
        with tempfile.TemporaryFile() as output, pytest.raises(StoppedError):
            nursery.start(output.fileno(), output, lambda: time.monotonic() > begin)
    finally:
        nursery.close()


def test_everything_ends_with_the_process_that_asked():
    program = """
        import sys, tempfile, time
        from flce_tune.sweep.nursery import Nursery
        import socket
        nursery = Nursery("-1")
        ours, theirs = socket.socketpair()
        with tempfile.TemporaryFile() as output:
            worker = nursery.start(theirs.fileno(), output)
        print(nursery._process.pid, worker.pid, flush=True)
        time.sleep(600)
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, text=True
    )
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert all(map(gone, pids))
