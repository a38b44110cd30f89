"""Two sweeps of the same problems on one database, in processes of their own."""

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections import Counter

import pytest

from flce_tune.dispatch.convert import config_of, device_record, problem_record
from flce_tune.errors import StoreUnavailableError
from flce_tune.kernels.problem import describe_device
from flce_tune.sweep import claims, processes
from flce_tune.sweep.claims import Claims
from flce_tune.sweep.events import SweepEvents, SweepOptions
from flce_tune.sweep.sweep import sweep

HERE = SweepOptions(isolate=False)
SCRIPT = """
import json, sys, time
import torch, planted
from flce_tune.kernels.problem import Problem
from flce_tune.sweep.events import SweepEvents, SweepOptions
from flce_tune.sweep.sweep import sweep
from flce_tune.tuning_db.store import Store

url, hidden, pause = sys.argv[1], json.loads(sys.argv[2]), float(sys.argv[3])

class Slow(SweepEvents):
    def on_wait(self, problem, owner):
        print("waits for", problem.hidden, flush=True)
    def on_measurement(self, measurement, done, total):
        print("measured", measurement.problem.hidden, flush=True)
        time.sleep(pause)

torch.set_num_threads(1)
print("ready", flush=True)
sys.stdin.readline()
with Store.open(url) as store:
    problems = [Problem(300, d, 400, "float32") for d in hidden]
    report = sweep(problems, store, torch.device("cpu"), SweepOptions(isolate=False),
                   events=Slow(), make_bench=planted.Impatient)
for r in report.problems:
    front = [w.measurement.id for w in r.winners]
    print("result", json.dumps([r.problem.hidden, r.measured, front]), flush=True)
"""


@pytest.fixture
def start(planted, store):
    """Start a sweep of the problems with these hidden sizes in a process of its own."""
    folder = os.path.dirname(planted.__file__)
    started = []

    def start(hidden, pause=0.05):
        process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, store.url, json.dumps(hidden), str(pause)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": folder},
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


def results(output):
    lines = [line.removeprefix("result ") for line in output.splitlines() if "result" in line]
    return {hidden: (measured, front) for hidden, measured, front in map(json.loads, lines)}


def go(*started):
    """Let them begin, at the same time."""
    for process in started:
        assert process.stdout.readline() == "ready\n"
    for process in started:
        process.stdin.write("go\n")
        process.stdin.flush()


def outcome(process):
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    return results(output)


def measured_once(store):
    """Whether no config was measured twice; finals have several samples."""
    first = [m for m in store.measurements() if len(m.samples_ms) == 1]
    counts = Counter((m.problem, config_of(m)) for m in first)
    return first != [] and set(counts.values()) == {1}


def test_two_processes_share_the_problems_and_agree(store, start):
    both = start([16, 24, 32]), start([16, 24, 32])
    go(*both)
    first, second = map(outcome, both)
    assert measured_once(store)
    assert list(first) == list(second) == [16, 24, 32]
    assert all(first[d][1] == second[d][1] != [] for d in first), "the same winners"
    assert all((first[d][0] == 0) != (second[d][0] == 0) for d in first), "each by one of them"
    assert all(any(measured for measured, _ in one.values()) for one in (first, second))
    finals = Counter((m.problem, config_of(m)) for m in store.measurements() if m.samples_ms[1:])
    assert set(finals.values()) == {1}, "one final each"


def test_what_a_killed_process_began_another_finishes_at_once(store, start):
    lost, heir = start([24]), start([24], pause=0)
    go(lost)
    for _ in range(3):
        assert lost.stdout.readline() == "measured 24\n"
    lost.kill()
    lost.wait()
    stored = store.count_measurements()
    go(heir)
    measured, front = outcome(heir)[24]
    assert 0 < measured <= store.count_measurements() - stored
    assert front
    assert measured_once(store)


class Recorder(SweepEvents):
    def __init__(self):
        self.told = []

    def on_start(self, problem, total):
        self.told.append(("start", problem.hidden))

    def on_wait(self, problem, owner):
        self.told.append(("wait", problem.hidden, owner))


ELSEWHERE = "another-host boot.1 77.1234 id"
LONG = 3600.0


