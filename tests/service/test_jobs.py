import json
import uuid
from datetime import datetime, timezone

import pytest
from fastapi.testclient import TestClient

from flce_tune.service.app import create_app
from flce_tune.service.settings import ServiceSettings
from flce_tune.tuning_db.records import DeviceRecord, JobState, Miss, ProblemRecord
from flce_tune.tuning_db.store import Store


def submit(client: TestClient, body: dict, **headers: str) -> dict:
    answer = client.post("/v1/jobs", json=body, headers=headers)
    assert answer.status_code == 202, answer.text
    return answer.json()


def server_sent_events(text: str) -> list[tuple[int, str, dict]]:
    """The (id, event, data) of each event in a finished stream."""
    events = []
    for block in text.replace("\r\n", "\n").split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.split("\n") if ": " in line)
        if "data" in fields:
            events.append((int(fields["id"]), fields["event"], json.loads(fields["data"])))
    return events


def test_a_submitted_job_is_queued_and_can_be_found(client: TestClient, job_body: dict):
    answer = client.post("/v1/jobs", json=job_body | {"priority": 3})
    assert answer.status_code == 202
    job = answer.json()
    assert (job["state"], job["priority"]) == ("queued", 3)
    assert answer.headers["location"] == f"/v1/jobs/{job['id']}"
    assert client.get(answer.headers["location"]).json() == job


def test_a_preset_becomes_its_problems(client: TestClient):
    job = submit(client, {"preset": "gemma2-2b", "tokens": [4096, 8192]})
    assert [
        (p["tokens"], p["hidden"], p["vocab"], p["features"]) for p in job["spec"]["problems"]
    ] == [(4096, 2304, 256000, ["softcap"]), (8192, 2304, 256000, ["softcap"])]


def test_a_preset_brings_its_own_tokens_and_dtype(client: TestClient):
    (problem,) = submit(client, {"preset": "demo"})["spec"]["problems"]
    assert (problem["tokens"], problem["dtype"]) == (1024, "float32")


GPU = DeviceRecord("cuda", "NVIDIA H200", "9.0", 132, 232448)
CPU = DeviceRecord("cpu", "Some CPU", "0.0", 8, 0)


def miss(device: DeviceRecord, vocab: int, count: int, mode: str = "train") -> Miss:
    problem = ProblemRecord(mode, "bfloat16", "fp32", 64, vocab, 64)
    return Miss(device, problem, 60, count, datetime.now(timezone.utc))


@pytest.mark.parametrize(
    ("device", "vocabs"),
    [
        ("auto", [10, 20, 30]),
        ("cuda", [10, 30]),
        ("cuda:1", [10, 30]),
        ("sm_90", [10, 30]),
        ("cuda-nvidia-h200-9.0-132-232448", [10, 30]),
        ("cpu", [10, 20]),
    ],
)
def test_a_job_can_be_about_what_was_missed_most_on_its_device(
    client: TestClient, store: Store, device: str, vocabs: list[int]
):
    found = [miss(GPU, 10, 9), miss(CPU, 20, 5), miss(GPU, 30, 3), miss(CPU, 10, 1)]
    store.note_misses([*found, miss(GPU, 99, 99, mode="of a later version")])
    job = submit(client, {"missed": 3, "device": device})
    assert sorted(p["vocab"] for p in job["spec"]["problems"]) == vocabs
    first = job["spec"]["problems"][0]
    assert (first["tokens"], first["hidden"], first["mode"]) == (60, 64, "train")
    (most,) = submit(client, {"missed": 1, "device": device})["spec"]["problems"]
    assert most["vocab"] == (20 if device == "cpu" else 10)


def test_nothing_missed_is_said(client: TestClient, store: Store):
    store.note_misses([miss(GPU, 10, 1)])
    answer = client.post("/v1/jobs", json={"missed": 5, "device": "cpu"})
    assert answer.status_code == 404
    assert answer.json()["type"] == "urn:flce-tune:error:nothing-missed"


