import pytest
import torch

from flce_tune.dispatch.convert import config_of
from flce_tune.kernels import strategies
from flce_tune.kernels.problem import Problem
from flce_tune.sweep.events import SweepEvents, SweepOptions
from flce_tune.sweep.measure import OpBench
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


def test_the_measured_workspace_resembles_the_estimate(gpu):
    from flce_tune.kernels.problem import describe_device

    bench = OpBench(PROBLEM, gpu, 0)
    config = strategies.default(PROBLEM, describe_device(gpu))
    trial = bench.trial(config)
    assert trial.workspace_bytes == pytest.approx(
        strategies.workspace(config, PROBLEM), rel=0.25, abs=32 << 20
    )
