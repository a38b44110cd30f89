import pytest
import torch

from flce_tune.kernels.config import Config
from flce_tune.kernels.limits import reject_tile
from flce_tune.kernels.problem import Device, Problem
from flce_tune.kernels.strategies.common import GEMMS, TILES
from flce_tune.sweep.check import WrongResultError
from flce_tune.sweep.measure import OpBench
from flce_tune.sweep.ragged import ragged_neighbour

H200 = Device("cuda", "NVIDIA H200", (9, 0), 132, 232448, 150 << 30)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_no_block_divides_the_neighbours_sizes_and_tiles_still_run(dtype):
    neighbour = ragged_neighbour(Problem(4096, 4096, 128256, dtype=dtype))
    for size in (neighbour.tokens, neighbour.hidden, neighbour.vocab):
        assert size % 16
    if dtype == "bfloat16":
        for gemm, contraction in GEMMS.items():
            assert reject_tile(TILES[gemm][0], contraction, neighbour, H200) is None


def test_a_single_token_has_a_neighbour():
    assert ragged_neighbour(Problem(1, 1, 1)).tokens == 1


def test_a_right_config_passes_and_the_refusal_names_the_shape(problem, cpu, monkeypatch):
    bench = OpBench(problem, cpu, seed=0)
    bench.check_ragged(Config("full"))
    run = OpBench._run

    def wrong(self, config):
        outputs = run(self, config)
        if len(outputs["dw"]) % 2:
            outputs["dw"] = outputs["dw"] * 1.01
        return outputs

    monkeypatch.setattr(OpBench, "_run", wrong)
    bench.trial(Config("full"))
    with pytest.raises(WrongResultError, match=r"with N=299, D=28, V=401: dw: relative error"):
        bench.check_ragged(Config("full"))


def test_compiling_ahead_runs_both_shapes(problem, cpu, monkeypatch):
    seen = []
    run = OpBench._run

    def noted(self, config):
        seen.append(self._problem)
        return run(self, config)

    monkeypatch.setattr(OpBench, "_run", noted)
    bench = OpBench(problem, torch.device("cpu"), seed=0)
    bench.compile(Config("full"), False)
    assert seen == [problem]
    bench.compile(Config("full"), True)
    assert seen == [problem, ragged_neighbour(problem)]
