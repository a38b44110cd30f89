"""What the pages say, without a browser."""

import dataclasses
import html
import json
import re
from collections.abc import Callable
from datetime import datetime, timezone
from urllib.parse import urljoin, urlsplit

import pytest
from fastapi.testclient import TestClient

from flce_tune import pretuned
from flce_tune.errors import StoreUnavailableError
from flce_tune.service.pages import formats, jobs
from flce_tune.tuning_db.records import (
    DeviceRecord,
    JobState,
    Measurement,
    Miss,
    ProblemRecord,
    Status,
    Winner,
)
from flce_tune.tuning_db.store import Store

H200 = DeviceRecord("cuda", "NVIDIA H200", "9.0", 132, 232448, 150_000_000_000)
LLAMA3 = ProblemRecord("train", "bfloat16", "fp32", 4096, 128256, 4096)  # as in conftest.py
H200_PAGE = "/devices/cuda-nvidia-h200-9.0-132-232448"
RESULT = "/problems/4096x4096x128256-bfloat16-train/cuda-nvidia-h200-9.0-132-232448"


def text_of(page: str) -> str:
    """What a reader sees."""
    visible = re.sub(r"<(script|style).*?</\1>", " ", page, flags=re.S)
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", " ", visible)))


SHIPPED = len({winner.measurement.problem for winner in pretuned.winners()})  # problems


def addresses(page: str) -> list[str]:
    return [html.unescape(a) for a in re.findall(r'(?:href|src|connect|hx-get)="([^"]+)"', page)]


def specs(page: str) -> dict[str, dict]:
    """The charts of a page."""
    found = re.findall(
        r'data-chart="(\w+)"></div>\s*<script type="application/json">(.*?)</script>', page, re.S
    )
    return {name: json.loads(spec) for name, spec in found}


def test_an_empty_service_shows_what_ships_and_what_to_do(client: TestClient):
    text = text_of(client.get("/").text)
    assert f"NVIDIA H200 sm_90 132 140 {SHIPPED} ships with the package" in text
    assert "No job yet. Submit one" in text
    assert "Tuned nowhere: llama3-70b" in text
    assert "No job yet" in client.get("/jobs").text
    assert "two are needed" in client.get("/compare").text


def test_the_overview_shows_devices_coverage_misses_jobs_and_the_snippet(
    client: TestClient, store: Store, front: list[Winner], job_body: dict
):
    missed = ProblemRecord("eval", "float16", "fp32", 320, 1000, 96)
    store.note_misses([Miss(H200, missed, 80, 3, datetime.now(timezone.utc))])
    client.post("/v1/jobs", json=job_body)
    page = client.get("/").text
    text = text_of(page)
    # measured here, and shipped
    counts = ("4096", "4096 (weight dtype)", "16384", "16384 (weight dtype)")
    assert f"llama3-8b 4096 128256 {' , '.join(counts)}" in text
    assert f'href="{RESULT}"' in page
    assert "N = 80, D = 320, V = 1000, float16, eval NVIDIA H200 3" in text
    assert "queued 64 × 32 × 128 float32 auto" in text
    assert "export FLCE_TUNE_URL=http://testserver" in text
    (tune,) = [a for a in addresses(page) if "hidden=320" in a]
    form = client.get(tune).text
    assert re.search(r'name="vocab"[^>]*value="1000"', form)
    assert re.search(r'<option value="eval" selected>', form)
    assert re.search(r'value="sizes" id="by-sizes" checked', form)


def test_every_link_leads_to_a_page_and_nothing_comes_from_elsewhere(
    client: TestClient, front: list[Winner], job_body: dict
):
    client.post("/v1/jobs", json=job_body)
    seen, waiting = set(), ["/", "/login"]
    while waiting:
        path = waiting.pop()
        if path in seen or path.endswith("/live"):
            continue
        seen.add(path)
        answer = client.get(path)
        assert answer.status_code == 200, path
        if answer.headers["content-type"].startswith("text/html") and path != "/docs":
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'; script-src 'self'; style-src 'self'" in policy
            assert "unsafe" not in policy
            assert not re.search(r" on\w+=|style=|<script>", answer.text), path
            for address in addresses(answer.text):
                target = urljoin(f"http://testserver{path}", address)
                assert target.startswith("http://testserver/"), (path, address)
                parts = urlsplit(target)
                waiting.append(parts.path + (f"?{parts.query}" if parts.query else ""))
    assert {"/jobs", "/submit", "/compare", H200_PAGE, RESULT, "/static/vega.js"} <= seen


