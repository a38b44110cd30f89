"""What a split problem runs, by analysis and by what one device would choose."""

import pytest

from flce_tune.kernels import selection
from flce_tune.kernels.config import Config, Tile
from flce_tune.kernels.parallel.choice import choose
from flce_tune.kernels.problem import Device, Problem
from flce_tune.kernels.strategies.common import preferred_tile

H200 = Device("cuda", "NVIDIA H200", (9, 0), 132, 232448, 150 << 30)
CPU = Device("cpu", "x86_64", (0, 0), 2, 0, 0)
LOCAL = Problem(8192, 4096, 64128)
LOGITS = Tile(128, 256, 64, num_warps=8, num_stages=3, group=8)
DX, DW = (preferred_tile(name, LOCAL, H200) for name in ("dx", "dw"))
OVERLAY = Config("overlay", logits=LOGITS, dx=DX, dw=DW, slab=4096, accumulator="split24")


@pytest.fixture
def chosen(monkeypatch):
    """Make one device's choice this config."""

    def install(config):
        class Fixed(selection.AnalyticChooser):
            def choose(self, problem, device, workspace_limit):
                return config

        monkeypatch.setattr(selection, "_chooser", Fixed())

    return install


def test_dw_gets_a_tile_that_lets_the_sum_of_dx_in(chosen):
    chosen(Config("full", logits=LOGITS))
    assert choose(LOCAL, H200, None) == Config(
        "full", logits=LOGITS, dw=preferred_tile("dw", LOCAL, H200)
    )


def test_nothing_is_added_where_no_tile_runs(chosen):
    chosen(Config("full"))
    assert choose(Problem(64, 32, 100, "float32"), CPU, None) == Config("full")


def test_a_frozen_head_has_no_dw(chosen):
    chosen(Config("full", logits=LOGITS))
    problem = Problem(8192, 4096, 64128, mode="train_frozen_weight")
    assert choose(problem, H200, None) == Config("full", logits=LOGITS)


@pytest.mark.parametrize(
    "config", [OVERLAY, Config("recompute", logits=LOGITS, slab=4096)], ids=str
)
def test_what_recomputes_logits_gives_way_if_there_is_memory(chosen, config):
    chosen(config)
    assert choose(LOCAL, H200, None).strategy in ("full", "chunked")
    assert choose(LOCAL, H200, 300 << 20).strategy in ("overlay", "recompute")


def test_chunks_that_need_less_memory_than_all_logits_stay(chosen):
    small = Config("factored", logits=LOGITS, dx=OVERLAY.dx, dw=OVERLAY.dw, slab=4096, chunk=1024,
                   accumulator="split24")  # fmt: skip
    chosen(small)
    assert choose(LOCAL, H200, None) == small


def test_losses_per_token_and_evaluation_run_what_one_device_would(chosen):
    chosen(OVERLAY)
    for problem in (
        Problem(8192, 4096, 64128, mode="eval"),
        Problem(8192, 4096, 64128, features=("per_token",)),
    ):
        assert choose(problem, H200, None) == OVERLAY
