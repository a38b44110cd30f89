"""Tokens and scopes, as callers meet them."""

import uuid
from collections.abc import Iterator
from dataclasses import replace

import pytest
from fastapi.testclient import TestClient

from flce_tune.service import auth
from flce_tune.service.app import create_app
from flce_tune.service.auth import FailureLimit
from flce_tune.service.settings import ServiceSettings
from flce_tune.tuning_db.records import Scope
from flce_tune.tuning_db.store import Store


@pytest.fixture(autouse=True)
def tokens_are_read_each_time(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(auth, "MAX_AGE_SECONDS", -1.0)


@pytest.fixture
def tokens(store: Store) -> dict[Scope, str]:
    return {scope: store.create_token(scope.value, scope) for scope in Scope}


@pytest.fixture
def private(settings: ServiceSettings, store: Store) -> Iterator[TestClient]:
    with TestClient(create_app(replace(settings, private=True))) as opened:
        yield opened


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def submit(client: TestClient, body: dict, token: str | None = None, **more) -> int:
    headers = {} if token is None else bearer(token)
    return client.post("/v1/jobs", json=body | more, headers=headers).status_code


def test_without_any_token_everybody_may_write(client: TestClient, job_body: dict):
    assert submit(client, job_body, priority=5) == 202


def test_scopes_are_kept_to(client: TestClient, job_body: dict, tokens: dict[Scope, str]):
    assert submit(client, job_body) == 401
    assert submit(client, job_body, tokens[Scope.READ]) == 403
    assert submit(client, job_body, tokens[Scope.SUBMIT]) == 202
    assert submit(client, job_body, tokens[Scope.SUBMIT], priority=-1) == 202
    assert submit(client, job_body, tokens[Scope.SUBMIT], priority=1) == 403
    assert submit(client, job_body, tokens[Scope.ADMIN], priority=1) == 202
    assert client.get("/v1/jobs").status_code == 200
    cancel = f"/v1/jobs/{uuid.uuid4()}/cancel"
    assert client.post(cancel, headers=bearer(tokens[Scope.READ])).status_code == 403
    assert client.post(cancel, headers=bearer(tokens[Scope.SUBMIT])).status_code == 404


def test_a_revoked_token_is_none_and_the_last_one_revoked_opens_nothing(
    client: TestClient, store: Store, job_body: dict
):
    secret = store.create_token("ci", Scope.ADMIN)
    assert submit(client, job_body, secret) == 202
    store.revoke_token("ci")
    assert submit(client, job_body, secret) == 401
    assert submit(client, job_body) == 401


def test_the_single_token_works_beside_stored_ones(
    settings: ServiceSettings, store: Store, job_body: dict, tokens: dict[Scope, str]
):
    with TestClient(create_app(replace(settings, token="s3cret"))) as client:
        assert submit(client, job_body, "s3cret", priority=1) == 202
        assert submit(client, job_body, tokens[Scope.SUBMIT]) == 202
        assert submit(client, job_body, "s3cre") == 401
        # The digest is what somebody who read the database would have.
        assert submit(client, job_body, store.tokens()[1].digest) == 401


def test_a_private_service_answers_nobody_without_a_token(
    private: TestClient, tokens: dict[Scope, str]
):
    for path in ("/v1/jobs", "/v1/winners", "/v1/presets", "/metrics", "/v1/snapshots/x"):
        assert private.get(path).status_code == 401, path
        answer = private.get(path, headers=bearer(tokens[Scope.READ]))
        assert answer.status_code == (404 if "snapshots" in path else 200)
    for path in ("/healthz", "/readyz"):
        assert private.get(path).status_code == 200
    document = private.get("/openapi.json").json()
    assert {"401", "403", "429"} <= set(document["paths"]["/v1/winners"]["get"]["responses"])


def test_a_private_service_keeps_known_answers_from_those_without_a_token(
    private: TestClient, tokens: dict[Scope, str]
):
    path = "/v1/configs/best?architecture=cpu&hidden=64&vocab=256&tokens=64"
    assert private.get(path, headers=bearer(tokens[Scope.READ])).status_code == 200
    assert private.get(path).status_code == 401


def test_guessing_is_slowed_down_for_the_one_who_guesses(
    settings: ServiceSettings, store: Store, job_body: dict, tokens: dict[Scope, str]
):
    limited = replace(settings, max_refused_tokens=3)
    with TestClient(create_app(limited)) as client:
        assert [submit(client, job_body) for _ in range(5)] == [401] * 5  # nothing guessed
        assert [submit(client, job_body, "wrong") for _ in range(3)] == [401] * 3
        answer = client.post("/v1/jobs", json=job_body, headers=bearer(tokens[Scope.ADMIN]))
        assert answer.status_code == 429
        assert 0 < int(answer.headers["retry-after"]) <= 60
        assert client.get("/v1/jobs").status_code == 200
        other = TestClient(client.app, client=("192.0.2.7", 1234))
        assert submit(other, job_body, tokens[Scope.ADMIN]) == 202


def test_failures_are_forgotten_in_time_and_addresses_are_bounded(monkeypatch):
    now = 0.0
    monkeypatch.setattr(auth.time, "monotonic", lambda: now)
    limit = FailureLimit(2, 60.0)
    limit.note("a")
    now = 30.0
    limit.note("a")
    assert limit.wait("a") == 30.0
    now = 60.0
    assert limit.wait("a") == 0.0
    limit.note("a")
    assert limit.wait("a") == 30.0
    monkeypatch.setattr(FailureLimit, "_MAX_CLIENTS", 2)
    for client in "bcd":
        limit.note(client)
    assert list(limit._times) == ["c", "d"]