def test_a_job_about_misses_is_made_once_though_misses_change(client: TestClient, store: Store):
    store.note_misses([miss(GPU, 10, 1)])
    first = submit(client, {"missed": 5}, **{"Idempotency-Key": "once"})
    store.note_misses([miss(GPU, 20, 7)])
    again = submit(client, {"missed": 5}, **{"Idempotency-Key": "once"})
    assert (again["id"], len(again["spec"]["problems"])) == (first["id"], 1)
    more = {"missed": 6}
    other = client.post("/v1/jobs", json=more, headers={"Idempotency-Key": "once"})
    assert other.status_code == 409


def test_the_same_idempotency_key_gives_the_same_job(client: TestClient, job_body: dict):
    first = submit(client, job_body, **{"Idempotency-Key": "once"})
    again = submit(client, job_body, **{"Idempotency-Key": "once"})
    other = submit(client, job_body)
    assert first["id"] == again["id"] != other["id"]


def test_an_idempotency_key_is_not_taken_for_another_job(client: TestClient, job_body: dict):
    submit(client, job_body, **{"Idempotency-Key": "once"})
    changed = job_body | {"device": "cpu"}
    answer = client.post("/v1/jobs", json=changed, headers={"Idempotency-Key": "once"})
    assert answer.status_code == 409
    assert answer.json()["type"] == "urn:flce-tune:error:idempotency-key-reused"


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"problems": []}, "body"),
        ({"preset": "llama3-8b"}, "body"),
        ({"tokens": [8]}, "body"),
        ({"missed": 5}, "body"),
        ({"problems": [], "missed": 5, "preset": "llama3-8b"}, "body"),
        ({"problems": [], "missed": 0}, "body.missed"),
        ({"device": "tpu"}, "body.device"),
        ({"priority": 10**9}, "body.priority"),
        ({"unheard": 1}, "body.unheard"),
        ({"options": {"budget": 0}}, "body.options.budget"),
        ({"options": {"timeout_s": "nan"}}, "body.options.timeout_s"),
        ({"options": {"time_limit_s": 0.5}}, "body.options.time_limit_s"),
        ({"options": {"time_limit_s": 604801}}, "body.options.time_limit_s"),
        (
            {"problems": [{"tokens": 0, "hidden": 1, "vocab": 1}]},
            "body.problems.0.tokens",
        ),
        (
            {"problems": [{"tokens": 1, "hidden": 2**31, "vocab": 1}]},
            "body.problems.0.hidden",
        ),
        (
            {"problems": [{"tokens": 1, "hidden": 1, "vocab": 1, "dtype": "int4"}]},
            "body.problems.0.dtype",
        ),
    ],
)
def test_bad_jobs_are_refused_with_the_place(
    client: TestClient, job_body: dict, change: dict, place: str
):
    answer = client.post("/v1/jobs", json=job_body | change)
    assert answer.status_code == 422
    assert answer.headers["content-type"] == "application/problem+json"
    assert place in [error["location"] for error in answer.json()["errors"]]
    assert client.get("/v1/jobs").json()["items"] == []


def test_an_unknown_strategy_is_refused_with_the_known_ones(client: TestClient, job_body: dict):
    answer = client.post("/v1/jobs", json=job_body | {"options": {"strategies": ["magic"]}})
    assert answer.status_code == 422
    assert "magic" in answer.json()["detail"]
    assert "chunked" in answer.json()["detail"]


def test_an_unknown_preset_is_refused_with_the_known_ones(client: TestClient):
    answer = client.post("/v1/jobs", json={"preset": "gpt-9"})
    assert answer.status_code == 404
    assert "llama3-8b" in answer.json()["detail"]


def test_the_list_pages_from_new_to_old(client: TestClient, job_body: dict):
    ids = [submit(client, job_body)["id"] for _ in range(5)]
    seen, query = [], {"limit": 2}
    for _ in range(3):
        page = client.get("/v1/jobs", params=query).json()
        seen += [job["id"] for job in page["items"]]
        query["cursor"] = page["next"]
    assert seen == ids[::-1]
    assert page["next"] is None


