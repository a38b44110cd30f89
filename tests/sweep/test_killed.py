"""SIGKILL at random moments: the database stays sound, and the same sweep goes on from there."""

import contextlib
import math
import multiprocessing
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from flce_tune.dispatch.convert import config_of
from flce_tune.sweep.events import SweepEvents, SweepOptions
from flce_tune.sweep.sweep import sweep
from flce_tune.tuning_db.records import canonical_config
from flce_tune.tuning_db.store import Store

FORK = multiprocessing.get_context("fork")
KILLS = 50
COMMAND = (
    "sweep --hidden 64 --vocab 4096 --dtype float32 --device cpu --tokens "
    "32,48,64,96,128,192,256,384,512,768,1024,1536,2048,3072"
)


class Telling(SweepEvents):
    """Tells another process which measurements are stored, and takes its time."""

    def __init__(self, pipe):
        self.pipe = pipe

    def on_measurement(self, measurement, done, total):
        self.pipe.send(measurement.id)
        time.sleep(0.005)


def sweep_in_child(url, problem, cpu, make_bench, pipe):
    with Store.open(url) as store:
        options = SweepOptions(isolate=False)
        sweep([problem], store, cpu, options, events=Telling(pipe), make_bench=make_bench)


def told(pipe, count):
    """The next ids that come, fewer if the other end goes away."""
    ids = []
    try:
        while len(ids) < count:
            ids.append(pipe.recv())
    except EOFError:
        pass
    return ids


def examine(path, before=frozenset()):
    """Check a database whose writer was killed; returns its rows by id."""
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
    connection.close()
    with Store.open(f"sqlite:///{path}") as store:
        rows = store.measurements()
    stored = {(m.id, canonical_config(m.config)) for m in rows}
    assert before <= stored, "a row was lost"
    first = Counter((m.problem, config_of(m)) for m in rows if not m.samples_ms[1:])
    assert set(first.values()) <= {1}, "a config was measured twice"
    return stored


@pytest.mark.parametrize("kills", [12, pytest.param(KILLS, marks=pytest.mark.soak)])
def test_killed_again_and_again(planted, store, problem, cpu, tmp_path, kills):
    path = tmp_path / "tuning.sqlite3"
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    chance = random.Random(seed)
    stored = frozenset()
    for _ in range(kills):
        ours, theirs = FORK.Pipe(duplex=False)
        arguments = (store.url, problem, cpu, planted.Impatient, theirs)
        child = FORK.Process(target=sweep_in_child, args=arguments, daemon=True)
        child.start()
        theirs.close()
        ids = told(ours, chance.randrange(4))
        time.sleep(chance.uniform(0.0, 0.03))
        child.kill()
        ids += told(ours, math.inf)
        child.join()
        stored = examine(path, stored)
        assert set(ids) <= {number for number, _ in stored}, "what was stored is lost"
    report = sweep([problem], store, cpu, SweepOptions(isolate=False), make_bench=planted.Impatient)
    assert report.problems[0].winners
    examine(path, stored)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_the_command_killed_fifty_times(tmp_path: Path):
    """The real thing, worker processes and all. About a quarter of an hour."""
    path = tmp_path / "tuning.sqlite3"
    command = [Path(sys.executable).with_name("flce-tune"), *COMMAND.split()]
    environment = {**os.environ, "FLCE_TUNE_DB": str(path)}
    chance = random.Random(7)
    stored, stages = frozenset(), Counter()
    for number in range(KILLS):
        log_file = tmp_path / f"{number}.log"
        with log_file.open("w") as log:
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        # The machine may be slow: random is how much is measured first, and a moment more.
        wanted = len(stored) + chance.choice((0, 1, 1, 2, 3, 5, 8))
        while process.poll() is None and count_rows(path) < wanted:
            time.sleep(0.05)
        time.sleep(chance.uniform(0.0, 2.0))
        process.send_signal(signal.SIGKILL)
        process.wait()
        text = log_file.read_text()
        assert "Traceback" not in text
        stages[stage(text)] += 1
        if path.exists() and path.stat().st_size:
            stored = examine(path, stored)
        print(f"{number + 1} kills, {len(stored)} rows, killed at {dict(stages)}", flush=True)
    assert subprocess.run(command, env=environment, timeout=1200).returncode == 0
    last = examine(path, stored)
    print(f"and {len(last) - len(stored)} more rows by the run that was left alone")


def count_rows(path):
    with contextlib.closing(sqlite3.connect(path, timeout=60)) as connection:
        try:
            return connection.execute("SELECT count(*) FROM measurement").fetchone()[0]
        except sqlite3.OperationalError:  # not there yet
            return 0


def stage(text):
    """How far a sweep had come by its own account."""
    stages = ("starting", "measuring", "racing", "final", "winner")
    return max(stages, key=lambda stage: text.rfind(f"\n{stage}"))
