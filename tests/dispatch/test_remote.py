"""Snapshots from a service that answers, changes its mind, lies, or is away."""

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from flce_tune.dispatch import remote
from flce_tune.dispatch.convert import device_record, device_slug
from flce_tune.dispatch.remote import RemoteSnapshots
from flce_tune.errors import ServiceError
from flce_tune.kernels.config import Config
from flce_tune.tuning_db.interchange import dump


@dataclass
class FakeService:
    """Answers every GET the same way until told otherwise, and records what was asked."""

    url: str = ""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    stall: threading.Event | None = None
    asked: list[tuple[str, dict[str, str]]] = field(default_factory=list)


@pytest.fixture
def service() -> Iterator[FakeService]:
    fake = FakeService()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            fake.asked.append((self.path, dict(self.headers)))
            if fake.stall is not None:
                fake.stall.wait()
            self.send_response(fake.status)
            for name, value in {"Content-Length": str(len(fake.body)), **fake.headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(fake.body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    fake.url = f"http://127.0.0.1:{server.server_port}"
    yield fake
    if fake.stall is not None:
        fake.stall.set()
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def document(make_winner) -> bytes:
    winner = make_winner(Config("chunked", chunk=64))
    stored = replace(winner.measurement, id=1, created_at=datetime.now(timezone.utc))
    return dump([stored], [replace(winner, measurement=stored)]).encode()


@pytest.fixture
def answering(service: FakeService, document: bytes) -> FakeService:
    service.body, service.headers = document, {"ETag": '"one"'}
    return service


def test_the_device_is_asked_for_and_its_winners_come(answering, tmp_path: Path, h200):
    record = device_record(h200)
    snapshot = RemoteSnapshots(answering.url + "/", tmp_path).fetch(record)
    assert len(snapshot) == 1
    assert list(snapshot.fronts) == [record]
    ((path, headers),) = answering.asked
    assert path == f"/v1/snapshots/{device_slug(record)}"
    assert "Authorization" not in headers
    assert "If-None-Match" not in headers


def test_an_unchanged_snapshot_is_not_sent_again(answering, tmp_path: Path, h200):
    RemoteSnapshots(answering.url, tmp_path).fetch(device_record(h200))
    answering.status, answering.body = 304, b""
    again = RemoteSnapshots(answering.url, tmp_path).fetch(device_record(h200))
    assert answering.asked[1][1]["If-None-Match"] == '"one"'
    assert len(again) == 1
    assert "unchanged" in again.source


def test_a_changed_snapshot_replaces_the_copy(answering, tmp_path: Path, h200):
    subject = RemoteSnapshots(answering.url, tmp_path)
    subject.fetch(device_record(h200))
    nothing = json.loads(answering.body) | {"winners": []}
    answering.body, answering.headers = json.dumps(nothing).encode(), {"ETag": '"two"'}
    assert len(subject.fetch(device_record(h200))) == 0
    answering.status = 503
    assert len(subject.fetch(device_record(h200))) == 0


BROKEN = {
    "server error": {"status": 500},
    "not ours": {"status": 404, "headers": {"Content-Type": "text/html"}},
    "not JSON": {"body": b"<html>log in</html>"},
    "not UTF-8": {"body": b"\xff\xfe"},
    "cut short": {"body": b'{"schema": "flce-tune/1", "devices": ['},
    "unchanged without a copy": {"status": 304},
}


@pytest.mark.parametrize("how", [how for how in BROKEN if how != "unchanged without a copy"])
def test_the_copy_serves_when_the_service_does_not(answering, tmp_path: Path, h200, how):
    subject = RemoteSnapshots(answering.url, tmp_path, timeout_s=0.2)
    subject.fetch(device_record(h200))
    for name, value in BROKEN[how].items():
        setattr(answering, name, value)
    snapshot = subject.fetch(device_record(h200))
    assert len(snapshot) == 1
    assert "copy from last time" in snapshot.source


@pytest.mark.parametrize("how", BROKEN)
def test_without_a_copy_it_is_an_error(answering, tmp_path: Path, h200, how):
    for name, value in BROKEN[how].items():
        setattr(answering, name, value)
    with pytest.raises(ServiceError, match=r"no snapshot from http://127\.0\.0\.1"):
        RemoteSnapshots(answering.url, tmp_path, timeout_s=0.2).fetch(device_record(h200))
    assert not list(tmp_path.iterdir())


def test_a_service_that_does_not_answer_is_given_up(service, tmp_path: Path, h200):
    service.stall = threading.Event()
    with pytest.raises(ServiceError, match="timed out"):
        RemoteSnapshots(service.url, tmp_path, timeout_s=0.05).fetch(device_record(h200))


def test_an_answer_that_does_not_end_is_given_up(answering, tmp_path: Path, h200, monkeypatch):
    monkeypatch.setattr(remote, "DEADLINE_S", -1.0)
    with pytest.raises(ServiceError, match="took longer"):
        RemoteSnapshots(answering.url, tmp_path).fetch(device_record(h200))


def test_a_device_the_service_does_not_know_is_no_error(service, tmp_path: Path, h200):
    service.status, service.headers = 404, {"Content-Type": "application/problem+json"}
    assert len(RemoteSnapshots(service.url, tmp_path).fetch(device_record(h200))) == 0


@pytest.mark.parametrize("url", ["file:///etc", "ftp://127.0.0.1", "localhost:8000", "http://"])
def test_a_url_that_is_no_service_is_refused(tmp_path: Path, h200, url):
    with pytest.raises(ServiceError, match="no snapshot from"):
        RemoteSnapshots(url, tmp_path).fetch(device_record(h200))


def test_a_file_is_no_service(document: bytes, tmp_path: Path, h200):
    file = tmp_path / "v1" / "snapshots" / device_slug(device_record(h200))
    file.parent.mkdir(parents=True)
    file.write_bytes(document)
    with pytest.raises(ServiceError, match="must begin with http"):
        RemoteSnapshots(f"file://{tmp_path}", tmp_path / "cache").fetch(device_record(h200))


def test_the_token_goes_to_the_service_and_no_further(answering, tmp_path: Path, h200):
    subject = RemoteSnapshots(answering.url, tmp_path, token="s3cret")
    subject.fetch(device_record(h200))
    assert answering.asked[0][1]["Authorization"] == "Bearer s3cret"
    answering.status, answering.headers = 302, {"Location": f"{answering.url}/elsewhere"}
    subject.fetch(device_record(h200))
    path, headers = answering.asked[2]
    assert path == "/elsewhere"
    assert "Authorization" not in headers
    assert "s3cret" not in "".join(file.read_text() for file in tmp_path.iterdir())


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"etag": "x"}', '{"etag":"x","document":"{}"}'])
def test_a_damaged_copy_is_fetched_anew(answering, tmp_path: Path, h200, damage):
    subject = RemoteSnapshots(answering.url, tmp_path)
    subject.fetch(device_record(h200))
    (copy,) = tmp_path.iterdir()
    copy.write_text(damage)
    assert len(subject.fetch(device_record(h200))) == 1
    assert "If-None-Match" not in answering.asked[1][1]
    answering.status = 500
    assert len(subject.fetch(device_record(h200))) == 1


def test_a_cache_that_cannot_be_written_is_done_without(answering, tmp_path: Path, h200):
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    snapshot = RemoteSnapshots(answering.url, in_the_way / "cache").fetch(device_record(h200))
    assert len(snapshot) == 1


def test_copies_of_two_services_are_kept_apart(answering, tmp_path: Path, h200):
    RemoteSnapshots(answering.url, tmp_path).fetch(device_record(h200))
    RemoteSnapshots(answering.url + "/team", tmp_path).fetch(device_record(h200))
    assert len(list(tmp_path.iterdir())) == 2
