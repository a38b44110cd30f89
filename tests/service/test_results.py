import dataclasses
from collections.abc import Callable

import pytest
from fastapi.testclient import TestClient

from flce_tune.dispatch.snapshot import Snapshot
from flce_tune.service import lookup as lookup_module
from flce_tune.service.devices import this_machine
from flce_tune.service.lookup import Lookup
from flce_tune.tuning_db.records import Measurement, Status, Winner
from flce_tune.tuning_db.store import Store

LLAMA3 = {"preset": "llama3-8b", "tokens": 4000}
H200_ID = "cuda-nvidia-h200-9.0-132-232448"


@pytest.mark.parametrize(
    "device",
    [
        {"device": H200_ID},
        {"device": "NVIDIA H200"},
        {"device": "nvidia-h200"},
        {"architecture": "sm_90"},
    ],
)
def test_best_answers_what_was_stored(client: TestClient, front: list[Winner], device: dict):
    answer = client.get("/v1/configs/best", params=LLAMA3 | device)
    assert answer.status_code == 200, answer.text
    best = answer.json()
    assert best["config"] == {"strategy": "chunked", "chunk": 1024}
    assert (best["rule"], best["expected_ms"]) == ("exact", 12.5)
    assert best["device"]["id"] == H200_ID
    assert best["winner"]["speedup_over_default"] == pytest.approx(20 / 12.5)
    assert best["winner"]["measurement"]["id"] == front[0].measurement.id


SEVEN = (12.5, 12.0, 13.5, 12.25, 13.0, 12.75, 14.0)


def test_every_time_comes_with_its_interval(
    client: TestClient, store: Store, measure: Callable[..., Measurement]
):
    timed = measure(samples_ms=SEVEN, median_ms=12.75)
    once = measure(samples_ms=(99.0,), median_ms=99.0, config={"strategy": "full"})
    store.set_winners(timed.device, timed.problem, [Winner(timed)])
    best = client.get("/v1/configs/best", params=LLAMA3 | {"device": H200_ID}).json()
    assert (best["expected_ms"], best["expected_interval_ms"]) == (12.75, [12.0, 14.0])
    (winner,) = client.get("/v1/winners").json()["items"]
    assert winner["measurement"]["interval_ms"] == [12.0, 14.0]
    listed = client.get("/v1/measurements").json()["items"]
    assert {m["id"]: m["interval_ms"] for m in listed} == {timed.id: [12.0, 14.0], once.id: None}


def test_a_time_of_another_size_is_not_expected_here(
    client: TestClient, store: Store, measure: Callable[..., Measurement]
):
    timed = measure(samples_ms=SEVEN, median_ms=12.75)
    store.set_winners(timed.device, timed.problem, [Winner(timed)])
    query = LLAMA3 | {"device": H200_ID, "tokens": 5000}
    best = client.get("/v1/configs/best", params=query).json()
    assert best["winner"]["measurement"]["interval_ms"] == [12.0, 14.0]
    assert (best["expected_ms"], best["expected_interval_ms"]) == (None, None)


def test_best_by_sizes_is_best_by_preset(client: TestClient, front: list[Winner]):
    sizes = {"tokens": 4000, "hidden": 4096, "vocab": 128256, "device": H200_ID}
    by_sizes = client.get("/v1/configs/best", params=sizes)
    by_preset = client.get("/v1/configs/best", params=LLAMA3 | {"device": H200_ID})
    assert by_sizes.json() == by_preset.json()


def test_best_keeps_to_the_workspace_limit(client: TestClient, front: list[Winner]):
    query = LLAMA3 | {"device": H200_ID}
    unlimited = client.get("/v1/configs/best", params=query).json()
    limit = unlimited["workspace_bytes"] - 1
    limited = client.get("/v1/configs/best", params=query | {"workspace_limit": limit}).json()
    assert limited["config"] == {"strategy": "chunked", "chunk": 256}
    assert limited["workspace_bytes"] <= limit


