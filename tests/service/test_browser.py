"""The dashboard in a real browser: Chromium, driven by Playwright; skipped where there is none."""

import contextlib
import dataclasses
import re
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path

import pytest
import uvicorn

from flce_tune import pretuned
from flce_tune.service.app import create_app
from flce_tune.service.pages.formats import problem_slug
from flce_tune.service.pages.progress import STAGES
from flce_tune.service.settings import ServiceSettings
from flce_tune.tuning_db.records import (
    DeviceRecord,
    JobState,
    Measurement,
    Miss,
    ProblemRecord,
    Scope,
    Status,
    Winner,
)
from flce_tune.tuning_db.store import Store

sync_api = pytest.importorskip("playwright.sync_api")
pytestmark = pytest.mark.slow

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
DESKTOP, PHONE = (1280, 900), (390, 844)

H200 = "cuda-nvidia-h200-9.0-132-232448"
LLAMA3 = "16384x4096x128256-bfloat16-train"
RESULT = f"/problems/{LLAMA3}/{H200}"


@pytest.fixture(scope="module")
def browser() -> Iterator[sync_api.Browser]:
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip(f"none of {', '.join(NAMES)} is installed")
    with sync_api.sync_playwright() as playwright:
        # Any name leads here, so that the service can be met under one browsers do not trust.
        rules = "--host-resolver-rules=MAP * 127.0.0.1"
        opened = playwright.chromium.launch(executable_path=found, args=[rules, "--no-sandbox"])
        yield opened
        opened.close()


@dataclasses.dataclass(frozen=True)
class Served:
    port: int
    store: Store

    def url(self, path: str, host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.port}{path}"


@contextlib.contextmanager
def serving(database: Path, **settings) -> Iterator[Served]:
    """A service in a thread, on a port of its own."""
    url = f"sqlite:///{database}"
    with socket.socket() as listening, Store.open(url) as store:
        listening.bind(("127.0.0.1", 0))
        app = create_app(ServiceSettings(database_url=url, poll_seconds=0.1, **settings))
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="on"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.05)
        try:
            yield Served(listening.getsockname()[1], store)
        finally:
            server.should_exit = True
            thread.join()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A service that runs jobs, with results of two GPUs and jobs of every kind."""
    with serving(tmp_path_factory.mktemp("service") / "tuning.sqlite3") as service:
        fill(service.store)
        yield service


def fill(store: Store) -> None:
    for factor, name in ((1.0, "NVIDIA H200"), (0.6, "NVIDIA B200")):
        fronts: dict[tuple[DeviceRecord, ProblemRecord], list[Winner]] = {}
        for winner in pretuned.winners():
            shipped = winner.measurement
            device = dataclasses.replace(shipped.device, name=name)
            time_ms = (shipped.median_ms or 0) * factor
            measured = store.add_measurement(
                dataclasses.replace(shipped, device=device, median_ms=time_ms)
            )
            winner = dataclasses.replace(winner, measurement=measured)
            fronts.setdefault((device, measured.problem), []).append(winner)
        for (device, problem), front in fronts.items():
            store.set_winners(device, problem, front)
    one = next(
        winner.measurement
        for winner in store.winners()
        if winner.measurement.device.name == "NVIDIA H200"
        and problem_slug(winner.measurement.problem) == LLAMA3
    )
    for v_block, d_block in ((64, 64), (64, 128), (128, 64)):
        tile = {"n_block": 128, "v_block": v_block, "d_block": d_block, "num_warps": 8}
        config = {"strategy": "full", "logits": {**tile, "num_stages": 3, "group": 8}}
        store.add_measurement(dataclasses.replace(one, config=config))
    store.add_measurement(failed(one))
    store.note_misses([Miss(one.device, one.problem, 9000, 3, datetime.now(timezone.utc))])
    problems = [{"tokens": 64, "hidden": 32, "vocab": 128}]
    cancelled = store.submit_job({"device": "cpu", "problems": problems})
    store.request_cancel(cancelled.id)
    broken = store.submit_job({"device": "cuda:7", "problems": problems})
    store.claim_job("somebody", 60, ["cuda:7"])
    store.finish_job(broken.id, "somebody", JobState.FAILED, "the GPU fell off the bus")


def failed(measurement: Measurement) -> Measurement:
    return dataclasses.replace(
        measurement,
        config={"strategy": "full"},
        status=Status.OUT_OF_MEMORY,
        median_ms=None,
        spread_ms=None,
        samples_ms=(),
        message="no room",
    )


@pytest.fixture
def visit(browser: sync_api.Browser) -> Iterator[Callable[..., sync_api.Page]]:
    """Open a page; an error on its console fails the test."""
    said: list[str] = []
    contexts = []

    def listen(message: sync_api.ConsoleMessage) -> None:
        if message.type == "error":
            said.append(f"{message.location}: {message.text}")

    def open_page(url: str, size: tuple[int, int] = DESKTOP, **options) -> sync_api.Page:
        context = browser.new_context(viewport={"width": size[0], "height": size[1]}, **options)
        contexts.append(context)
        page = context.new_page()
        page.on("console", listen)
        page.on("pageerror", lambda error: said.append(f"{page.url}: {error}"))
        page.goto(url)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert said == []


def wait_for_charts(page: sync_api.Page) -> None:
    count = page.locator("figure.chart").count()
    sync_api.expect(page.locator("figure.chart[data-drawn]")).to_have_count(count, timeout=30_000)


PAGES = (
    "/",
    "/jobs",
    "/jobs?state=cancelled",
    "/submit",
    "/login",
    f"/devices/{H200}",
    f"/problems/{LLAMA3}",
    f"{RESULT}?limit=1000",
    f"/compare?a={H200}&b=cuda-nvidia-b200-9.0-132-232448",
)


@pytest.mark.parametrize("path", PAGES)
@pytest.mark.parametrize(
    ("size", "scheme"), [(DESKTOP, "light"), (PHONE, "dark")], ids=["desktop", "phone"]
)
def test_a_page_fits_is_accessible_and_has_no_error_on_its_console(
    visit: Callable[..., sync_api.Page], served: Served, path: str, size: tuple, scheme: str
):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    page = visit(served.url(path), size, color_scheme=scheme)
    wait_for_charts(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= size[0]
    results = axe.Axe().run(page)
    assert results.violations_count == 0, results.generate_report()


WRITE_DOWN_WHAT_IT_SAYS = """
    const job = document.querySelector("#job");
    window.said = [];
    const write = () => window.said.push(job.querySelector("[role=status]")?.textContent ?? "");
    const watched = { subtree: true, childList: true, characterData: true };
    new MutationObserver(write).observe(job, watched);
