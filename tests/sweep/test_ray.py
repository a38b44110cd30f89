"""Sweeps in a Ray cluster of several logical nodes on this machine."""

import dataclasses
import time
from collections import Counter
from pathlib import Path

import pytest

ray = pytest.importorskip("ray", reason="needs ray: pip install 'flce-tune[ray]'")

from ray.cluster_utils import Cluster  # noqa: E402

from flce_tune.dispatch.convert import config_of  # noqa: E402
from flce_tune.errors import SweepError  # noqa: E402
from flce_tune.sweep.events import SweepEvents, SweepOptions  # noqa: E402
from flce_tune.sweep.ray_cluster import ray_places, wanted_cpus, wanted_gpus  # noqa: E402
from flce_tune.sweep.ray_places import RayPlace, Wanted  # noqa: E402
from flce_tune.sweep.sweep import sweep  # noqa: E402
from flce_tune.sweep.worker import StoppedError  # noqa: E402

NODE = {"num_cpus": 1, "object_store_memory": 80 << 20}


@pytest.fixture(scope="module")
def cluster():
    """A head that runs nothing, to which nodes can be added."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent / "support"))  # of the nodes
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        head = {"num_cpus": 0, "object_store_memory": 80 << 20, "include_dashboard": False}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        ray.init(cluster.address, log_to_driver=False)
        yield cluster
        ray.shutdown()
        cluster.shutdown()


class Killer(SweepEvents):
    """Kills a node once its place has measured something."""

    def __init__(self, cluster, node, name, log, place=None):
        self.cluster, self.node, self.name, self.log, self.place = cluster, node, name, log, place

    def at(self, place):
        return Killer(self.cluster, self.node, self.name, self.log, place)

    def on_measurement(self, measurement, done, total):
        self.log.append((self.place, measurement.problem.hidden))
        time.sleep(0.02)
        if self.place == self.name and len([p for p, _ in self.log if p == self.name]) == 3:
            self.cluster.remove_node(self.node, allow_graceful=False)
            # Until the cluster knows, the place may go on and finish the problem.
            while any(n["Alive"] and n["NodeID"] == self.node.node_id for n in ray.nodes()):
                time.sleep(0.05)

    def on_place_lost(self, place, reason, dropped):
        self.log.append((place, "lost"))


def test_a_lost_node_costs_its_running_problem_and_nothing_that_was_measured(
    cluster, planted, store, problem
):
    cluster.add_node(**NODE)
    doomed = cluster.add_node(**NODE)
    problems = [dataclasses.replace(problem, hidden=hidden) for hidden in (16, 24, 32, 40)]
    log = []
    with ray_places(len(problems), cpu=True) as places:
        assert len(places) == 2
        name = next(p.name for p in places if p.name.endswith(doomed.node_id[:6]))
        report = sweep(
            problems,
            store,
            places,
            SweepOptions(),
            events=Killer(cluster, doomed, name, log),
            make_bench=planted.Impatient,
        )
    assert [r.problem for r in report.problems if r.winners] == problems
    # Twice, and then it is left alone; once, if no problem was left to try it with.
    assert log.count((name, "lost")) in (1, 2)
    began = log[[p for p, _ in log].index(name)][1]
    assert {p for p, hidden in log if hidden == began} == {name, *(p.name for p in places)}
    first = Counter((m.problem, config_of(m)) for m in store.measurements() if not m.samples_ms[1:])
    assert set(first.values()) == {1}, "what the lost node had measured was not measured again"


def test_faults_of_candidates_are_those_of_a_local_worker(cluster, planted, store, problem):
    """On a node that Ray picks by its accelerator type."""
    cluster.add_node(**NODE, num_gpus=1, resources={"accelerator_type:FAKE": 1})
    fake = {"num_gpus": 1, "num_cpus": 1, "accelerator_type": "FAKE"}
    place = RayPlace(Wanted("FAKE 1", "FAKE", "cpu", fake))
    place.open(lambda: False)
    try:
        runner = place.runner(planted.Puppet, problem, 0)
        for order, said in [
            (("refuse",), "error: ValueError: no"),
            (("quit", 7), "crash: the worker exited with code 7"),
            (("segfault",), "crash: the worker was killed by SIGSEGV"),
        ]:
            with pytest.raises(Exception, match=said):
                runner.call("time", *order, timeout_s=60)
        assert runner.call("time", "environment", "CUDA_VISIBLE_DEVICES", timeout_s=60) == "0"
        with pytest.raises(StoppedError):
            place.runner(planted.Puppet, problem, 0, lambda: True).call(
                "time", "hang", timeout_s=60
            )
        with pytest.raises(SweepError, match="the inputs do not fit"):
            place.runner(planted.Unable, problem, 0).call("time", timeout_s=60)
        assert place.compilers() >= 1
        compiler = place.compiler(planted.Puppet, problem)
        assert compiler.call("time", "environment", "CUDA_VISIBLE_DEVICES", timeout_s=60) == "-1"
    finally:
        place.close()


HOST = {"NodeManagerHostname": "host", "Alive": True}
H200 = {
    **HOST,
    "NodeID": "a" * 56,
    "Resources": {"CPU": 64.0, "GPU": 2.0, "accelerator_type:H200": 1.0},
}
L4 = {
    **HOST,
    "NodeID": "b" * 56,
    "Resources": {"CPU": 16.0, "GPU": 1.0, "accelerator_type:L4": 1.0},
}
HEAD = {**HOST, "NodeID": "c" * 56, "Resources": {"node:1": 1.0}}


def test_gpus_are_wanted_by_type():
    wanted = wanted_gpus([HEAD, H200, L4, H200], [])
    assert [one.name for one in wanted] == ["H200 1", "H200 2", "H200 3", "H200 4", "L4 1"]
    assert wanted[0].options == {"num_gpus": 1, "num_cpus": 1, "accelerator_type": "H200"}
    assert [one.name for one in wanted_gpus([H200, L4], ["L4"])] == ["L4 1"]
    with pytest.raises(SweepError, match=r"no accelerators of type B200; it has 2 × H200, 1 × L4"):
        wanted_gpus([H200, L4], ["B200"])
    with pytest.raises(SweepError, match="no GPUs; --device cpu"):
        wanted_gpus([HEAD], [])


def test_cpus_are_wanted_node_by_node():
    (one, two) = wanted_cpus([HEAD, H200, L4])
    assert (one.name, one.device, one.options["num_cpus"]) == ("host/aaaaaa", "cpu", 64)
    assert two.name == "host/bbbbbb"