@pytest.fixture
def run(store, problem, cpu, planted):
    def run(problems=(problem,), **more):
        return sweep(problems, store, cpu, HERE, make_bench=planted.Impatient, **more)

    return run


@pytest.fixture
def key(problem, cpu):
    """What a lease is for."""
    return device_record(describe_device(cpu)), problem_record(problem)


def test_what_another_host_does_comes_last_and_when_its_lease_has_run_out(store, problem, key, run):
    store.claim_sweep(*key, ELSEWHERE, LONG)

    class Expiring(Recorder):
        def on_start(self, problem, total):
            super().on_start(problem, total)
            store.renew_sweep(*key, ELSEWHERE, -1.0)

    events = Expiring()
    report = run([problem, dataclasses.replace(problem, hidden=32)], events=events)
    assert [r.problem.hidden for r in report.problems if r.winners] == [24, 32]
    assert events.told == [("wait", 24, ELSEWHERE), ("start", 32), ("start", 24)]


def test_waiting_can_be_stopped(store, key, run):
    store.claim_sweep(*key, ELSEWHERE, LONG)
    events = Recorder()
    report = run(events=events, should_stop=lambda: bool(events.told))
    assert report.interrupted
    assert report.problems == ()
    assert store.count_measurements() == 0


def test_a_sweep_of_another_kind_is_no_substitute(store, key, run):
    store.claim_sweep(*key, ELSEWHERE, LONG)

    class Finishing(Recorder):
        def on_wait(self, problem, owner):
            store.release_sweep(*key, ELSEWHERE, finished="a quick one")

    assert run(events=Finishing()).problems[0].measured > 0


def test_who_has_lost_a_claim_stops_and_comes_back_later(store, key, run, monkeypatch):
    monkeypatch.setattr(claims, "RENEWALS", 600)
    held = []

    def remember(self, *args):
        claim = made(self, *args)
        held.append(claim[0])
        return claim

    made = Claims.claim
    monkeypatch.setattr(Claims, "claim", remember)

    class Robbed(Recorder):
        def on_measurement(self, measurement, done, total):
            if done == 2:
                store.claim_sweep(*key, ELSEWHERE, LONG, dead_owner=held[0].owner)
                while not held[0].lost:
                    time.sleep(0.02)

        def on_wait(self, problem, owner):
            super().on_wait(problem, owner)
            store.release_sweep(*key, ELSEWHERE)

    events = Robbed()
    report = run(events=events)
    assert events.told == [("start", 24), ("wait", 24, ELSEWHERE), ("start", 24)]
    assert report.problems[0].resumed == 2
    assert report.problems[0].winners
    assert measured_once(store)


def test_a_lease_that_cannot_be_renewed_counts_as_lost_in_time(store, key, monkeypatch):
    def unreachable(*_):
        raise StoreUnavailableError("no route")

    with Claims(store) as held:
        claim, _ = held.claim(*key)
        monkeypatch.setattr(store, "renew_sweep", unreachable)
        held._renew(claim)
        assert not claim.lost, "once is no reason"
        claim.renewed_at -= 0.9 * claims.LEASE_S
        held._renew(claim)
        assert claim.lost


def test_claims_are_renewed_while_they_are_held(store, key, monkeypatch):
    monkeypatch.setattr(claims, "RENEWALS", 600)
    with Claims(store) as held:
        claim, lease = held.claim(*key)
        while store.claim_sweep(*key, ELSEWHERE, LONG).expires_at == lease.expires_at:
            time.sleep(0.02)
        assert store.claim_sweep(*key, ELSEWHERE, LONG).owner == claim.owner
        held.release(claim)
    assert store.claim_sweep(*key, ELSEWHERE, LONG).owner == ELSEWHERE


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")
def test_processes_of_this_host_are_known_to_be_gone():
    code = "from flce_tune.sweep.processes import unique_owner; print(unique_owner())"
    dead = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True).stdout
    assert processes.is_gone(dead)
    ours = processes.unique_owner()
    assert not processes.is_gone(ours)
    assert ours != processes.unique_owner()
    host, space, process, one = ours.split()
    assert processes.is_gone(f"{host} {space} {process}0 {one}"), "its id was used again"
    assert not processes.is_gone(f"{host} another.{space} {process}0 {one}"), "another host"
    assert not processes.is_gone("something else")