def test_the_list_filters_by_state(client: TestClient, store: Store, job_body: dict):
    first, second, third = (submit(client, job_body)["id"] for _ in range(3))
    store.claim_job("w", 60)
    client.post(f"/v1/jobs/{second}/cancel")

    def ids(*states: str) -> set[str]:
        page = client.get("/v1/jobs", params={"state": states}).json()
        return {job["id"] for job in page["items"]}

    assert ids("running") == {first}
    assert ids("queued", "cancelled") == {second, third}


def test_a_queued_job_is_cancelled_at_once(client: TestClient, job_body: dict):
    job = submit(client, job_body)
    for _ in range(2):
        answer = client.post(f"/v1/jobs/{job['id']}/cancel")
        assert (answer.status_code, answer.json()["state"]) == (202, "cancelled")


def test_a_finished_job_cannot_be_cancelled(client: TestClient, store: Store, job_body: dict):
    job = submit(client, job_body)
    store.claim_job("w", 60)
    store.finish_job(job["id"], "w", JobState.SUCCEEDED)
    answer = client.post(f"/v1/jobs/{job['id']}/cancel")
    assert answer.status_code == 409
    assert answer.json()["type"] == "urn:flce-tune:error:job-finished"


@pytest.mark.parametrize(("method", "path"), [("GET", ""), ("POST", "/cancel"), ("GET", "/events")])
def test_an_unknown_job_is_404(client: TestClient, method: str, path: str):
    answer = client.request(method, f"/v1/jobs/{uuid.uuid4()}{path}")
    assert answer.status_code == 404
    assert answer.json()["type"] == "urn:flce-tune:error:unknown-job"
    assert client.request(method, f"/v1/jobs/no-uuid{path}").status_code == 422


def test_an_unknown_cursor_is_refused(client: TestClient):
    assert client.get("/v1/jobs", params={"cursor": str(uuid.uuid4())}).status_code == 422


def test_events_tell_the_whole_story_and_can_be_resumed(
    client: TestClient, store: Store, job_body: dict, monkeypatch: pytest.MonkeyPatch
):
    all_at_once = Store.events
    monkeypatch.setattr(Store, "events", lambda *args: all_at_once(*args, limit=3))
    job = submit(client, job_body)["id"]
    store.claim_job("w", 60)
    store.add_event(job, "measurement", {"done": 1, "total": 2})
    store.finish_job(job, "w", JobState.SUCCEEDED)
    answer = client.get(f"/v1/jobs/{job}/events")
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = server_sent_events(answer.text)
    assert [(kind, data.get("state")) for _, kind, data in events] == [
        ("state", "queued"),
        ("state", "running"),
        ("measurement", None),
        ("state", "succeeded"),
    ]
    rest = client.get(f"/v1/jobs/{job}/events", headers={"Last-Event-ID": str(events[1][0])})
    assert server_sent_events(rest.text) == events[2:]
    bad = client.get(f"/v1/jobs/{job}/events", headers={"Last-Event-ID": "yesterday"})
    assert bad.status_code == 422


def test_writes_need_the_token_and_reads_do_not(store: Store, job_body: dict):
    settings = ServiceSettings(store.url, token="s3cret", run_jobs=False)
    with TestClient(create_app(settings)) as client:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic s3cret"}):
            answer = client.post("/v1/jobs", json=job_body, headers=headers)
            assert answer.status_code == 401
            assert answer.headers["www-authenticate"] == "Bearer"
            assert (
                client.post(f"/v1/jobs/{uuid.uuid4()}/cancel", headers=headers).status_code == 401
            )
        right = {"Authorization": "Bearer s3cret"}
        assert client.post("/v1/jobs", json=job_body, headers=right).status_code == 202
        assert len(client.get("/v1/jobs").json()["items"]) == 1
