import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest
from processes import gone

from flce_tune.errors import SweepError
from flce_tune.sweep.failures import CandidateError
from flce_tune.sweep.worker import LocalRunner, StoppedError, Worker
from flce_tune.tuning_db.records import Status


@pytest.fixture
def worker(planted, problem, cpu):
    worker = Worker(planted.Puppet, problem, cpu, 0)
    yield worker
    worker.close()


def fails(worker, *order, timeout_s=60):
    with pytest.raises(CandidateError) as raised:
        worker.call("time", *order, timeout_s=timeout_s)
    return raised.value


def test_what_kills_a_worker_is_told_and_the_next_call_has_a_fresh_one(worker):
    """One worker, since each start takes seconds."""
    assert worker.call("time", "say", "hello", timeout_s=60) == "hello"
    assert fails(worker, "refuse").message == "ValueError: no"
    calls, first = worker.call("time", "count", timeout_s=60)
    assert (calls, first) == (3, worker.pid), "an exception costs the candidate, not the worker"

    quitting = fails(worker, "quit", 7)
    assert quitting.status is Status.CRASH
    assert "exited with code 7" in quitting.message
    assert worker.pid is None

    grandchild = worker.call("time", "grandchild", timeout_s=60)
    hanging = fails(worker, "hang", timeout_s=0.5)
    assert hanging.status is Status.TIMEOUT
    assert "no answer within 0.5 s" in hanging.message
    assert gone(grandchild), "what the candidate started goes with it"

    calls, second = worker.call("time", "count", timeout_s=60)
    assert calls == 1
    assert second != first
    crash = fails(worker, "segfault")
    assert crash.status is Status.CRASH
    assert "killed by SIGSEGV" in crash.message
    assert "planted.py" in crash.message, "the stack of the crash is in the message"
    assert gone(second)


def test_a_stop_interrupts_a_running_candidate(planted, problem, cpu):
    polls = iter([False] * 3)
    worker = Worker(planted.Puppet, problem, cpu, 0, should_stop=lambda: next(polls, True))
    with pytest.raises(StoppedError):
        worker.call("time", "hang", timeout_s=60)
    assert worker.pid is None


@pytest.mark.parametrize("make", [Worker, LocalRunner])
def test_a_bench_that_cannot_be_made_is_no_candidates_fault(planted, problem, cpu, make):
    runner = make(planted.Unable, problem, cpu, 0)
    with pytest.raises(SweepError, match=r"cannot be set up: .*the inputs do not fit"):
        runner.call("time", "say", "hello", timeout_s=60)
    runner.close()


def test_close_is_final_and_harmless_twice(planted, problem, cpu):
    worker = Worker(planted.Puppet, problem, cpu, 0)
    worker.close()
    _, pid = worker.call("time", "count", timeout_s=60)
    worker.close()
    worker.close()
    assert gone(pid)


SCRIPT = """
import torch, planted
from flce_tune.kernels.problem import Problem
from flce_tune.sweep.worker import Worker

worker = Worker(planted.Puppet, Problem(1, 1, 1), torch.device("cpu"), 0)
try:
    worker.call("time", "say", "ready", timeout_s=60)
    print(worker.pid, flush=True)
    worker.call("time", "hang", timeout_s=60)
finally:
    worker.close()
"""


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_orphan_however_the_parent_ends(planted, tmp_path, end):
    """The script has no main guard: its worker must not run it again."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    folder = os.path.dirname(planted.__file__)
    parent = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": folder},
        text=True,
    )
    pid = int(parent.stdout.readline())
    time.sleep(0.2)  # until it hangs
    parent.send_signal(end)
    out, _ = parent.communicate(timeout=120)
    assert out == ""
    assert gone(pid)