def test_vega_is_sent_once(client: TestClient):
    script = client.get("/static/vega.js")
    assert script.headers["content-type"].startswith("text/javascript")
    assert "vegaEmbed" in script.text
    again = client.get("/static/vega.js", headers={"If-None-Match": script.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_stored_text_cannot_become_markup(
    client: TestClient, store: Store, measure: Callable[..., Measurement]
):
    hostile = "</script><script>alert(1)</script>"
    device = dataclasses.replace(H200, name=hostile)
    measured = measure(device=device, config={"strategy": hostile})
    store.set_winners(device, LLAMA3, [Winner(measured, default_ms=20.0)])
    job = store.submit_job({"device": "cpu", "preset": hostile, "problems": [SMALL]})
    store.claim_job("worker", 60)
    said = {"config": hostile, "message": hostile, "status": hostile}
    store.add_event(job.id, "measurement", said)
    store.add_event(job.id, "winners", {"winners": [{"config": {"strategy": hostile}}]})
    pages = ["/", "/jobs", f"/jobs/{job.id}", "/compare"]
    overview = client.get("/").text
    pages += [a for a in addresses(overview) if a.startswith(("/devices", "/problems"))]
    assert len(pages) > 6
    for path in pages:
        page = client.get(path)
        assert page.status_code == 200
        assert hostile not in page.text
        assert "<script>alert" not in page.text


SMALL = {"tokens": 8, "hidden": 8, "vocab": 8}


@pytest.mark.parametrize(
    ("path", "status", "says"),
    [
        ("/problems/7x7x7-bfloat16-train", 404, "nothing was measured for a problem '7x7x7"),
        ("/problems/7x7x7-bfloat16-train/cuda-nvidia-h200-9.0-132-232448", 404, "nothing was"),
        ("/devices/abacus", 404, "no device 'abacus'; known are: cuda-nvidia-h200"),
        ("/jobs/00000000-0000-4000-8000-000000000000", 404, "there is no job 00000000"),
        ("/jobs/x", 422, "job_id: Input should be a valid UUID"),
        ("/compare?a=x&b=y", 404, "no device 'x'"),
        (f"{RESULT}?limit=-1", 422, "limit"),
    ],
)
def test_an_error_is_a_page_that_says_what_is_wrong(
    client: TestClient, path: str, status: int, says: str
):
    page = client.get(path)
    assert page.status_code == status
    assert says in text_of(page.text)
    assert 'href="/"' in page.text


def test_a_problem_another_device_measured_is_unknown_on_this_one(
    client: TestClient, front: list[Winner], measure: Callable[..., Measurement]
):
    measure(device=dataclasses.replace(H200, name="NVIDIA B200"))
    known = {a.rsplit("/", 1)[1] for a in addresses(client.get("/").text) if "/devices/" in a}
    (other,) = [slug for slug in known if "b200" in slug]
    assert client.get(RESULT).status_code == 200
    assert "no winner yet" in client.get(f"/devices/{other}").text
    page = client.get(RESULT.rsplit("/", 1)[0] + f"/{other}")
    assert "No config has passed yet" in page.text
    assert client.get(f"/problems/16384x4096x128256-bfloat16-train/{other}").status_code == 404


def test_a_database_that_is_away_is_a_page_too(client: TestClient, monkeypatch: pytest.MonkeyPatch):
    def away(self, *args, **kwargs):
        raise StoreUnavailableError("postgresql://user:secret@host is away")

    monkeypatch.setattr(Store, "jobs", away)
    page = client.get("/jobs")
    assert (page.status_code, page.headers["retry-after"]) == (503, "5")
    assert "secret" not in page.text
    assert "the tuning database cannot be used at the moment" in page.text


def test_a_result_shows_winners_and_what_training_gets_within_a_limit(
    client: TestClient, front: list[Winner], measure: Callable[..., Measurement]
):
    measure(config={"strategy": "full"}, status=Status.OUT_OF_MEMORY, median_ms=None,
            spread_ms=None, samples_ms=(), message="no room")  # fmt: skip
    page = client.get(RESULT).text
    text = text_of(page)
    assert "llama3-8b: N ≤ 4096, D = 4096, V = 128256" in text.replace("\u00a0", " ")
    assert "chunked chunk=1024 training gets this 12.50 – 2,289 1.60× 2.00×" in text
    assert "chunked chunk=256 15.00 – 2,098 1.33× 1.67×" in text
    assert "full out of memory 1" in text
    assert "Measured with torch 2.13.0" in text
    assert "workspace_limit" not in text
    limited = text_of(client.get(f"{RESULT}?limit=2100").text)
    assert "chunked chunk=256 training gets this" in limited
    assert "workspace_limit=2100 << 20" in limited


def test_a_winner_comes_with_the_interval_of_its_time(
    client: TestClient, store: Store, measure: Callable[..., Measurement]
):
    timed = measure(samples_ms=(12.4, 12.5, 12.6, 12.75, 12.8, 13.0, 13.25), median_ms=12.75)
    store.set_winners(timed.device, timed.problem, [Winner(timed)])
    text = text_of(client.get(RESULT).text)
    assert "95 % interval, ms" in text
    assert "training gets this 12.75 12.40 to 13.25 2,289" in text


def test_a_result_has_the_charts_its_data_allow(
    client: TestClient, front: list[Winner], measure: Callable[..., Measurement]
):
    assert list(specs(client.get(RESULT).text)) == ["front", "speedup"]
    for v_block in (64, 128):
        tile = {"n_block": 128, "v_block": v_block, "d_block": 64, "num_warps": 8}
        measure(config={"strategy": "full", "logits": {**tile, "num_stages": 3, "group": 8}})
    charts = specs(client.get(RESULT).text)
    assert list(charts) == ["front", "speedup", "tiles"]
    drawn = charts["front"]["layer"][0]["data"]["values"]
    assert len(drawn) == 4
    assert sum(point["winner"] for point in drawn) == 2


def test_a_problem_compares_its_devices(
    client: TestClient, store: Store, front: list[Winner], measure: Callable[..., Measurement]
):
    b200 = dataclasses.replace(H200, name="NVIDIA B200")
    store.set_winners(b200, LLAMA3, [Winner(measure(device=b200, median_ms=6.25))])
    text = text_of(client.get(RESULT.rsplit("/", 1)[0]).text)
    assert text.index("NVIDIA B200 6.25") < text.index("NVIDIA H200 12.50 2,289 2.00× 2,098")
    devices = "a=cuda-nvidia-h200-9.0-132-232448&b=cuda-nvidia-b200-9.0-132-232448"
    page = client.get(f"/compare?{devices}").text
    text = text_of(page)
    assert "1 of 6 problems were tuned on both" not in text  # one of the shipped is the same
    assert re.search(r"1 of \d+ problems were tuned on both.*NVIDIA B200 is 2.00 times", text)
    assert re.search(r"bfloat16, train 12.50 6.25 2.00 the same", text)
    bars = specs(page)["times"]["data"]["values"]
    assert [(bar["side"], bar["ms"]) for bar in bars] == [
        ("NVIDIA H200", 12.5),
        ("NVIDIA B200", 6.25),
    ]


def test_a_device_lists_its_problems_page_by_page(
    client: TestClient, store: Store, measure: Callable[..., Measurement]
):
    for hidden in range(1, 51):
        problem = dataclasses.replace(LLAMA3, hidden=hidden)
        store.set_winners(H200, problem, [Winner(measure(problem=problem))])
    first = client.get(H200_PAGE).text
    assert first.count('data-label="Problem"') == 25
    (following,) = [a for a in addresses(first) if "page=" in a]
    second = client.get(H200_PAGE + following).text
    assert second.count('data-label="Problem"') == 25
    assert "Page 2 of 3" in second
    third = client.get(f"{H200_PAGE}?page=3").text
    assert third.count('data-label="Problem"') == SHIPPED
    assert "This page does not exist" in client.get(f"{H200_PAGE}?page=4").text
    overview = client.get("/").text
    assert overview.count('data-label="Output layer"') == 40
    assert "14 more are on the devices' pages" in text_of(overview)


def test_jobs_are_listed_page_by_page_and_by_state(
    client: TestClient, store: Store, job_body: dict
):
    ids = [store.submit_job({"device": "cpu", **job_body}).id for _ in range(jobs.PER_PAGE + 2)]
    store.claim_job("worker", 60)
    store.finish_job(ids[0], "worker", JobState.FAILED, "no such GPU")
    store.claim_job("worker", 60)
    store.add_event(ids[1], "measurement", {"status": "ok", "done": 3, "total": 7})
    first = client.get("/jobs").text
    assert first.count('data-label="State"') == jobs.PER_PAGE
    (older,) = [a for a in addresses(first) if "before=" in a]
    second = text_of(client.get(older).text)
    assert "failed 64 × 32 × 128 float32" in second
    assert "no such GPU" in second
    assert "3 of 7" in second
    only = client.get("/jobs?state=failed").text
    assert only.count('data-label="State"') == 1
    assert "No such job" in client.get("/jobs?state=cancelled").text


def test_names_of_problems_in_addresses_tell_all_apart():
    other = [
        dataclasses.replace(LLAMA3, mode="eval"),
        dataclasses.replace(LLAMA3, dtype="float16"),
        dataclasses.replace(LLAMA3, accumulate="weight_dtype"),
        dataclasses.replace(LLAMA3, features=("bias",)),
        dataclasses.replace(LLAMA3, features=("bias", "softcap")),
        dataclasses.replace(LLAMA3, token_bucket=8192),
    ]
    for name in (formats.problem_slug, formats.problem_label):
        assert len({name(problem) for problem in [LLAMA3, *other]}) == len(other) + 1


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (0, "0"), (300_000, "0.29"), (5 << 20, "5"), (123_456_789_012, "117,738")],
)
def test_sizes_are_written_for_readers(value: int | None, text: str):
    assert formats.mib(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (0.01234, "0.012"), (1.005, "1.00"), (61.34, "61.34"), (16094.0, "16,094.0")],
)
def test_times_are_written_for_readers(value: float | None, text: str):
    assert formats.ms(value) == text