def test_best_sees_new_winners(client: TestClient, store: Store, front: list[Winner]):
    query = LLAMA3 | {"device": H200_ID}
    assert client.get("/v1/configs/best", params=query).json()["expected_ms"] == 12.5
    measured = front[0].measurement
    store.set_winners(measured.device, measured.problem, front[1:])
    client.app.state.lookup.forget()
    assert client.get("/v1/configs/best", params=query).json()["expected_ms"] == 15.0


def test_best_says_when_nothing_was_measured(client: TestClient):
    best = client.get("/v1/configs/best", params={"tokens": 64, "hidden": 32, "vocab": 99}).json()
    assert (best["rule"], best["expected_ms"], best["winner"]) == ("default", None, None)
    assert best["device"]["name"] == this_machine().name


def test_explain_tells_every_rule(client: TestClient, front: list[Winner]):
    told = client.get("/v1/explain", params=LLAMA3 | {"device": H200_ID}).json()
    assert told["rule"] == "exact"
    assert [step["rule"] for step in told["steps"]][-1] == "default"
    assert told["source"].startswith("this service's database")


@pytest.mark.parametrize("path", ["/v1/configs/best", "/v1/explain"])
@pytest.mark.parametrize(
    ("query", "status", "kind"),
    [
        ({"tokens": 8}, 422, "invalid-request"),
        ({"tokens": 8, "hidden": 8}, 422, "invalid-request"),
        ({"tokens": 8, "preset": "llama3-8b", "vocab": 8}, 422, "invalid-request"),
        ({"preset": "llama3-8b"}, 422, "invalid-request"),
        (LLAMA3 | {"tokens": 0}, 422, "invalid-request"),
        (LLAMA3 | {"workspace_limit": -1}, 422, "invalid-request"),
        (LLAMA3 | {"unheard": 1}, 422, "invalid-request"),
        (LLAMA3 | {"features": "magic"}, 422, "invalid-request"),
        (LLAMA3 | {"architecture": "sm_90", "device": "x"}, 422, "invalid-request"),
        (LLAMA3 | {"architecture": "sm_12"}, 404, "unknown-architecture"),
        (LLAMA3 | {"device": "Abacus"}, 404, "unknown-device"),
        ({"preset": "gpt-9", "tokens": 8}, 404, "unknown-preset"),
    ],
)
def test_bad_questions_are_refused(
    client: TestClient, path: str, query: dict, status: int, kind: str
):
    answer = client.get(path, params=query)
    assert (answer.status_code, answer.json()["type"]) == (status, f"urn:flce-tune:error:{kind}")


def test_a_name_two_devices_share_is_refused_with_their_ids(
    client: TestClient, measure: Callable[..., Measurement]
):
    whole = measure().device
    slice_ = measure(device=dataclasses.replace(whole, sm_count=16)).device
    answer = client.get("/v1/configs/best", params=LLAMA3 | {"device": whole.name})
    assert answer.status_code == 409
    assert H200_ID in answer.json()["detail"]
    assert f"-{slice_.sm_count}-" in answer.json()["detail"]


def test_measurements_page_in_order(client: TestClient, measure: Callable[..., Measurement]):
    ids = [measure().id for _ in range(5)]
    seen, cursor = [], 0
    while cursor is not None:
        page = client.get("/v1/measurements", params={"limit": 2, "cursor": cursor}).json()
        assert len(page["items"]) <= 2
        seen += [item["id"] for item in page["items"]]
        cursor = page["next"]
    assert seen == ids


def test_measurements_can_be_filtered(client: TestClient, measure: Callable[..., Measurement]):
    ok = measure()
    failed = measure(
        status=Status.OUT_OF_RESOURCES, samples_ms=(), median_ms=None, spread_ms=None, message="shm"
    )
    other = measure(problem=dataclasses.replace(ok.problem, vocab=32000))

    def ids(**query: object) -> list[int]:
        return [m["id"] for m in client.get("/v1/measurements", params=query).json()["items"]]

    assert ids() == [ok.id, failed.id, other.id]
    assert ids(status="out_of_resources") == [failed.id]
    assert ids(vocab=32000) == [other.id]
    assert ids(tokens=4000) == [ok.id, failed.id, other.id]
    assert ids(tokens=5000) == []
    assert ids(architecture="sm_80") == []
    assert ids(device=H200_ID, status="ok") == [ok.id, other.id]


