"""Ranks of one training job: one of them asks the service, and all use what it heard."""

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from fetching import ask_beside_one_who_died, fail, fetch
from ranks import Ranks

from flce_tune.dispatch.convert import device_record
from flce_tune.dispatch.ranks import first_says
from flce_tune.kernels.config import Config
from flce_tune.tuning_db.interchange import dump


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    processes = Ranks(3, tmp_path_factory.mktemp("ranks") / "rendezvous")
    yield processes
    processes.close()


class Changeable(ThreadingHTTPServer):
    """A service that has other winners each time it is asked."""

    def __init__(self, documents: list[bytes]) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.left = iter(documents)
        self.asked = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Answer(BaseHTTPRequestHandler):
    server: Changeable

    def do_GET(self):
        self.server.asked += 1
        body = next(self.server.left, None)
        self.send_response(500 if body is None else 200)
        self.send_header("Content-Length", str(len(body or b"")))
        self.send_header("ETag", f'"{self.server.asked}"')
        self.end_headers()
        self.wfile.write(body or b"")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def service(request: pytest.FixtureRequest, make_winner) -> Iterator[Changeable]:
    documents = []
    for chunk in [64, 128, 256, 512][: request.param]:
        winner = make_winner(Config("chunked", chunk=chunk))
        stored = replace(winner.measurement, id=1, created_at=datetime.now(timezone.utc))
        documents.append(dump([stored], [replace(winner, measurement=stored)]).encode())
    server = Changeable(documents)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("service", [4], indirect=True)
def test_all_ranks_use_what_the_first_one_heard(
    ranks: Ranks, service: Changeable, tmp_path: Path, h200
):
    told = ranks.run(3, fetch, service.url, str(tmp_path), device_record(h200))
    assert service.asked == 1
    assert len({fingerprint for fingerprint, _, _ in told}) == 1
    assert [copies for _, _, copies in told] == [1, 1, 1]  # each host can do without it next time
    contents = {json.loads(p.read_text())["etag"] for p in tmp_path.glob("host-*/*.json")}
    assert contents == {'"1"'}
    later = ranks.run(1, fetch, service.url, str(tmp_path), device_record(h200))
    assert (later[0][0], service.asked) == (told[0][0], 1)


@pytest.mark.parametrize("service", [0], indirect=True)
def test_all_ranks_do_without_a_service_that_gave_the_first_one_nothing(
    ranks: Ranks, service: Changeable, tmp_path: Path, h200
):
    told = ranks.run(3, fail, service.url, str(tmp_path), device_record(h200))
    assert len(set(told)) == 1
    assert "no snapshot from" in told[0]
    assert service.asked == 1


def test_a_rank_that_never_answers_is_not_waited_for_long(ranks: Ranks):
    assert ranks.run(3, ask_beside_one_who_died, "one who died") == ["rank 0", "rank 1", "rank 2"]


def test_a_process_on_its_own_asks_itself():
    answers = iter("ab")
    assert [first_says("alone", lambda: next(answers), wait_s=0) for _ in "ab"] == ["a", "b"]
