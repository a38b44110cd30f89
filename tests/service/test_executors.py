"""Jobs done on several places of this machine."""

import os
import signal
from collections import Counter

import pytest
from many_cpus import ManyCpus

from flce_tune.errors import SweepError
from flce_tune.service import executors
from flce_tune.service.devices import local_devices
from flce_tune.service.executors import LocalExecutor, LocalSite, RayExecutor, RaySite, meant
from flce_tune.service.job_process import JobProcess, Outcome
from flce_tune.tuning_db.records import DeviceRecord, JobState
from flce_tune.tuning_db.store import Store

H200 = DeviceRecord("cuda", "NVIDIA H200", "9.0", 132, 232448, 150_000_000_000)
L4 = DeviceRecord("cuda", "NVIDIA L4", "8.9", 58, 101376, 23_000_000_000)
CPU = DeviceRecord("cpu", "some CPU", "", 8, 0)
MIXED = {"cuda:0": H200, "cuda:1": L4, "cuda:2": H200, "cpu": CPU}

PAIR = ManyCpus(("left", "right"))
SPEC = {
    "device": "cpu",
    "problems": [
        {"tokens": 256, "hidden": 16, "vocab": vocab, "dtype": "float32"} for vocab in (64, 96, 128)
    ],
    "options": {"budget": 3, "strategies": ["chunked", "full"]},
}
LONG = SPEC | {
    "problems": [
        {"tokens": 4096, "hidden": 16, "vocab": vocab, "dtype": "float32"} for vocab in (1024, 1536)
    ],
    "options": {},
}


@pytest.mark.parametrize(
    ("wanted", "names"),
    [
        ("auto", ["cuda:0", "cuda:2"]),
        ("cuda", ["cuda:0", "cuda:2"]),
        ("cuda:2", ["cuda:2"]),
        ("sm_89", ["cuda:1"]),
        ("cuda-nvidia-h200-9.0-132-232448", ["cuda:0", "cuda:2"]),
        ("cpu", ["cpu"]),
    ],
)
def test_a_job_gets_all_devices_like_the_first_it_means(
    monkeypatch: pytest.MonkeyPatch, wanted: str, names: list[str]
):
    monkeypatch.setattr(executors, "local_devices", lambda: MIXED)
    assert LocalExecutor().site(wanted) == LocalSite(tuple(names))
    assert wanted in LocalExecutor().selectors()


def test_only_devices_that_were_named_are_used(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(executors, "local_devices", lambda: MIXED)
    some = LocalExecutor(("cuda:1", "cuda:2"))
    assert some.site("auto") == LocalSite(("cuda:1",))
    assert {"cpu", "cuda:0"}.isdisjoint(some.selectors())
    with pytest.raises(SweepError, match="no device cpu here; there are cuda:1, cuda:2"):
        some.site("cpu")


def test_a_site_has_no_more_places_than_problems():
    with LocalSite(("cpu",)).places(4) as places:
        assert [place.name for place in places] == ["cpu"]
    with ManyCpus(("a", "b", "c")).places(2) as places:
        assert [place.name for place in places] == ["a", "b"]


def test_a_ray_cluster_offers_no_names_of_its_own(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(executors, "_ray_devices", lambda _: {"H200": H200, "L4": L4})
    offered = RayExecutor().selectors()
    assert {"auto", "cuda", "sm_90", "sm_89"} < set(offered)
    assert {"H200", "L4", "cpu"}.isdisjoint(offered)
    assert RayExecutor().site("sm_89") == RaySite(("L4",))
    assert list(meant("auto", RayExecutor().devices())) == ["H200"]


def end_of(process: JobProcess) -> Outcome:
    while (outcome := process.wait(0.1)) is None:
        pass
    return outcome


def measured(store: Store, job: str) -> list[dict]:
    return [event.data for event in store.events(job) if event.kind == "measurement"]


@pytest.mark.slow
def test_each_problem_of_a_job_goes_to_a_free_place(store: Store):
    job = store.submit_job(SPEC)
    assert end_of(JobProcess(store.url, job, PAIR)) == Outcome(JobState.SUCCEEDED)
    events = store.events(job.id)
    began = {
        event.data["problem"]["vocab"]: event.data["place"]
        for event in events
        if event.kind == "progress" and "problem" in event.data
    }
    assert began.keys() == {64, 96, 128}
    assert set(began.values()) == {"left", "right"}
    won = [event.data["place"] for event in events if event.kind == "winners"]
    assert Counter(won) == Counter(began.values())
    assert {w.measurement.problem.vocab for w in store.winners()} == {64, 96, 128}


@pytest.mark.slow
def test_a_job_on_several_places_stops_when_told_and_goes_on_where_it_was(store: Store):
    job = store.submit_job(LONG)
    process = JobProcess(store.url, job, PAIR)
    while len({data["place"] for data in measured(store, job.id)}) < 2:
        assert process.wait(0.1) is None
    process.stop(grace_seconds=60)
    assert end_of(process) == Outcome(None)

    process = JobProcess(store.url, job, PAIR)
    seen = len(measured(store, job.id))
    while len(measured(store, job.id)) == seen:
        assert process.wait(0.1) is None
    os.killpg(process.pid, signal.SIGKILL)
    end_of(process)
    # Several were measuring when killed; none of what they had stored was measured again.
    rows = store.measurements()
    once = Counter((m.problem, str(m.config), len(m.samples_ms) > 1) for m in rows)
    assert set(once.values()) == {1}


def test_this_machine_is_what_a_service_uses_by_default(store: Store):
    assert LocalExecutor().devices() == local_devices()