"""


def test_a_job_is_submitted_watched_to_its_end_and_its_best_config_read(
    visit: Callable[..., sync_api.Page], served: Served
):
    page = visit(served.url("/submit"))
    page.get_by_label("Own sizes").check()
    for label, value in (("Hidden size D", "32"), ("Vocabulary V", "128"), ("Tokens N", "64")):
        page.get_by_label(label).fill(value)
    page.get_by_label("Data type").select_option("float32")
    page.get_by_label("Device").fill("cpu")
    page.get_by_label("Quick").check()
    for strategy in ("chunked", "full"):
        page.get_by_label(strategy).check()
    page.get_by_role("button", name="Submit the job").click()
    page.wait_for_url(re.compile(r"/jobs/[0-9a-f-]{36}$"))
    page.evaluate(WRITE_DOWN_WHAT_IT_SAYS)
    status = page.locator("#job").get_by_role("status")
    sync_api.expect(status).to_have_text("succeeded", timeout=120_000)
    said = page.evaluate("window.said")  # gone, had the page been loaded again
    # A stage that is over before the page hears of it is not shown.
    shown = [stage for one in said for stage in STAGES.values() if stage in one]
    assert "measuring configs" in shown, said
    assert shown == sorted(shown, key=[*STAGES.values()].index), said
    sync_api.expect(page.get_by_role("button", name="Cancel this job")).to_have_count(0)
    best = served.store.winners(problem=served.store.problems(cpu(served.store))[0])
    assert best
    shown = page.get_by_role("table", name="Best configs of N = 64").locator("code")
    assert shown.all_inner_texts() == [strategy_of(winner) for winner in best]
    page.get_by_role("link", name="Charts, and this problem on other devices").click()
    page.get_by_role("link", name=cpu(served.store).name).click()
    chosen = page.locator("#chosen").inner_text()
    assert chosen in [strategy_of(winner) for winner in best]
    wait_for_charts(page)


def cpu(store: Store) -> DeviceRecord:
    return next(device for device in store.devices() if device.kind == "cpu")


def strategy_of(winner: Winner) -> str:
    config = dict(winner.measurement.config)
    strategy = config.pop("strategy")
    return " ".join([strategy, *(f"{name}={value}" for name, value in config.items())])


def test_a_running_job_is_cancelled_from_its_page(
    visit: Callable[..., sync_api.Page], served: Served
):
    problems = [{"tokens": 4096, "hidden": 64, "vocab": 4096, "dtype": "float32"}]
    job = served.store.submit_job({"device": "cpu", "problems": problems}, priority=10)
    page = visit(served.url(f"/jobs/{job.id}"))
    status = page.locator("#job").get_by_role("status")
    cancel = page.get_by_role("button", name="Cancel this job")
    cancel.focus()
    last = page.get_by_role("heading", name="Measured last")
    sync_api.expect(last).to_be_visible(timeout=60_000)
    sync_api.expect(page.get_by_role("progressbar")).to_be_visible()
    sync_api.expect(cancel).to_be_focused()  # by what comes live, the keyboard is not moved
    cancel.press("Enter")
    sync_api.expect(status).to_have_text("cancelled", timeout=60_000)


def test_the_charts_are_drawn(visit: Callable[..., sync_api.Page], served: Served):
    page = visit(served.url(RESULT))
    wait_for_charts(page)
    front = page.locator("figure", has=page.locator('[data-chart="front"]'))
    points = front.locator("svg .mark-symbol.role-mark path")
    assert points.count() >= 6  # the winners at least: others only of the newest toolchain
    tiles = page.locator("figure", has=page.locator('[data-chart="tiles"]'))
    assert tiles.locator("svg .mark-rect path").count() >= 4
    sync_api.expect(tiles).to_contain_text("V_BLOCK")
    points.last.hover()
    sync_api.expect(page.locator("#vg-tooltip-element.visible")).to_contain_text("MiB")


def test_the_keyboard_skips_to_the_content(visit: Callable[..., sync_api.Page], served: Served):
    page = visit(served.url("/jobs"))
    page.keyboard.press("Tab")
    skip = page.get_by_role("link", name="Skip to the content")
    sync_api.expect(skip).to_be_focused()
    assert skip.bounding_box()["x"] >= 0
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    sync_api.expect(page.get_by_role("link", name="New job").last).to_be_focused()


def test_without_javascript_the_pages_do_their_work(
    visit: Callable[..., sync_api.Page], served: Served
):
    page = visit(served.url("/submit?preset=gpt2"), java_script_enabled=False)
    page.get_by_label("Device").fill("cuda:9")
    page.get_by_role("button", name="Submit the job").click()
    page.wait_for_url("**/jobs/*")
    served.store.request_cancel(page.url.rsplit("/", 1)[1])
    sync_api.expect(page.get_by_role("status")).to_contain_text(
        re.compile("cancelled|failed"), timeout=30_000
    )  # the page reloads itself
    page.goto(served.url(RESULT))
    hint = page.locator("noscript p")
    sync_api.expect(hint).to_have_text(re.compile("charts need JavaScript"))
    assert hint.bounding_box()["height"] > 0


def test_logging_in_under_a_name_that_browsers_do_not_trust(
    browser: sync_api.Browser, tmp_path: Path
):
    """Plain HTTP from another machine: no Sec-Fetch-Site is sent, and Origin has to do."""
    with serving(tmp_path / "t.sqlite3", private=True, run_jobs=False) as service:
        secret = service.store.create_token("anna", Scope.SUBMIT)
        said: list[str] = []
        context = browser.new_context()
        page = context.new_page()
        page.on("console", lambda message: said.append(f"{message.type}: {message.text}"))
        page.goto(service.url("/jobs?state=failed", "tuner.test"))
        page.get_by_label("Token").fill("flce_wrong")
        page.get_by_role("button", name="Log in").click()
        sync_api.expect(page.get_by_role("alert")).to_contain_text("no valid token")
        page.get_by_label("Token").fill(secret)
        page.get_by_role("button", name="Log in").click()
        page.wait_for_url("**/jobs?state=failed")
        (cookie,) = context.cookies()
        assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Strict")
        page.goto(service.url("/submit", "tuner.test"))
        page.get_by_role("button", name="Submit the job").click()
        page.wait_for_url("**/jobs/*")
        sync_api.expect(page.get_by_role("status")).to_have_text("queued")
        job = page.url
        send_from_elsewhere(context.new_page(), service, f"{job}/cancel")
        assert service.store.job(job.rsplit("/", 1)[1]).state is JobState.QUEUED
        page.get_by_role("button", name="Cancel this job").click()
        sync_api.expect(page.get_by_role("status")).to_have_text("cancelled")
        page.get_by_role("button", name="Log out").click()
        page.wait_for_url("**/login*")
        assert context.cookies() == []
        context.close()
        errors = [text for text in said if text.startswith("error")]
        assert all("401" in error for error in errors)  # of the wrong token


def test_where_nobody_logs_in_other_sites_still_cannot_send_forms(
    browser: sync_api.Browser, served: Served
):
    page = browser.new_page()
    answer = send_from_elsewhere(page, served, served.url("/submit"))
    assert answer.status == 403
    sync_api.expect(page.get_by_text("sent by another site")).to_be_visible()
    page.close()


def send_from_elsewhere(page: sync_api.Page, served: Served, target: str) -> sync_api.Response:
    """Send a form as a page of another site could."""
    page.goto(served.url("/healthz", "evil.test"))
    page.set_content(f'<form method="post" action="{target}"><button>Win a GPU</button></form>')
    with page.expect_navigation() as navigation:
        page.get_by_role("button").click()
    return navigation.value
