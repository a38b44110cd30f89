import dataclasses
import re
from collections.abc import Callable

import pytest
from fastapi.testclient import TestClient

from flce_tune.service.routes.dashboard import format_bytes, format_ms
from flce_tune.tuning_db.records import Measurement, Winner
from flce_tune.tuning_db.store import Store


def test_an_empty_page_says_what_to_do(client: TestClient):
    page = client.get("/")
    assert page.status_code == 200
    assert "POST /v1/jobs" in page.text
    assert "Nothing was measured yet" in page.text


def test_the_page_shows_devices_winners_and_jobs(
    client: TestClient, front: list[Winner], job_body: dict
):
    job = client.post("/v1/jobs", json=job_body).json()
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", client.get("/").text))
    assert "NVIDIA H200: N ≤ 4096, D = 4096, V = 128256" in text
    assert "chunked chunk=1024 12.5 ms 2.4 GB 1.60× 2.00×" in text
    assert "queued 64 × 32 × 128 float32 auto" in text
    assert job["id"][:8] in text


def test_stored_text_cannot_become_markup(
    client: TestClient, store: Store, measure: Callable[..., Measurement]
):
    hostile = "<script>alert(1)</script>"
    measured = measure(device=dataclasses.replace(measure().device, name=hostile))
    store.set_winners(measured.device, measured.problem, [Winner(measured)])
    store.submit_job({"device": "cpu", "preset": hostile, "problems": [SMALL]})
    page = client.get("/").text
    assert hostile not in page
    assert page.count("&lt;script&gt;") >= 2


SMALL = {"tokens": 8, "hidden": 8, "vocab": 8}


def test_the_page_loads_nothing_from_elsewhere(client: TestClient, front: list[Winner]):
    page = client.get("/")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    for address in re.findall(r'(?:href|src)="([^"]+)"', page.text):
        assert address.startswith(("/", "#"))
        if address.startswith("/static/"):
            assert client.get(address).status_code == 200


@pytest.mark.parametrize(
    ("count", "text"),
    [(None, "–"), (0, "0 B"), (999, "999 B"), (5_040_000_000, "5.04 GB"), (2 * 10**16, "2e+04 TB")],
)
def test_sizes_are_written_for_readers(count: int | None, text: str):
    assert format_bytes(count) == text


def test_times_are_written_for_readers():
    assert (format_ms(None), format_ms(61.34)) == ("–", "61.3 ms")
