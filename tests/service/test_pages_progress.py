"""How far a job is, from its events."""

import asyncio
from datetime import datetime, timezone

from fastapi.testclient import TestClient

from flce_tune.service.feeds import Feeds
from flce_tune.service.pages.jobs import _job, _panels
from flce_tune.service.pages.progress import LATEST, Progress
from flce_tune.service.pages.session import Viewer
from flce_tune.tuning_db.records import JobEvent, JobState, Scope
from flce_tune.tuning_db.store import Store

PROBLEM = {"tokens": 64, "hidden": 32, "vocab": 128, "dtype": "float32"}
WINNER = {
    "config": {"strategy": "full"},
    "median_ms": 1.5,
    "workspace_bytes": 3 << 20,
    "default_ms": 3.0,
    "eager_ms": None,
}


def events(*changes: tuple[str, dict]) -> list[JobEvent]:
    now = datetime.now(timezone.utc)
    return [JobEvent(i, "job", kind, data, now) for i, (kind, data) in enumerate(changes, 1)]


def test_events_add_up():
    progress = Progress(2)
    assert progress.doing == "problem 1 of 2: starting"
    progress.add(
        events(
            ("state", {"state": "running", "attempt": 1}),
            ("progress", {"problem": PROBLEM, "done": 0, "total": 9}),
            ("progress", {"stage": "measure", "done": 0, "total": 9}),
            *[
                ("measurement", {"done": i, "total": 9, "config": f"c{i}", "status": "ok"})
                for i in range(1, 10)
            ],
            ("measurement", {"status": "out_of_memory", "message": "no"}),
            ("winners", {"winners": [WINNER]}),
            ("progress", {"problem": PROBLEM | {"tokens": 96}, "done": 0, "total": 4}),
            ("unheard of", {"done": 77}),
        )
    )
    assert progress.doing == "problem 2 of 2: starting"
    assert (progress.done, progress.total) == (0, 4)
    assert (progress.measured, progress.failed) == (10, 1)
    assert len(progress.latest) == LATEST
    assert (progress.latest[0].message, progress.latest[1].config) == ("no", "c9")
    assert [front.problem.tokens for front in progress.fronts] == [64]


def test_places_are_told_apart():
    other = PROBLEM | {"tokens": 96}
    progress = Progress(3)
    progress.add(
        events(
            ("progress", {"place": "cuda:0", "problem": PROBLEM, "total": 9}),
            ("progress", {"place": "cuda:1", "problem": other, "total": 4}),
            ("progress", {"place": "cuda:1", "stage": "measure", "total": 4}),
            ("measurement", {"place": "cuda:0", "done": 2, "total": 9, "status": "ok"}),
            ("measurement", {"place": "cuda:1", "done": 4, "total": 4, "status": "ok"}),
            ("winners", {"place": "cuda:0", "winners": [WINNER]}),
            ("winners", {"place": "cuda:1", "winners": [WINNER]}),
        )
    )
    assert [front.problem.tokens for front in progress.fronts] == [64, 96]
    assert (progress.done, progress.total, progress.measured) == (6, 13, 2)
    assert progress.doing == "problem 2 of 3: measuring configs, on 2 devices"


def test_what_a_worker_should_not_have_reported_is_passed_over(client: TestClient, store: Store):
    job = store.submit_job({"device": "cpu", "problems": [PROBLEM]})
    store.claim_job("worker", 60)
    store.add_event(
        job.id, "measurement", {"done": 5, "total": 7, "status": "ok", "config": "good"}
    )
    wrong = [None, "x", -1, 1e300, [1], {"a": None}, "9" * 400]
    for value in wrong:
        for kind in ("progress", "measurement", "winners", "log"):
            store.add_event(job.id, kind, {"problem": value, "status": value, "winners": value})
            store.add_event(job.id, kind, {"status": "ok", "done": value, "total": value})
        store.add_event(job.id, "winners", {"winners": [{"config": value}]})
        store.add_event(job.id, "winners", {"winners": [{"config": {"strategy": value}}]})
        store.add_event(job.id, "winners", {"winners": [{"config": {}, "median_ms": value}]})
    for path in (f"/jobs/{job.id}", "/jobs", "/"):
        assert client.get(path).status_code == 200
    assert "good" in client.get(f"/jobs/{job.id}").text


def test_whoever_takes_over_starts_with_the_first_problem():
    progress = Progress(2)
    progress.add(
        events(
            ("state", {"state": "running", "attempt": 1}),
            ("progress", {"problem": PROBLEM, "done": 0, "total": 9}),
            ("winners", {"winners": [WINNER]}),
            ("progress", {"problem": PROBLEM, "done": 0, "total": 9}),
            ("state", {"state": "running", "attempt": 2}),
        )
    )
    assert (progress.number, progress.fronts, progress.attempts) == (0, [], 2)


def test_the_live_part_follows_the_job_to_its_end(client: TestClient, store: Store):
    job = store.submit_job({"device": "cpu", "problems": [PROBLEM]})

    async def watch() -> list:
        feeds = Feeds(store, 0.01)
        panels = []
        viewer = Viewer(Scope.SUBMIT, open=False)
        async for event in _panels(store, feeds, _job(store, job.id), viewer):
            panels.append(event)
            if len(panels) == 1:
                store.claim_job("worker", 60)
                store.add_event(job.id, "progress", {"stage": "race", "done": 0, "total": 3})
            elif "racing the best third" in event.data and len(panels) < 4:
                store.add_event(job.id, "winners", {"winners": [WINNER]})
                store.finish_job(job.id, "worker", JobState.FAILED, "the GPU fell off the bus")
        return panels

    panels = asyncio.run(asyncio.wait_for(watch(), 30))
    assert "queued" in panels[0].data
    assert "Cancel this job" in panels[0].data
    assert panels[-1].event == "ended"
    last = panels[-2].data
    assert "the GPU fell off the bus" in last
    assert "2.00×" in last
    assert "Cancel this job" not in last
    assert all(panel.event is None for panel in panels[:-1])


def test_the_page_of_a_running_job_connects_and_that_of_an_ended_one_does_not(
    client: TestClient, store: Store
):
    job = store.submit_job({"device": "cpu", "problems": [PROBLEM]})
    assert f'hx-sse:connect="/jobs/{job.id}/live"' in client.get(f"/jobs/{job.id}").text
    store.request_cancel(job.id)
    assert "hx-sse" not in client.get(f"/jobs/{job.id}").text
    with client.stream("GET", f"/jobs/{job.id}/live") as stream:
        lines = list(stream.iter_lines())
    assert "event: ended" in lines
    assert any("cancelled on request" in line for line in lines)
