"""What workers ask of the service, and what comes in from elsewhere."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from fastapi.testclient import TestClient

from flce_tune.service.app import create_app
from flce_tune.service.settings import ServiceSettings
from flce_tune.tuning_db.interchange import export_json
from flce_tune.tuning_db.records import JobState, Miss, Scope, Winner
from flce_tune.tuning_db.store import Store

OWNER = "worker:1:abcdef"
JSON = {"Content-Type": "application/json"}


@pytest.fixture
def job(client: TestClient, job_body: dict) -> str:
    """A job that ``OWNER`` has claimed."""
    client.post("/v1/jobs", json=job_body)
    claimed = client.post("/v1/jobs/claim", json={"owner": OWNER, "devices": ["auto"]})
    assert claimed.status_code == 200, claimed.text
    return claimed.json()["job"]["id"]


@pytest.fixture
def elsewhere(tmp_path, front: list[Winner]) -> Iterator[Store]:
    """Another database with the same front, and nothing of it in ours any more."""
    with Store.open(f"sqlite:///{tmp_path / 'elsewhere.sqlite3'}") as other:
        stored = [other.add_measurement(replace(w.measurement, id=None)) for w in front]
        winners = [replace(w, measurement=m) for w, m in zip(front, stored, strict=True)]
        other.set_winners(stored[0].device, stored[0].problem, winners)
        yield other


@pytest.fixture
def document(elsewhere: Store) -> dict:
    return json.loads(export_json(elsewhere))


def kind_of(answer) -> str:
    return answer.json()["type"].removeprefix("urn:flce-tune:error:")


def send(client: TestClient, job: str, document: dict, owner: str = OWNER):
    path = f"/v1/jobs/{job}/results"
    return client.post(path, params={"owner": owner}, content=json.dumps(document), headers=JSON)


@pytest.mark.parametrize(
    ("wanted", "devices", "taken"),
    [
        ("auto", ["auto", "cpu"], True),
        ("cuda", ["auto", "cpu"], False),
        ("sm_90", ["auto", "cuda", "cuda:0", "sm_90"], True),
        ("sm_90", ["auto", "cuda", "cuda:0", "sm_80"], False),
        ("cuda-nvidia-h200-9.0-132-232448", ["cuda-nvidia-h200-9.0-132-232448"], True),
    ],
)
def test_a_job_goes_to_who_can_do_it(
    client: TestClient, job_body: dict, wanted: str, devices: list[str], taken: bool
):
    assert client.post("/v1/jobs", json=job_body | {"device": wanted}).status_code == 202
    answer = client.post("/v1/jobs/claim", json={"owner": OWNER, "devices": devices})
    assert answer.status_code == (200 if taken else 204)


@pytest.mark.parametrize("wanted", ["gpu", "cuda:", "sm_9", "h200", "cuda-x y", "../cpu"])
def test_odd_devices_are_refused(client: TestClient, job_body: dict, wanted: str):
    assert client.post("/v1/jobs", json=job_body | {"device": wanted}).status_code == 422


def test_results_are_verified_stored_once_and_end_a_miss(
    client: TestClient, store: Store, job: str, front: list[Winner], document: dict
):
    measured = front[0].measurement
    store.set_winners(measured.device, measured.problem, [])
    store.note_misses([Miss(measured.device, measured.problem, 4096, 1, measured.created_at)])
    before = store.count_measurements()
    document["measurements"][0]["created_at"] = "2026-01-01T00:00:00.000001Z"
    for _ in range(2):
        answer = send(client, job, document)
        assert answer.status_code == 204, answer.text
    assert store.count_measurements() == before + 1
    assert [w.verified for w in store.winners()] == [True, True]
    assert store.misses() == []


def test_results_of_a_lost_job_are_refused_whole(
    client: TestClient, store: Store, job: str, document: dict
):
    document["measurements"][0]["created_at"] = "2026-01-01T00:00:00Z"
    before = store.count_measurements()
    answer = send(client, job, document, owner="somebody-else")
    assert (answer.status_code, kind_of(answer)) == (409, "lease-lost")
    assert store.count_measurements() == before
    assert b"lease_losses_total 1.0" in client.get("/metrics").content


def spoilt(document: dict, **changes: object) -> dict:
    document["measurements"][1] |= changes
    return document


SPOILS = [
    ({"config": {"strategy": "magic"}}, "magic"),
    ({"config": {"strategy": "chunked", "chunk": 1024, "boost": 9}}, "boost"),
    ({"config": {"strategy": "chunked", "chunk": 0}}, "chunk"),
    ({"tokens": 70000}, "70000 tokens are not of bucket 4096"),
    ({"device": 9}, "only 1"),
]


@pytest.mark.parametrize(("changes", "reason"), SPOILS)
def test_what_cannot_have_been_measured_is_refused(
    client: TestClient, store: Store, job: str, document: dict, changes: dict, reason: str
):
    before = store.count_measurements()
    body = spoilt(document, **changes)
    body["measurements"][0]["created_at"] = "2026-01-01T00:00:00Z"
    imported = client.post("/v1/import", content=json.dumps(body), headers=JSON)
    for answer in (send(client, job, body), imported):
        assert (answer.status_code, kind_of(answer)) == (422, "invalid-request")
        assert "measurements[1]" in answer.json()["detail"]
        assert reason in answer.json()["detail"]
    assert store.count_measurements() == before


def test_too_many_results_at_once_are_refused(client: TestClient, job: str, document: dict):
    document["measurements"] *= 501
    answer = send(client, job, document)
    assert answer.status_code in (413, 422)


def test_a_document_that_does_not_say_it_is_json_is_refused(client: TestClient, job: str):
    for path in ("/v1/import", f"/v1/jobs/{job}/results?owner={OWNER}"):
        for kind in ("text/plain", "multipart/form-data; boundary=x"):
            answer = client.post(path, content=b"{}", headers={"Content-Type": kind})
            assert (answer.status_code, kind_of(answer)) == (422, "invalid-request")


def test_an_export_goes_through_another_service(
    client: TestClient, store: Store, elsewhere: Store, front: list[Winner]
):
    settings = ServiceSettings(elsewhere.url, run_jobs=False)
    with TestClient(create_app(settings)) as other:
        exported = other.get("/v1/export").content
        again = other.post("/v1/import", content=exported, headers=JSON)
    assert again.json() == {"measurements": 0, "winners": 0, "skipped": 4}
    measured = front[0].measurement
    store.set_winners(measured.device, measured.problem, [])
    report = client.post("/v1/import", content=exported, headers=JSON).json()
    assert report == {"measurements": 0, "winners": 2, "skipped": 2}
    assert [w.verified for w in store.winners()] == [False, False]


def test_an_import_may_be_larger_than_other_bodies(store: Store, elsewhere: Store):
    text = export_json(elsewhere)
    for most, status in ((len(text), 200), (len(text) - 1, 413)):
        settings = ServiceSettings(
            store.url, run_jobs=False, max_body_bytes=100, max_import_bytes=most
        )
        with TestClient(create_app(settings)) as client:
            answer = client.post("/v1/import", content=text, headers=JSON)
            assert answer.status_code == status


def test_part_of_a_problem_is_none(client: TestClient):
    assert client.get("/v1/export", params={"hidden": 4096}).status_code == 422


def test_events_that_are_no_json_are_refused(client: TestClient, job: str):
    event = {"number": 1, "kind": "log", "data": {"a": [float("nan")]}}
    body = json.dumps({"owner": OWNER, "events": [event]})
    answer = client.post(f"/v1/jobs/{job}/report", content=body, headers=JSON)
    assert answer.status_code == 422


def test_working_needs_its_scope(store: Store, job_body: dict):
    secrets = {scope: store.create_token(scope.value, scope) for scope in Scope}
    with TestClient(create_app(ServiceSettings(store.url, run_jobs=False))) as client:

        def claim(scope: Scope) -> int:
            headers = {"Authorization": f"Bearer {secrets[scope]}"}
            body = {"owner": OWNER, "devices": ["auto"]}
            return client.post("/v1/jobs/claim", json=body, headers=headers).status_code

        assert [claim(scope) for scope in Scope] == [403, 403, 204, 204]
        headers = {"Authorization": f"Bearer {secrets[Scope.WORK]}"}
        assert client.post("/v1/jobs", json=job_body, headers=headers).status_code == 202
        high = job_body | {"priority": 1}
        assert client.post("/v1/jobs", json=high, headers=headers).status_code == 403


def test_who_claims_again_gets_its_job_again(
    client: TestClient, store: Store, job: str, job_body: dict
):
    client.post("/v1/jobs", json=job_body)
    again = client.post("/v1/jobs/claim", json={"owner": OWNER, "devices": ["auto"]})
    assert again.json()["job"]["id"] == job
    assert store.job(job).attempts == 1
    other = client.post("/v1/jobs/claim", json={"owner": "worker:2:abcdef", "devices": ["auto"]})
    assert other.json()["job"]["id"] != job


@pytest.mark.parametrize("action", ["report", "finish", "release"])
def test_what_is_nobodys_is_refused(client: TestClient, action: str, measure: Callable):
    body = {"owner": OWNER} | ({"state": "failed"} if action == "finish" else {})
    unknown = client.post(f"/v1/jobs/00000000-0000-0000-0000-000000000000/{action}", json=body)
    assert (unknown.status_code, kind_of(unknown)) == (404, "unknown-job")


def test_a_finished_job_stays_as_it_ended(client: TestClient, store: Store, job: str):
    path = f"/v1/jobs/{job}/finish"
    body = {"owner": OWNER, "state": "failed", "message": "why"}
    assert client.post(path, json=body).json()["state"] == "failed"
    assert client.post(path, json=body).status_code == 200  # the answer was lost
    changed = client.post(path, json=body | {"state": "succeeded"})
    assert (changed.status_code, kind_of(changed)) == (409, "lease-lost")
    assert store.job(job).state is JobState.FAILED
