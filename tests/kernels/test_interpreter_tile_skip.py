"""Tile skipping on the Triton kernels, through the interpreter, against plain torch."""

import sys
from dataclasses import replace

import pytest
import torch
from exactness import assert_as_exact
from kept_tiles import share, watch
from loss_cases import make, trained

from flce_tune.kernels import torch_numerators, torch_skipping
from flce_tune.kernels.config import Config, Tile
from flce_tune.kernels.strategies import tile_skip
from flce_tune.kernels.strategies.chunked import Chunked
from flce_tune.kernels.strategies.tile_skip import TileSkip
from flce_tune.kernels.values import Inputs, LossSpec, Wanted

triton_numerators = pytest.importorskip("flce_tune.kernels.triton.numerators")
triton_skipping = pytest.importorskip("flce_tune.kernels.triton.skipping")

pytestmark = [
    pytest.mark.usefixtures("poison"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="compiled kernels run in tests/gpu"),
]
CONFIG = Config(
    "tile_skip",
    slab=256,
    logits=Tile(16, 32, 16, 4, 2, 2),
    dx=Tile(32, 16, 16, 4, 2, 2),
    dw=Tile(16, 32, 16, 4, 2, 2),
    tolerance=1e-4,
)
EVERYTHING = Wanted(True, True, True)


def use(monkeypatch, numerators, skipping):
    monkeypatch.setattr(tile_skip, "primitives_of", lambda tensor: numerators)
    monkeypatch.setattr(tile_skip, "kernels_of", lambda tensor: skipping)
    monkeypatch.setattr(
        sys.modules["flce_tune.kernels.strategies.stored"],
        "primitives_of",
        lambda tensor: numerators,
    )


@pytest.mark.parametrize("vocab", [608, 603])
def test_the_kernels_leave_out_the_same_tiles_and_give_the_same_gradients(monkeypatch, vocab):
    case = trained(tokens=75, hidden=24, vocab=vocab)
    target = case.target.clone()
    target[::5] = -100
    row_weight = torch.where(target < 0, 0.0, 1 / 60)
    inputs = Inputs(case.x, case.weight, target, case.bias)
    arguments = (inputs, row_weight, LossSpec(z_loss=0.01), EVERYTHING)
    plain_keep, keep = watch(monkeypatch, torch_skipping), watch(monkeypatch, triton_skipping)
    use(monkeypatch, torch_numerators, torch_skipping)
    # The reference cuts as the tiles do.
    statistics, plain = TileSkip().train(*arguments, CONFIG)
    use(monkeypatch, triton_numerators, triton_skipping)
    ours_statistics, ours = TileSkip().train(*arguments, CONFIG)
    assert torch.equal(keep[0], plain_keep[0])
    assert 0.1 < share(keep[0]) < 0.9
    torch.testing.assert_close(ours_statistics.lse, statistics.lse)
    for name in ("dx", "dw", "db"):
        torch.testing.assert_close(
            getattr(ours, name), getattr(plain, name), rtol=2e-5, atol=2e-6, msg=name
        )


@pytest.mark.parametrize("loud", [False, True], ids=["", "loud"])
def test_as_exact_as_plain_torch_where_nothing_is_left_out(monkeypatch, loud):
    results = []
    row_weight = torch.randn(40, generator=torch.Generator().manual_seed(5)) / 40
    row_weight[::3] = 0  # the ignored rows

    def prepared(dtype):
        case = make(40, 32, 700, torch.float32, ("ignored", "bias", "class_weight")).to(dtype)
        if loud:  # labels far below the largest logit: tiles take their own reference
            case.x[::2] *= 60
        return Inputs(case.x, case.weight, case.target, case.bias, case.options["class_weight"])

    for dtype in (torch.float32, torch.float64):
        results.append(
            Chunked().train(
                prepared(dtype), row_weight.to(dtype), LossSpec(), EVERYTHING, Config("chunked", 8)
            )
        )
    use(monkeypatch, triton_numerators, triton_skipping)
    ours, grads = TileSkip().train(
        prepared(torch.float32), row_weight, LossSpec(), EVERYTHING,
        replace(CONFIG, tolerance=1e-30),
    )  # fmt: skip
    for name in ("lse", "dx", "dw", "db"):
        got, plain, true = (getattr(r[name != "lse"], name) for r in ((ours, grads), *results))
        if loud:  # exponents of several hundred, multiplied in float32: bfloat16 does not notice
            torch.testing.assert_close(got.double(), true, rtol=2e-3, atol=2e-5, msg=name)
        else:
            assert_as_exact(name, got, plain, true, torch.float32)
