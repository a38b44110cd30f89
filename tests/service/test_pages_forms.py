"""What the forms do, and for whom."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from fastapi.testclient import TestClient

from flce_tune.service.app import create_app
from flce_tune.service.pages.session import COOKIE
from flce_tune.service.settings import ServiceSettings
from flce_tune.tuning_db.records import JobState, Scope
from flce_tune.tuning_db.store import Store

SIZES = {
    "source": "sizes", "hidden": "32", "vocab": "128", "tokens": "64, 96", "dtype": "float32",
    "device": "cpu", "preset": "llama3-8b", "strategies": ["full", "chunked"], "budget": "9",
    "time_limit_s": "45.5", "quick": "1", "priority": "-1", "key": "abc",
}  # fmt: skip


@pytest.fixture
def browser(settings: ServiceSettings, store: Store) -> Iterator[TestClient]:
    """Does not follow redirects."""
    with TestClient(create_app(settings), follow_redirects=False) as opened:
        yield opened


@pytest.fixture
def private(settings: ServiceSettings, store: Store) -> Iterator[TestClient]:
    app = create_app(replace(settings, private=True, max_refused_tokens=3))
    with TestClient(app, follow_redirects=False) as opened:
        yield opened


def log_in(client: TestClient, token: str, after: str = "/"):
    return client.post("/login", data={"token": token, "after": after})


def test_own_sizes_become_a_job(browser: TestClient, store: Store):
    answer = browser.post("/submit", data=SIZES)
    assert answer.status_code == 303
    (job,) = store.jobs()
    assert answer.headers["location"] == f"/jobs/{job.id}"
    assert job.priority == -1
    assert job.spec["device"] == "cpu"
    assert job.spec["preset"] is None
    sizes = [(p["tokens"], p["hidden"], p["vocab"], p["dtype"]) for p in job.spec["problems"]]
    assert sizes == [(64, 32, 128, "float32"), (96, 32, 128, "float32")]
    options = job.spec["options"]
    assert (options["budget"], options["time_limit_s"], options["quick"]) == (9, 45.5, True)
    assert "45.5 s a problem" in browser.get(f"/jobs/{job.id}").text
    assert options["strategies"] == ["full", "chunked"]


def test_a_form_sent_twice_makes_one_job_unless_it_was_changed(browser: TestClient, store: Store):
    answers = [browser.post("/submit", data=SIZES).headers["location"] for _ in range(2)]
    assert answers[0] == answers[1]
    assert len(store.jobs()) == 1
    assert browser.post("/submit", data=SIZES | {"tokens": "32"}).status_code == 303
    assert len(store.jobs()) == 2
    assert browser.post("/submit", data=SIZES | {"key": "x" * 10_000}).status_code == 303


def test_a_known_model_becomes_a_job_with_its_own_token_counts(browser: TestClient, store: Store):
    browser.post("/submit", data={"source": "preset", "preset": "demo", "hidden": "7"})
    (job,) = store.jobs()
    assert job.spec["preset"] == "demo"
    assert [(p["tokens"], p["dtype"]) for p in job.spec["problems"]] == [(1024, "float32")]
    assert (job.spec["device"], job.spec["options"]["budget"]) == ("auto", None)
    assert job.spec["options"]["time_limit_s"] is None


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"hidden": "many"}, "hidden"),
        ({"tokens": "64, -1"}, "tokens"),
        ({"tokens": ""}, "tokens"),
        ({"device": "/etc/passwd"}, "device"),
        ({"budget": "0"}, "budget"),
        ({"time_limit_s": "0"}, "time_limit_s"),
        ({"time_limit_s": "inf"}, "time_limit_s"),
        ({"strategies": ["magic"]}, ""),
        ({"priority": "1e9"}, "priority"),
        ({"source": "preset", "preset": "gpt-9"}, "preset"),
    ],
)
def test_a_wrong_value_is_shown_with_its_field_and_the_rest_is_kept(
    browser: TestClient, store: Store, changes: dict, field: str
):
    answer = browser.post("/submit", data=SIZES | changes)
    assert answer.status_code in (404, 422)
    assert 'role="alert"' in answer.text
    assert f'<a href="#{field}">' in answer.text or not field
    assert 'value="9"' in answer.text or "budget" in changes
    assert store.jobs() == []


def test_cancelling_shows_the_cancelled_job(browser: TestClient, store: Store, job_body: dict):
    job = store.submit_job({"device": "cpu", **job_body})
    assert "Cancel this job" in browser.get(f"/jobs/{job.id}").text
    answer = browser.post(f"/jobs/{job.id}/cancel")
    assert (answer.status_code, answer.headers["location"]) == (303, f"/jobs/{job.id}")
    assert store.job(job.id).state is JobState.CANCELLED
    page = browser.get(f"/jobs/{job.id}").text
    assert "Cancel this job" not in page
    assert "cancelled on request" in page


def test_a_job_that_has_ended_is_not_cancelled(browser: TestClient, store: Store, job_body: dict):
    job = store.submit_job({"device": "cpu", **job_body})
    store.claim_job("worker", 60)
    store.finish_job(job.id, "worker", JobState.SUCCEEDED)
    answer = browser.post(f"/jobs/{job.id}/cancel")
    assert answer.status_code == 409
    assert "has already succeeded" in answer.text


@pytest.mark.parametrize(
    ("headers", "taken"),
    [
        ({}, True),  # no browser
        ({"Origin": "http://testserver"}, True),
        ({"Origin": "http://testserver", "Sec-Fetch-Site": "same-origin"}, True),
        ({"Origin": "http://tuner.lan", "Sec-Fetch-Site": "same-origin"}, True),  # a proxy
        ({"Origin": "http://evil.example"}, False),
        ({"Origin": "http://testserver.evil.example"}, False),
        ({"Origin": "null"}, False),
        ({"Origin": "http://[::1"}, False),
        ({"Origin": "http://testserver", "Sec-Fetch-Site": "cross-site"}, False),
        ({"Sec-Fetch-Site": "same-site"}, False),
    ],
)
@pytest.mark.parametrize("path", ["/submit", "cancel", "/login", "/logout"])
def test_other_sites_cannot_send_our_forms(
    browser: TestClient, store: Store, job_body: dict, path: str, headers: dict, taken: bool
):
    job = store.submit_job({"device": "cpu", **job_body})
    target = f"/jobs/{job.id}/cancel" if path == "cancel" else path
    answer = browser.post(target, data=SIZES, headers=headers)
    assert answer.status_code == (303 if taken else 403)
    if not taken:
        assert [job.state for job in store.jobs()] == [JobState.QUEUED]
        assert "set-cookie" not in answer.headers


def test_with_tokens_a_stranger_reads_and_is_asked_to_log_in_before_writing(
    browser: TestClient, store: Store, job_body: dict
):
    secret = store.create_token("anna", Scope.SUBMIT)
    job = store.submit_job({"device": "cpu", **job_body})
    page = browser.get(f"/jobs/{job.id}").text
    assert "Log in" in page
    assert "Cancel this job" not in page
    assert browser.post("/submit", data=SIZES).headers["location"] == "/login?after=%2F"
    assert browser.post(f"/jobs/{job.id}/cancel").headers["location"].startswith("/login")
    assert "log in</a> first" in browser.get("/submit").text
    answer = log_in(browser, secret, "/submit")
    assert (answer.status_code, answer.headers["location"]) == (303, "/submit")
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert "max-age" not in cookie
    assert "Scope: submit" in browser.get("/").text
    assert browser.post("/submit", data=SIZES).headers["location"].startswith("/jobs/")
    denied = browser.post("/submit", data=SIZES | {"priority": "1", "key": ""})
    assert denied.status_code == 403
    assert "needs a token of scope" in denied.text.replace("&#39;", "'")
    browser.post("/logout")
    assert COOKIE not in browser.cookies
    assert "Log in" in browser.get("/").text


def test_a_token_for_reading_submits_nothing(browser: TestClient, store: Store):
    log_in(browser, store.create_token("eve", Scope.READ))
    answer = browser.post("/submit", data=SIZES)
    assert answer.status_code == 403
    assert store.jobs() == []


def test_a_private_service_shows_its_pages_after_logging_in(private: TestClient, store: Store):
    secret = store.create_token("anna", Scope.READ)
    answer = private.get("/jobs?state=failed")
    assert answer.status_code == 303
    assert answer.headers["location"] == "/login?after=%2Fjobs%3Fstate%3Dfailed"
    for path in ("/", "/submit", "/compare", "/devices/x", "/problems/x", "/problems/x/y"):
        assert private.get(path).headers["location"].startswith("/login"), path
    assert private.get("/static/style.css").status_code == 200
    login = private.get(answer.headers["location"]).text
    assert 'name="after" value="/jobs?state=failed"' in login
    assert log_in(private, secret, "/jobs?state=failed").headers["location"] == "/jobs?state=failed"
    assert private.get("/jobs").status_code == 200
    other = TestClient(private.app, follow_redirects=False)
    assert other.get("/", headers={"Authorization": f"Bearer {secret}"}).status_code == 200


def test_a_cookie_without_worth_is_dropped_and_counts_once(private: TestClient, store: Store):
    secret = store.create_token("anna", Scope.READ)
    log_in(private, secret)
    assert private.get("/").status_code == 200
    store.revoke_token("anna")
    private.app.state.gate._read_at = None  # sooner than in a second
    for _ in range(10):
        assert private.get("/").status_code == 303
    assert COOKIE not in private.cookies
    other = store.create_token("bob", Scope.READ)
    private.app.state.gate._read_at = None
    assert log_in(private, other).status_code == 303


def test_who_has_to_wait_stays_logged_in(private: TestClient, store: Store):
    log_in(private, store.create_token("anna", Scope.READ))
    stranger = TestClient(private.app)
    assert [log_in(stranger, "wrong").status_code for _ in range(3)] == [401, 401, 401]
    assert private.get("/").status_code == 303
    assert COOKIE in private.cookies


def test_guessing_tokens_ends_in_429(private: TestClient, store: Store):
    store.create_token("anna", Scope.READ)
    assert [log_in(private, "wrong").status_code for _ in range(4)] == [401, 401, 401, 429]
    assert "no valid token" in log_in(TestClient(private.app, client=("192.0.2.7", 1)), "no").text


@pytest.mark.parametrize(
    "after", ["//evil.example", "https://evil.example", "/\\evil.example", "/\nx", "", "x"]
)
def test_logging_in_leads_nowhere_else(private: TestClient, store: Store, after: str):
    secret = store.create_token("anna", Scope.READ)
    assert log_in(private, secret, after).headers["location"] == "/"
