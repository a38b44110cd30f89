"""What is tried again, and what an error says."""

import itertools
import json

import httpx
import pytest

from flce_tune.client import Client, Retries
from flce_tune.client import stream as stream_module
from flce_tune.client import transport as transport_module
from flce_tune.errors import RefusedError, ServiceError, UnreachableError
from flce_tune.service.schemas import JobRequest

DEVICES = {"items": [], "next": None}
PROBLEM = "application/problem+json"


class Waits(list):
    """Stands in for the clock: waiting takes no time, and is noted."""

    def sleep(self, seconds: float) -> None:
        self.append(seconds)

    def monotonic(self) -> float:
        return sum(self)


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Waits:
    noted = Waits()
    for module in (transport_module, stream_module):
        monkeypatch.setattr(module, "time", noted)
    return noted


def refused(status: int, **headers: str) -> httpx.Response:
    document = {"type": "urn:flce-tune:error:some-kind", "detail": "what to do"}
    return httpx.Response(status, json=document, headers=headers)


def client(*answers: httpx.Response | Exception, **options) -> Client:
    """A client of a service that gives these answers, the last one for ever."""
    last = itertools.repeat(answers[-1])
    left = itertools.chain(answers[:-1], last)

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        request.read()
        one = next(left)
        if isinstance(one, Exception):
            raise one
        return one

    made = Client("http://tuning.example", transport=httpx.MockTransport(answer), **options)
    seen = made.seen = []
    return made


def test_what_may_succeed_later_is_tried_again(waits: Waits):
    answers = (httpx.ConnectError("refused"), refused(503), httpx.ReadTimeout(""), refused(429))
    with client(*answers, httpx.Response(200, json=DEVICES)) as one:
        assert one.devices() == []
    assert len(waits) == 4
    assert all(later > sooner / 2 for sooner, later in itertools.pairwise(waits))


def test_the_wait_grows_up_to_a_limit_and_is_as_long_as_the_service_asks():
    retries = Retries(first_wait=1, longest_wait=8)
    assert all(0.5 <= retries.wait(0, None) <= 1 for _ in range(100))
    assert all(4 <= retries.wait(99, None) <= 8 for _ in range(100))
    assert retries.wait(0, 30.0) == 30


def test_a_service_that_stays_away_is_given_up(waits: Waits):
    with client(httpx.ConnectError("connection refused"), retries=Retries(seconds=10)) as one:
        with pytest.raises(UnreachableError, match=r"http://tuning\.example.*connection refused"):
            one.devices()
        assert 5 < sum(waits) <= 10
        assert len(one.seen) == len(waits) + 1


def test_retry_after_beyond_our_patience_is_not_waited_for(waits: Waits):
    one = client(refused(429, **{"Retry-After": "60"}), retries=Retries(seconds=10))
    with one, pytest.raises(RefusedError) as caught:
        one.devices()
    assert (caught.value.status, waits) == (429, [])


def test_without_patience_there_is_one_attempt(waits: Waits):
    with client(refused(503), retries=Retries(seconds=0)) as one, pytest.raises(RefusedError):
        one.devices()
    assert (len(one.seen), waits) == (1, [])


@pytest.mark.parametrize("status", [401, 403, 404, 409, 422, 500])
def test_a_refusal_is_final_and_tells_the_services_reason(waits: Waits, status: int):
    with (
        client(refused(status)) as one,
        pytest.raises(RefusedError, match=r"^what to do$") as caught,
    ):
        one.devices()
    assert (caught.value.status, caught.value.kind) == (status, "some-kind")
    assert len(one.seen) == 1


@pytest.mark.parametrize(
    "answer", [httpx.Response(404, text="<html>nginx"), httpx.Response(302, json=["no document"])]
)
def test_something_else_at_the_address_is_said(answer: httpx.Response):
    with client(answer) as one, pytest.raises(RefusedError, match="check the address") as caught:
        one.devices()
    assert caught.value.kind == "not-a-service"


def test_an_answer_of_another_version_is_said():
    answer = httpx.Response(200, json={"items": [{"id": 3}], "next": None})
    with client(answer) as one, pytest.raises(ServiceError, match=r"items.0.id.*newer one"):
        one.devices()


@pytest.mark.parametrize("url", ["", "tuning.example", "ftp://tuning.example"])
def test_no_address(url: str):
    with pytest.raises(UnreachableError, match="http://"):
        Client(url)


def test_a_password_in_the_address_is_not_shown(waits: Waits):
    transport = httpx.MockTransport(lambda request: httpx.Response(404, text="no"))
    one = Client("http://me:secret@tuning.example", transport=transport)
    with one, pytest.raises(RefusedError) as caught:
        one.devices()
    assert "secret" not in str(caught.value)


def test_a_job_is_submitted_with_one_key_however_often_it_is_sent(waits: Waits):
    one = client(refused(503), refused(503), refused(422), token="t0ken")
    with one, pytest.raises(RefusedError):
        one.submit(JobRequest(preset="llama3-8b"))
    keys = [request.headers["idempotency-key"] for request in one.seen]
    assert (len(keys), len(set(keys))) == (3, 1)
    assert {request.headers["authorization"] for request in one.seen} == {"Bearer t0ken"}
    assert json.loads(one.seen[0].content) == {"preset": "llama3-8b"}


def sent(*events: tuple[int, str, dict]) -> httpx.Response:
    lines = (f"id: {n}\nevent: {kind}\ndata: {json.dumps(data)}\n\n" for n, kind, data in events)
    body = ": ping\n\n" + "".join(lines)
    return httpx.Response(200, text=body, headers={"Content-Type": "text/event-stream"})


END = (9, "state", {"state": "succeeded"})


def test_events_go_on_after_an_interruption_where_they_were(waits: Waits):
    first = sent((3, "state", {"state": "running"}), (5, "measurement", {"done": 1}))
    with client(first, httpx.ConnectError("away"), refused(503), sent(), sent(END)) as one:
        events = list(one.follow("x", after=2))
    assert [event.id for event in events] == [3, 5, 9]
    assert (events[1].kind, events[1].data) == ("measurement", {"done": 1})
    assert [event.last for event in events] == [False, False, True]
    assert [r.headers["last-event-id"] for r in one.seen] == ["2", "5", "5", "5", "5"]


def test_following_gives_up_like_everything_else(waits: Waits):
    one = client(httpx.ConnectError("away"), retries=Retries(seconds=5))
    with one, pytest.raises(UnreachableError):
        list(one.follow("x"))
    with client(refused(404)) as one, pytest.raises(RefusedError):
        list(one.follow("x"))
