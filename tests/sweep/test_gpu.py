import dataclasses

import pytest
import torch

from flce_tune.dispatch.convert import config_of
from flce_tune.kernels import strategies
from flce_tune.kernels.problem import Problem
from flce_tune.sweep.events import SweepEvents, SweepOptions
from flce_tune.sweep.measure import OpBench
from flce_tune.sweep.places import LocalPlace, _uuid, local_places, works
from flce_tune.sweep.sweep import sweep
from flce_tune.tuning_db.records import Status

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
PROBLEM = Problem(tokens=2048, hidden=512, vocab=16384)


@pytest.fixture
def gpu():
    return torch.device("cuda", 0)


@pytest.mark.slow
def test_a_sweep_on_a_gpu_compiles_ahead_and_beats_or_keeps_the_default(store, gpu):
    class Stages(SweepEvents):
        def __init__(self):
            self.seen = []

        def on_stage(self, stage, total):
            self.seen.append(stage)

    events = Stages()
    report = sweep([PROBLEM], store, gpu, SweepOptions(quick=True), events=events)
    assert events.seen == ["compile", "measure", "race", "final"]
    ok = store.measurements(status=Status.OK)
    assert all(m.workspace_bytes is not None for m in ok)
    tiled = [m for m in ok if config_of(m).logits]
    assert all(m.registers and m.shared_memory is not None for m in tiled)
    (result,) = report.problems
    assert result.best_ms <= result.default_ms * 1.01
    assert result.eager_ms > 0


@pytest.mark.slow
def test_what_was_compiled_ahead_is_not_compiled_again(gpu, tmp_path, monkeypatch):
    """Processes without a GPU leave all that the measuring one asks Triton for."""
    from flce_tune.kernels.problem import describe_device
    from flce_tune.sweep.candidates import Search
    from flce_tune.sweep.measure import OpBench
    from flce_tune.sweep.places import LocalPlace
    from flce_tune.sweep.precompile import Precompiler
    from flce_tune.sweep.worker import Worker

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    problem = Problem(tokens=8192, hidden=1024, vocab=100_000)
    search = Search(problem, describe_device(gpu), SweepOptions(quick=True), [])
    cover = search.tiled()
    compiler = Precompiler(cover, problem, LocalPlace(gpu), OpBench, timeout_s=120)
    compiler.join()
    failed = compiler.failures()
    ahead = set(tmp_path.rglob("*.cubin"))
    worker = Worker(OpBench, problem, gpu, 0)
    try:
        for config in (c for c in cover if c not in failed):
            worker.call("trial", config, timeout_s=120)
            worker.call("check_ragged", config, timeout_s=120)
    finally:
        worker.close()
    again = [path.name for path in set(tmp_path.rglob("*.cubin")) - ahead]
    assert ahead
    assert not again


def test_registers_and_spills_read_from_a_binary_are_those_of_the_loaded_kernel(gpu):
    from triton.compiler import CompiledKernel

    from flce_tune.kernels.config import Config, Tile
    from flce_tune.sweep.resources import usage

    loaded = []
    load = CompiledKernel._init_handles

    def noted(kernel):
        load(kernel)
        loaded.append(kernel)

    spilling = Config("atomic", logits=Tile(1, 128, 128, num_warps=1, num_stages=2, group=1))
    small = Problem(tokens=64, hidden=256, vocab=3200)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CompiledKernel, "_init_handles", noted)
        OpBench(small, gpu, 0)._run(spilling)
    assert any(kernel.n_spills > 256 for kernel in loaded)
    for kernel in loaded:
        assert usage(kernel.kernel) == (kernel.n_regs, kernel.n_spills), kernel.name


def test_a_ruined_context_costs_the_candidate_alone(planted, extra_on_gpu, store, gpu):
    strategy = extra_on_gpu
    options = SweepOptions(strategies=(strategy.name,), time_limit_s=240)  # a busy host is slow
    report = sweep([PROBLEM], store, gpu, options, make_bench=planted.GpuBench)
    failed = {config_of(m): m.status for m in store.measurements() if m.status is not Status.OK}
    assert failed == {strategy.config(fault): Status.CRASH for fault in strategy.faults}
    assert report.winners


@pytest.fixture
def extra_on_gpu(planted):
    strategy = planted.PlantedOnGpu()
    strategies.register(strategy)
    yield strategy
    strategies.unregister(strategy.name)


def test_the_measured_workspace_resembles_the_estimate(gpu):
    from flce_tune.kernels.problem import describe_device

    bench = OpBench(PROBLEM, gpu, 0)
    config = strategies.default(PROBLEM, describe_device(gpu))
    trial = bench.trial(config)
    assert trial.workspace_bytes == pytest.approx(
        strategies.workspace(config, PROBLEM), rel=0.25, abs=32 << 20
    )


def test_a_worker_sees_its_gpu_alone(planted, gpu):
    place = LocalPlace(gpu, visible=_uuid(gpu))
    assert works(place)
    runner = place.runner(planted.Puppet, PROBLEM, 0)
    seen = runner.call("time", "gpus", timeout_s=60)
    runner.close()
    assert seen == [str(torch.cuda.get_device_properties(gpu).uuid)]


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_sweep_at_the_same_time(store):
    seen = set()

    class Where(SweepEvents):
        def __init__(self, place=None):
            self.place = place

        def at(self, place):
            return Where(place)

        def on_measurement(self, measurement, done, total):
            seen.add((self.place, measurement.problem.hidden))

    problems = [dataclasses.replace(PROBLEM, hidden=hidden) for hidden in (512, 768, 1024, 1280)]
    places = local_places([torch.device("cuda", 0), torch.device("cuda", 1)])
    report = sweep(problems, store, places, SweepOptions(quick=True), events=Where())
    assert all(one.winners for one in report.problems)
    assert len(seen) == len(problems), "whole problems"
    assert {place for place, _ in seen} == {"cuda:0", "cuda:1"}
