"""Jobs done in a Ray cluster of logical nodes on this machine."""

import time
from collections.abc import Iterator

import pytest

ray = pytest.importorskip("ray", reason="needs ray: pip install 'flce-tune[ray]'")

from ray.cluster_utils import Cluster  # noqa: E402

from flce_tune.service.executors import PlacesAwayError, RayExecutor, RaySite  # noqa: E402
from flce_tune.service.job_process import JobProcess, Outcome  # noqa: E402
from flce_tune.service.queue import StoreQueue  # noqa: E402
from flce_tune.service.runner import JobRunner, new_owner  # noqa: E402
from flce_tune.tuning_db.records import JobState  # noqa: E402
from flce_tune.tuning_db.store import Store  # noqa: E402

pytestmark = pytest.mark.slow

SPEC = {
    "device": "auto",
    "problems": [
        {"tokens": 256, "hidden": 16, "vocab": vocab, "dtype": "float32"} for vocab in (64, 96)
    ],
    "options": {"budget": 2, "strategies": ["full", "chunked"]},
}
LONG = SPEC | {
    "problems": [{"tokens": 4096, "hidden": 16, "vocab": 1024, "dtype": "float32"}],
    "options": {},
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A head that runs nothing and two nodes, which the processes of jobs find by themselves."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        small = {"object_store_memory": 80 << 20}
        head = {"num_cpus": 0, "include_dashboard": False, **small}
        made = Cluster(initialize_head=True, head_node_args=head)
        for _ in range(2):
            made.add_node(num_cpus=1, **small)
        patch.setenv("RAY_ADDRESS", made.address)
        yield made
        made.shutdown()


def test_a_runner_does_a_job_in_the_cluster_and_cancels_another(cluster: Cluster, store: Store):
    executor = RayExecutor(cpu=True)
    assert [record.kind for record in executor.devices().values()] == ["cpu"]
    job = store.submit_job(SPEC)
    long = store.submit_job(LONG)
    queue = StoreQueue(store, new_owner(), 60, executor)
    runner = JobRunner(queue, poll_seconds=0.1, stop_seconds=60)
    runner.start()
    try:
        while not store.job(job.id).state.final:
            assert runner.alive
            time.sleep(0.1)
        assert store.job(job.id).state is JobState.SUCCEEDED, store.job(job.id).message
        while not any(event.kind == "measurement" for event in store.events(long.id)):
            assert not store.job(long.id).state.final
            time.sleep(0.1)
        store.request_cancel(long.id)
        while not store.job(long.id).state.final:
            assert runner.alive
            time.sleep(0.1)
    finally:
        runner.stop()
    assert store.job(long.id).state is JobState.CANCELLED
    events = store.events(job.id)
    places = {event.data["place"] for event in events if event.kind == "winners"}
    assert all("/" in place for place in places), "host and node"
    assert {w.measurement.problem.vocab for w in store.winners()} == {64, 96}


def test_a_cluster_without_the_device_leaves_the_job_to_later(cluster: Cluster, store: Store):
    process = JobProcess(store.url, store.submit_job(SPEC), RaySite(("H200",)))
    while (outcome := process.wait(0.1)) is None:
        pass
    assert isinstance(outcome, Outcome)
    assert outcome.state is None
    assert "no accelerators of type H200" in outcome.message
    with pytest.raises(PlacesAwayError, match="no GPUs"):
        RayExecutor().devices()
