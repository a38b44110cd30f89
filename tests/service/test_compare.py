"""Two devices or two toolchains side by side, in the service and on the command line."""

import json
from collections.abc import Callable
from dataclasses import replace

import pytest
from fastapi.testclient import TestClient
from typer.testing import CliRunner

from flce_tune.cli.app import app
from flce_tune.tuning_db.records import DeviceRecord, Measurement, Status, ToolchainRecord, Winner
from flce_tune.tuning_db.store import Store

H200 = DeviceRecord("cuda", "NVIDIA H200", "9.0", 132, 232448, 150_000_000_000)
A100 = DeviceRecord("cuda", "NVIDIA A100", "8.0", 108, 166912)
NEWER = ToolchainRecord("2.14.0", "3.8.0", "13.0", "580.1", "1" * 64)


@pytest.fixture
def other_gpu(store: Store, measure: Callable[..., Measurement], front: list[Winner]) -> None:
    """The same problem on an A100, and another that the H200 has not seen."""
    problem = front[0].measurement.problem
    slower = measure(device=A100, median_ms=25.0)
    store.set_winners(A100, problem, [Winner(slower)])
    elsewhere = measure(device=A100, problem=replace(problem, vocab=32000))
    store.set_winners(A100, elsewhere.problem, [Winner(elsewhere)])