def test_winners_can_be_filtered(client: TestClient, front: list[Winner]):
    def times(**query: object) -> list[float]:
        page = client.get("/v1/winners", params=query).json()
        return [winner["measurement"]["median_ms"] for winner in page["items"]]

    assert times() == times(device=H200_ID) == times(architecture="sm_90") == [12.5, 15.0]
    assert times(architecture="sm_80") == times(vocab=1) == times(dtype="float16") == []


def test_devices_and_presets_are_listed(client: TestClient, front: list[Winner]):
    (device,) = client.get("/v1/devices").json()["items"]
    assert (device["id"], device["sm_count"]) == (H200_ID, 132)
    presets = {preset["name"]: preset for preset in client.get("/v1/presets").json()["items"]}
    assert presets["gemma2-2b"]["softcap"] == 30
    assert presets["llama3-8b"]["vocab"] == 128256


def test_a_snapshot_is_sent_once(client: TestClient, store: Store, front: list[Winner]):
    path = f"/v1/snapshots/{H200_ID}"
    first = client.get(path)
    assert first.status_code == 200
    etag = first.headers["etag"]
    for header in (etag, f'"x", {etag}', f"W/{etag}", "*"):
        again = client.get(path, headers={"If-None-Match": header})
        assert (again.status_code, again.content) == (304, b"")
        assert again.headers["etag"] == etag
    measured = front[0].measurement
    store.set_winners(measured.device, measured.problem, front[1:])
    changed = client.get(path, headers={"If-None-Match": etag})
    assert changed.status_code == 200
    assert changed.headers["etag"] != etag


def test_a_snapshot_is_what_the_dispatcher_reads(client: TestClient, front: list[Winner]):
    text = client.get(f"/v1/snapshots/{H200_ID}").text
    snapshot = Snapshot.from_json(text, "service")
    (stored,) = snapshot.fronts[front[0].measurement.device].values()
    assert [winner.measurement.median_ms for winner in stored] == [12.5, 15.0]


def test_an_unknown_device_has_no_snapshot(client: TestClient):
    assert client.get("/v1/snapshots/abacus").status_code == 404


def test_a_known_answer_is_given_again_without_a_thread_and_not_beyond_a_change(
    client: TestClient, store: Store, front: list[Winner], monkeypatch: pytest.MonkeyPatch
):
    query = {"device": "NVIDIA H200", "hidden": 4096, "vocab": 128256, "tokens": 4096}
    first = client.get("/v1/configs/best", params=query)
    answered = []
    monkeypatch.setattr(Lookup, "answer", lambda *_: answered.append(1) or b"{}")
    assert client.get("/v1/configs/best", params=query).content == first.content
    assert not answered
    assert client.get("/v1/configs/best", params=query | {"tokens": 5}).content == b"{}"
    client.app.state.lookup.forget()
    assert client.get("/v1/configs/best", params=query).content == b"{}"
    assert len(answered) == 2


def test_winners_are_read_only_when_they_have_changed(
    store: Store, front: list[Winner], monkeypatch: pytest.MonkeyPatch
):
    lookup, reads, read = Lookup(store), [], Store.winners
    monkeypatch.setattr(Store, "winners", lambda self: reads.append(1) or read(self))
    first = lookup.dispatcher()
    for _ in range(3):
        lookup.forget()
        assert lookup.dispatcher() is first
    assert len(reads) == 1
    measured = front[0].measurement
    store.set_winners(measured.device, measured.problem, front[:1])
    lookup.forget()
    assert lookup.dispatcher() is not first
    assert len(reads) == 2


def test_the_number_of_kept_answers_is_bounded(store: Store, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lookup_module, "MAX_ANSWERS", 3)
    lookup = Lookup(store)
    for number in range(10):
        lookup.answer(b"%d" % number, lambda: b"x")
    assert len(lookup._answers) <= 3
