"""Misses that outlive their process."""

import json
import os
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from flce_tune.dispatch import recording, remote
from flce_tune.dispatch.convert import device_record, problem_record
from flce_tune.dispatch.misses import Misses
from flce_tune.service.routes.misses import MissReports
from flce_tune.settings import Settings
from flce_tune.tuning_db.store import Store

TRAINING = """
import sys, torch
from flce_tune import linear_cross_entropy
x = torch.randn(8, 16, requires_grad=True)
w = torch.randn(32, 16, requires_grad=True)
linear_cross_entropy(x, w, torch.zeros(8, dtype=torch.long)).backward()
exec(sys.argv[1])
"""


@pytest.fixture
def misses(problem, h200) -> Misses:
    noted = Misses()
    noted.note(device_record(h200), problem_record(problem), 4096)
    return noted


@pytest.fixture
def database(tmp_path: Path) -> Path:
    path = tmp_path / "tuning.sqlite3"
    Store.open(f"sqlite:///{path}").close()
    return path


def recorded(path: Path) -> list[int]:
    with Store.open(f"sqlite:///{path}", read_only=True) as store:
        return [miss.tokens for miss in store.misses()]


def train(path: Path, then: str = "", **environment: str) -> None:
    subprocess.run(
        [sys.executable, "-c", TRAINING, then],
        env={**os.environ, "FLCE_TUNE_DB": str(path), **environment},
        check=True,
        capture_output=True,
    )


def test_a_process_that_ends_leaves_its_misses(database: Path):
    train(database)
    assert recorded(database) == [8]


def test_a_forked_child_records_nothing_of_its_own(database: Path):
    train(database, "import os; pid = os.fork(); pid and os.waitpid(pid, 0)")
    with Store.open(f"sqlite:///{database}") as store:
        assert [miss.count for miss in store.misses()] == [1]


def test_it_can_be_turned_off(database: Path):
    train(database, FLCE_TUNE_RECORD_MISSES="0")
    assert recorded(database) == []


def test_a_database_is_not_created(tmp_path: Path):
    train(tmp_path / "none" / "tuning.sqlite3")
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("content", [b"", b"this is no database\n" * 100])
def test_what_is_no_database_is_left_as_it_is(tmp_path: Path, misses: Misses, content: bytes):
    path = tmp_path / "odd"
    path.write_bytes(content)
    assert recording.record(misses, Settings(db=str(path))) == 0
    assert path.read_bytes() == content
    assert misses.pending()


def test_another_writer_is_not_waited_for_long(database: Path, misses: Misses, monkeypatch):
    monkeypatch.setattr(recording, "WAIT_SECONDS", 0.05)
    config = Settings(db=str(database))
    with closing(sqlite3.connect(database, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        assert recording.record(misses, config) == 0
        other.execute("ROLLBACK")
    assert recording.record(misses, config) == 1
    assert recorded(database) == [4096]
    assert recording.record(misses, config) == 0


@pytest.fixture
def service() -> Iterator[tuple[str, list[tuple[str, str, dict]]]]:
    """The address of a service, and what it was told: path, authorization, body."""
    told = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            told.append((self.path, self.headers["Authorization"], json.loads(body)))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/", told
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_service_is_told_in_batches(service, misses: Misses, problem, h200, monkeypatch):
    url, told = service
    monkeypatch.setattr(remote, "_BATCH", 2)
    for vocab in (10, 20, 20):
        other = problem_record(replace(problem, vocab=vocab))
        misses.note(device_record(h200), other, 5000)
    assert recording.report(misses, Settings(url=url, token="s3cret")) == 3
    assert [(path, who) for path, who, _ in told] == [("/v1/misses", "Bearer s3cret")] * 2
    bodies = [MissReports.model_validate(body) for _, _, body in told]
    counts = [(m.problem.vocab, m.problem.tokens, m.count) for b in bodies for m in b.misses]
    assert counts == [(128256, 4096, 1), (10, 5000, 1), (20, 5000, 2)]
    assert bodies[0].misses[0].device.record() == device_record(h200)


def test_a_process_that_ends_tells_the_service(service, tmp_path: Path):
    url, told = service
    train(tmp_path / "none.sqlite3", FLCE_TUNE_URL=url, FLCE_TUNE_CACHE_DIR=str(tmp_path))
    assert [len(body["misses"]) for _, _, body in told] == [1]
    train(tmp_path / "none.sqlite3", FLCE_TUNE_URL=url, FLCE_TUNE_RECORD_MISSES="0")
    assert len(told) == 1


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "file:///etc", "http://"])
def test_a_service_that_is_away_costs_nothing_but_the_report(misses: Misses, url: str):
    assert recording.report(misses, Settings(url=url)) == 0
    assert misses.pending()


def test_a_database_server_is_not_called_at_the_end(misses: Misses, monkeypatch):
    registered = []
    monkeypatch.setattr("atexit.register", lambda *call: registered.append(call))
    recording.record_at_exit(misses, Settings(db="postgresql://nobody@nowhere/db"))
    assert registered == []
    assert recording.record(misses, Settings(db="postgresql://nobody@nowhere/db")) == 0