def compare(client: TestClient, **query: object) -> dict:
    answer = client.get("/v1/compare", params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_two_devices_meet_on_their_problems(client: TestClient, other_gpu: None):
    found = compare(client, a="NVIDIA H200", b="nvidia-a100")
    assert (found["by"], found["geometric_mean"]) == ("device", 0.5)
    assert found["b"].startswith("cuda-nvidia-a100-8.0")
    only_b, both = found["items"]
    assert (only_b["problem"]["vocab"], only_b["a"], only_b["ratio"]) == (32000, None, None)
    assert (both["ratio"], both["same_config"], both["device"]) == (0.5, True, None)
    assert both["a"]["measurement"]["median_ms"] == 12.5
    assert both["b"]["measurement"]["device_name"] == "NVIDIA A100"


def test_problems_can_be_filtered(client: TestClient, other_gpu: None):
    sides = {"a": "NVIDIA H200", "b": "NVIDIA A100"}
    assert [d["problem"]["vocab"] for d in compare(client, **sides, vocab=32000)["items"]] == [
        32000
    ]
    assert compare(client, **sides, dtype="float16")["items"] == []
    assert compare(client, **sides, dtype="float16")["geometric_mean"] is None


def test_the_command_line_agrees(
    client: TestClient, store: Store, other_gpu: None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("FLCE_TUNE_DB", store.url)
    done = CliRunner().invoke(app, ["diff", "H200", "A100", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found == _comparable(compare(client, a="NVIDIA H200", b="NVIDIA A100"))


@pytest.mark.parametrize(
    ("shift", "within"), [(0.0, True), (-0.5, True), (-1.1, False)], ids=["same", "near", "apart"]
)
def test_times_whose_intervals_overlap_are_within_noise(
    client: TestClient,
    store: Store,
    measure: Callable[..., Measurement],
    shift: float,
    within: bool,
):
    """Of seven samples, the smallest and the largest bound the median."""
    samples = tuple(12.0 + k / 6 for k in range(7))
    for device, more in ((H200, 0.0), (A100, shift)):
        moved = tuple(sample + more for sample in samples)
        timed = measure(device=device, samples_ms=moved, median_ms=moved[3])
        store.set_winners(device, timed.problem, [Winner(timed)])
    (one,) = compare(client, a="NVIDIA H200", b="NVIDIA A100")["items"]
    assert one["within_noise"] is within
    assert one["a"]["measurement"]["interval_ms"] == [samples[0], samples[-1]]
    marked = "≈ 1." in client.get("/compare", params={"a": "NVIDIA H200", "b": "NVIDIA A100"}).text
    assert marked is within


def test_too_few_samples_say_nothing_of_noise(client: TestClient, other_gpu: None):
    both = compare(client, a="NVIDIA H200", b="NVIDIA A100")["items"][1]
    assert (both["within_noise"], both["a"]["measurement"]["interval_ms"]) == (None, None)
    assert "≈ 0." not in client.get("/compare?a=NVIDIA+H200&b=NVIDIA+A100").text


def _comparable(found: dict) -> list:
    """The items, with dates as the command line writes them."""
    return json.loads(json.dumps(found["items"]).replace('Z"', '+00:00"'))


def test_two_toolchains_meet_on_each_device(
    client: TestClient, measure: Callable[..., Measurement], front: list[Winner]
):
    measure(toolchain=NEWER, median_ms=1.0, samples_ms=(1.0,))  # timed once: no final
    measure(toolchain=NEWER, median_ms=9.0, config={"strategy": "chunked", "chunk": 64})
    measure(toolchain=NEWER, median_ms=10.0, config={"strategy": "chunked", "chunk": 64})
    failed = {"samples_ms": (), "median_ms": None, "spread_ms": None}
    measure(toolchain=NEWER, status=Status.CRASH, config={"strategy": "full"}, **failed)
    measure(device=A100, toolchain=NEWER)
    found = compare(client, a="triton-3.7", b="torch-2.14", by="toolchain")
    assert found["a"] == "torch-2.13.0-triton-3.7.1-cuda-13.0-driver-580.1-000000000000"
    a100, h200 = found["items"]
    assert (a100["device"], a100["a"]) == ("cuda-nvidia-a100-8.0-108-166912", None)
    assert (h200["ratio"], h200["same_config"]) == (1.25, False)
    assert h200["a"]["default_ms"] == 20.0  # its winner
    assert h200["b"]["measurement"]["median_ms"] == 10.0  # the latest of that config
    assert found["geometric_mean"] == pytest.approx(1.25)
    only = compare(client, a="triton-3.7", b="torch-2.14", by="toolchain", architecture="sm_80")
    assert [d["device"] for d in only["items"]] == ["cuda-nvidia-a100-8.0-108-166912"]
    same = compare(client, a="triton-3.7", b="torch-2.14", by="toolchain", device="NVIDIA H200")
    assert same["items"] == [h200]


def test_toolchains_are_never_matched_across_devices(
    client: TestClient, measure: Callable[..., Measurement]
):
    measure()
    measure(device=A100, toolchain=NEWER)
    found = compare(client, a="torch-2.13", b="torch-2.14", by="toolchain")
    assert [d["ratio"] for d in found["items"]] == [None, None]


def test_toolchains_are_listed(client: TestClient, front: list[Winner]):
    (item,) = client.get("/v1/toolchains").json()["items"]
    assert item["id"].startswith("torch-2.13.0-triton-3.7.1")
    assert item["kernel_hash"] == "0" * 64


@pytest.mark.parametrize(
    ("query", "status", "kind"),
    [
        ({"a": "NVIDIA H200"}, 422, "invalid-request"),
        ({"a": "NVIDIA H200", "b": "x", "device": "x"}, 422, "invalid-request"),
        ({"a": "NVIDIA H200", "b": "Abacus"}, 404, "unknown-device"),
        ({"a": "torch-2", "b": "torch-9", "by": "toolchain"}, 409, "ambiguous-toolchain"),
        ({"a": "torch-2.13", "b": "torch-9", "by": "toolchain"}, 404, "unknown-toolchain"),
    ],
)
def test_bad_questions_are_refused(
    client: TestClient,
    measure: Callable[..., Measurement],
    query: dict,
    status: int,
    kind: str,
):
    measure()
    measure(toolchain=NEWER)
    answer = client.get("/v1/compare", params=query)
    assert (answer.status_code, answer.json()["type"]) == (status, f"urn:flce-tune:error:{kind}")
