"""Takes the pictures of docs/dashboard.md: ``.venv/bin/python scripts/screenshots.py [EXPORT...]``.

They show what ships with the package (or the exports, of ``flce-tune export``) and a sweep of this
machine's CPU that is run for them. Needs Chromium and Playwright.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, Page, expect, sync_playwright

ROOT = Path(__file__).resolve().parents[1]
SHIPPED = ROOT / "flce_tune" / "pretuned" / "nvidia-h200.json"
TARGET = ROOT / "docs" / "images"
COMMAND = Path(sys.executable).with_name("flce-tune")
PORT = 8765
BASE = f"http://127.0.0.1:{PORT}"

DESKTOP, PHONE = (1100, 760), (390, 844)
RESULT = "/problems/16384x4096x128256-bfloat16-train/cuda-nvidia-h200-9.0-132-232448"


def main(exports: list[str]) -> None:
    """Fill a database, serve it, take the pictures."""
    TARGET.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        environment = os.environ | {"FLCE_TUNE_DB": f"{folder}/tuning.sqlite3"}
        for export in exports or [str(SHIPPED)]:
            subprocess.run([COMMAND, "import", export], env=environment, check=True)
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"))
        with serving(environment):
            pictures(browser)
        browser.close()


@contextlib.contextmanager
def serving(environment: dict[str, str]) -> Iterator[None]:
    """Run the service."""
    service = subprocess.Popen([COMMAND, "serve", "--port", str(PORT)], env=environment)
    try:
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{BASE}/readyz")
                break
            time.sleep(0.2)
        yield
    finally:
        service.terminate()
        service.wait()


def pictures(browser: Browser) -> None:
    """Submit a job, then show it and the other pages."""
    page = open_page(browser, DESKTOP)
    submit(page, "sm_100", "llama3-8b")  # waits for a machine that has one
    submit(page, "cpu", "demo")
    expect(page.get_by_role("heading", name="Measured last")).to_be_visible(timeout=300_000)
    expect(page.locator("#job tbody tr")).to_have_count(3, timeout=300_000)
    take(page, "job")
    expect(status(page)).to_have_text("succeeded", timeout=1_200_000)
    for name, path in (("overview", "/"), ("result", RESULT)):
        page.goto(BASE + path)
        take(page, name)
    phone = open_page(browser, PHONE, color_scheme="dark", device_scale_factor=2)
    phone.goto(BASE)
    take(phone, "phone", full_page=False)


def open_page(browser: Browser, size: tuple[int, int], **options: object) -> Page:
    """A page of the given size."""
    viewport = {"width": size[0], "height": size[1]}
    return browser.new_context(viewport=viewport, **options).new_page()


def submit(page: Page, device: str, preset: str) -> None:
    """Submit a job with the form."""
    page.goto(f"{BASE}/submit?preset={preset}")
    page.get_by_label("Device").fill(device)
    page.get_by_label("Quick").check()
    page.get_by_role("button", name="Submit the job").click()
    page.wait_for_url(re.compile("/jobs/"))


def status(page: Page):  # noqa: ANN201
    """The state of the job on its page."""
    return page.locator("#job").get_by_role("status")


def take(page: Page, name: str, *, full_page: bool = True) -> None:
    """Write a picture, with the charts drawn."""
    charts = page.locator("figure.chart").count()
    expect(page.locator("figure.chart[data-drawn]")).to_have_count(charts, timeout=60_000)
    path = TARGET / f"dashboard-{name}.png"
    page.screenshot(path=path, full_page=full_page)
    few = Image.open(path).convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE, dither=0)
    few.save(path, optimize=True)  # a third of the size


if __name__ == "__main__":
    main(sys.argv[1:])
