"""The OpenAPI document, and errors that keep to it."""

import asyncio
import threading

import httpx
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from flce_tune.errors import StoreUnavailableError
from flce_tune.service.app import create_app
from flce_tune.service.settings import ServiceSettings
from flce_tune.tuning_db.store import Store

WORK = {400, 401, 403, 404, 409, 413, 422, 429, 503}
OPERATIONS = {
    ("GET", "/healthz"): {200},
    ("GET", "/readyz"): {200, 503},
    ("GET", "/metrics"): {200},
    ("POST", "/v1/jobs"): {202, 400, 401, 403, 404, 409, 413, 422, 429, 503},
    ("GET", "/v1/jobs"): {200, 422, 503},
    ("GET", "/v1/jobs/{job_id}"): {200, 404, 422, 503},
    ("POST", "/v1/jobs/{job_id}/cancel"): {202, 401, 403, 404, 409, 422, 429, 503},
    ("GET", "/v1/jobs/{job_id}/events"): {200, 404, 422, 503},
    ("POST", "/v1/misses"): {204, 400, 401, 403, 413, 422, 429, 503},
    ("GET", "/v1/misses"): {200, 422, 503},
    ("POST", "/v1/jobs/claim"): {200, 204, 400, 401, 403, 413, 422, 429, 503},
    ("POST", "/v1/jobs/{job_id}/report"): WORK | {200},
    ("POST", "/v1/jobs/{job_id}/results"): WORK | {204},
    ("POST", "/v1/jobs/{job_id}/finish"): WORK | {200},
    ("POST", "/v1/jobs/{job_id}/release"): WORK | {204},
    ("GET", "/v1/export"): {200, 404, 409, 422, 503},
    ("POST", "/v1/import"): {200, 401, 403, 413, 422, 429, 503},
    ("GET", "/v1/configs/best"): {200, 404, 409, 422, 503},
    ("GET", "/v1/explain"): {200, 404, 409, 422, 503},
    ("GET", "/v1/measurements"): {200, 404, 409, 422, 503},
    ("GET", "/v1/winners"): {200, 404, 409, 422, 503},
    ("GET", "/v1/compare"): {200, 404, 409, 422, 503},
    ("GET", "/v1/devices"): {200, 503},
    ("GET", "/v1/toolchains"): {200, 503},
    ("GET", "/v1/presets"): {200},
    ("GET", "/v1/snapshots/{device}"): {200, 304, 404, 409, 422, 503},
}


@pytest.fixture
def document(client: TestClient) -> dict:
    return client.get("/openapi.json").json()


def test_the_document_lists_every_answer(document: dict):
    listed = {
        (method.upper(), path): {int(status) for status in operation["responses"]}
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
    }
    assert listed == OPERATIONS


def test_errors_are_declared_as_problem_json(document: dict):
    for operations in document["paths"].values():
        for operation in operations.values():
            for status, response in operation["responses"].items():
                if int(status) >= 400:
                    assert response["content"] == {
                        "application/problem+json": {
                            "schema": {"$ref": "#/components/schemas/ErrorDocument"}
                        }
                    }
    assert "HTTPValidationError" not in document["components"]["schemas"]


def test_events_are_declared_as_a_stream(document: dict):
    events = document["paths"]["/v1/jobs/{job_id}/events"]["get"]["responses"]["200"]
    assert list(events["content"]) == ["text/event-stream"]


def test_writes_are_declared_to_need_a_token(document: dict):
    assert document["paths"]["/v1/jobs"]["post"]["security"] == [{"HTTPBearer": []}]
    assert "security" not in document["paths"]["/v1/jobs"]["get"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nowhere", 404), ("DELETE", "/v1/jobs", 405), ("GET", "/static/nothing", 404)],
)
def test_every_error_is_problem_json(client: TestClient, method: str, path: str, status: int):
    answer = client.request(method, path)
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["status"] == status


def test_a_body_that_is_not_json_is_refused(client: TestClient, job_body: dict):
    json_headers = {"Content-Type": "application/json"}
    assert client.post("/v1/jobs", content=b"{", headers=json_headers).status_code == 422
    # What a form on some web page could send without asking first.
    plain = client.post("/v1/jobs", content=b"{}", headers={"Content-Type": "text/plain"})
    assert plain.status_code == 422


def test_a_body_that_is_too_large_is_refused(store: Store):
    settings = ServiceSettings(store.url, run_jobs=False, max_body_bytes=1000)
    with TestClient(create_app(settings)) as client:
        answer = client.post("/v1/jobs", json={"preset": "x" * 2000})
        assert answer.status_code == 413
        assert answer.headers["content-type"] == "application/problem+json"
        assert "1000 bytes" in answer.json()["detail"]
        chunks = (b'{"preset": "', *[b"x" * 500] * 4, b'"}')
        headers = {"Content-Type": "application/json"}
        undeclared = client.post("/v1/jobs", content=iter(chunks), headers=headers)
        assert undeclared.status_code == 413


def test_a_database_that_is_away_is_503_and_its_address_stays_secret(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
):
    def away(*_args: object, **_named: object) -> None:
        raise StoreUnavailableError("cannot reach postgresql://db.internal")

    for name in ("jobs", "winners", "devices"):
        monkeypatch.setattr(Store, name, away)
    for path in ("/readyz", "/v1/jobs", "/v1/winners", "/v1/devices", "/v1/snapshots/x"):
        answer = client.get(path)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
        assert answer.json()["type"] == "urn:flce-tune:error:database-unavailable"
        assert "db.internal" not in answer.text
    assert client.get("/healthz").status_code == 200


def test_a_defect_of_ours_tells_nothing_of_our_insides(
    settings: ServiceSettings, monkeypatch: pytest.MonkeyPatch
):
    def broken(*_args: object, **_named: object) -> None:
        raise KeyError("secret")

    monkeypatch.setattr(Store, "devices", broken)
    with TestClient(create_app(settings), raise_server_exceptions=False) as client:
        answer = client.get("/v1/devices")
    assert answer.status_code == 500
    assert answer.headers["content-type"] == "application/problem+json"
    assert "secret" not in answer.text


async def _ask_while_the_database_hangs(app: FastAPI, requests: int) -> int:
    """Status of /healthz while more requests wait for the database than there are threads."""
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        waiting = [asyncio.create_task(client.get("/v1/devices")) for _ in range(requests)]
        while len(app.state.hanging) < 40:  # the threads there are for endpoints
            await asyncio.sleep(0.01)
        status = (await client.get("/healthz")).status_code
        assert not any(task.done() for task in waiting)
        app.state.released.set()
        assert {answer.status_code for answer in await asyncio.gather(*waiting)} == {200}
    return status


def test_health_is_answered_while_every_thread_waits_for_the_database(
    settings: ServiceSettings, store: Store, monkeypatch: pytest.MonkeyPatch
):
    app = create_app(settings)
    app.state.store = store
    app.state.released = threading.Event()
    app.state.hanging = []

    def hang(_store: Store) -> list:
        app.state.hanging.append(threading.get_ident())
        app.state.released.wait()
        return []

    monkeypatch.setattr(Store, "devices", hang)
    assert asyncio.run(_ask_while_the_database_hangs(app, 60)) == 200
