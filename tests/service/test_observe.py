"""Metrics, request ids, log lines, headers, and the page that shows the API."""

import json
import logging
import re

import pytest
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families

from flce_tune.errors import StoreUnavailableError
from flce_tune.service.app import create_app
from flce_tune.service.logs import JsonFormatter, request_id
from flce_tune.service.settings import ServiceSettings
from flce_tune.tuning_db.store import Store


def scrape(client: TestClient) -> dict[tuple[str, frozenset], float]:
    answer = client.get("/metrics")
    assert answer.status_code == 200
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


def value(metrics: dict, name: str, **labels: str) -> float:
    return metrics[name, frozenset(labels.items())]


def test_metrics_tell_of_jobs_measurements_and_leases(client, store: Store, measure, job_body):
    empty = scrape(client)
    assert value(empty, "flce_tune_jobs", state="queued") == 0
    assert value(empty, "flce_tune_queue_age_seconds") == 0
    measure()
    for _ in range(2):
        client.post("/v1/jobs", json=job_body)
    store.claim_job("somebody", 60)
    metrics = scrape(client)
    assert value(metrics, "flce_tune_jobs", state="queued") == 1
    assert value(metrics, "flce_tune_jobs", state="running") == 1
    assert value(metrics, "flce_tune_queue_age_seconds") > 0
    assert value(metrics, "flce_tune_measurements") == 1
    assert value(metrics, "flce_tune_lease_losses_total") == 0
    assert value(metrics, "flce_tune_database_up") == 1


def test_latency_is_kept_by_route_and_never_by_path(client: TestClient):
    for number in range(3):
        client.get(f"/v1/jobs/00000000-0000-0000-0000-{number:012}")
        client.get(f"/nowhere/{number}")
    client.request("BREW", "/healthz")
    metrics = scrape(client)
    name = "flce_tune_request_seconds_count"
    assert value(metrics, name, method="GET", route="/v1/jobs/{job_id}", status="404") == 3
    assert value(metrics, name, method="GET", route="other", status="404") == 3
    assert "BREW" not in str(metrics)


def test_metrics_outlive_the_database(client: TestClient, monkeypatch: pytest.MonkeyPatch):
    def away(_store: Store) -> None:
        raise StoreUnavailableError("away")

    monkeypatch.setattr(Store, "count_jobs", away)
    metrics = scrape(client)
    assert value(metrics, "flce_tune_database_up") == 0
    assert not any(name == "flce_tune_jobs" for name, _ in metrics)


def test_a_request_keeps_its_id_or_gets_one(client: TestClient):
    kept = client.get("/healthz", headers={"X-Request-ID": "train-7.step_3"})
    assert kept.headers["x-request-id"] == "train-7.step_3"
    for hostile in ("", "a b", "x" * 129, '"}{', "é".encode()):
        fresh = client.get("/healthz", headers={"X-Request-ID": hostile})
        assert re.fullmatch("[0-9a-f]{32}", fresh.headers["x-request-id"])


@pytest.mark.parametrize("path", ["/", "/docs", "/healthz", "/v1/jobs", "/nowhere", "/static/x"])
def test_every_answer_has_security_headers(client: TestClient, path: str):
    headers = client.get(path).headers
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["x-frame-options"] == "DENY"
    assert headers["referrer-policy"] in ("no-referrer", "same-origin")
    assert "frame-ancestors 'none'" in headers["content-security-policy"]
    assert "default-src 'none'" in headers["content-security-policy"]


@pytest.mark.parametrize(
    ("origin", "sent"),
    [
        ("http://127.0.0.1:8000", True),
        ("http://[::1]:8000", True),
        ("http://localhost", True),
        ("https://tuner.lan", True),
        ("http://tuner.lan:8000", False),
        ("http://localhost.evil.example", False),
    ],
)
def test_the_opener_policy_goes_where_browsers_heed_it(client: TestClient, origin: str, sent: bool):
    headers = client.get(f"{origin}/healthz").headers
    assert ("cross-origin-opener-policy" in headers) is sent


def test_a_defect_is_answered_counted_and_has_its_id(
    settings: ServiceSettings, monkeypatch: pytest.MonkeyPatch
):
    def broken(_store: Store) -> None:
        raise KeyError("secret")

    monkeypatch.setattr(Store, "devices", broken)
    with TestClient(create_app(settings), raise_server_exceptions=False) as client:
        answer = client.get("/v1/devices", headers={"X-Request-ID": "mine"})
        assert (answer.status_code, answer.headers["x-request-id"]) == (500, "mine")
        assert answer.headers["x-content-type-options"] == "nosniff"
        labels = {"method": "GET", "route": "/v1/devices", "status": "500"}
        assert value(scrape(client), "flce_tune_request_seconds_count", **labels) == 1


def test_log_lines_are_json_and_name_the_request(client, caplog: pytest.LogCaptureFixture):
    caplog.handler.setFormatter(JsonFormatter())
    with caplog.at_level(logging.INFO, logger="flce_tune.service"):
        client.get("/v1/jobs?limit=1", headers={"X-Request-ID": "mine"})
    lines = map(json.loads, caplog.text.splitlines())  # threads of other tests may write, too
    (line,) = (line for line in lines if line.get("request_id") == "mine")
    assert (line["message"], line["status"]) == ("GET /v1/jobs", 200)
    assert (line["request_id"], line["level"]) == ("mine", "info")
    assert line["ms"] > 0
    assert request_id.get() is None


def test_a_traceback_stays_on_its_line():
    try:
        raise ValueError("two\nlines")
    except ValueError as error:
        record = logging.makeLogRecord({"msg": "failed", "exc_info": (ValueError, error, None)})
    text = JsonFormatter().format(record)
    assert "\n" not in text
    assert "two\nlines" in json.loads(text)["traceback"]


def test_the_api_page_loads_nothing_from_elsewhere(client: TestClient):
    page = client.get("/docs")
    assert page.status_code == 200
    addresses = re.findall(r'(?:href|src)="([^"]+)"', page.text)
    assert "/static/swagger/swagger-ui-bundle.js" in addresses
    for address in addresses:
        assert client.get(address).status_code == 200
    assert "'unsafe-inline'" not in page.headers["content-security-policy"].split("style-src")[0]
    assert "<script>" not in page.text
