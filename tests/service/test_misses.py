import pytest
from fastapi.testclient import TestClient

from flce_tune.tuning_db.records import DeviceRecord, Scope
from flce_tune.tuning_db.store import Store

DEVICE = {
    "kind": "cuda",
    "name": "NVIDIA H200",
    "capability": "9.0",
    "sm_count": 132,
    "shared_memory_per_block": 232448,
    "memory_bytes": 150_000_000_000,
}


def miss(tokens: int, count: int = 1, **device: object) -> dict:
    problem = {"tokens": tokens, "hidden": 4096, "vocab": 128256}
    return {"device": DEVICE | device, "problem": problem, "count": count}


def test_misses_are_counted_by_problem_class(client: TestClient, store: Store):
    batch = [miss(4000), miss(60_000, count=2), miss(4096, count=3)]
    assert client.post("/v1/misses", json={"misses": batch}).status_code == 204
    frequent, rare = client.get("/v1/misses").json()["items"]
    assert (frequent["count"], frequent["tokens"], rare["count"]) == (4, 4096, 2)
    assert frequent["device"]["id"] == "cuda-nvidia-h200-9.0-132-232448"
    assert frequent["problem"]["token_bucket"] == 4096
    assert store.misses()[0].device == DeviceRecord(**DEVICE)
    assert len(client.get("/v1/misses", params={"limit": 1}).json()["items"]) == 1


@pytest.mark.parametrize(
    "body",
    [
        {"misses": []},
        {"misses": [miss(4000)] * 1001},
        {"misses": [miss(4000), miss(0)]},
        {"misses": [miss(4000, name="a\0b")]},
        {"misses": [miss(4000, count=0)]},
        {"misses": [miss(4000, kind="tpu")]},
    ],
)
def test_a_batch_with_something_wrong_counts_nothing(client: TestClient, store: Store, body: dict):
    assert client.post("/v1/misses", json=body).status_code == 422
    assert store.misses() == []


def test_reporting_needs_a_token_where_there_is_one(client: TestClient, store: Store):
    secret = store.create_token("trainer", Scope.SUBMIT)
    body = {"misses": [miss(4000)]}
    assert client.post("/v1/misses", json=body).status_code == 401
    headers = {"Authorization": f"Bearer {secret}"}
    assert client.post("/v1/misses", json=body, headers=headers).status_code == 204
