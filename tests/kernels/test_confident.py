"""Confident predictions in float32, with no allowance for statistics.

Where one class has nearly all the probability, p - 1 has few digits left, and an lse that is
rounded to one float32 costs most of them.
"""

import sys

import pytest
import torch
from confident import confident, hold_strictly
from loss_cases import expect, make, run

from flce_tune.kernels import loss as losses
from flce_tune.kernels import strategies
from flce_tune.kernels.config import Config, Tile
from flce_tune.kernels.op import linear_cross_entropy
from flce_tune.kernels.values import Inputs, LossSpec, Wanted

SHAPES = [(256, 32, 200), (192, 64, 1000), (16, 32, 50257)]
CONFIGS = {
    "chunked": Config("chunked", chunk=8),
    "full": Config("full"),
    "recompute": Config("recompute", slab=16384),
    "recompute by slabs": Config("recompute", slab=256),
}
ATOMIC = Config("atomic", logits=Tile(1, 64, 32, 4, 2, 1))
INTERPRETED = [
    *((CONFIGS[name], shape) for name in CONFIGS for shape in [(64, 32, 200), (32, 64, 1000)]),
    *((CONFIGS[name], (4, 32, 50257)) for name in ("full", "recompute")),
    (ATOMIC, (32, 32, 200)),
]


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_no_less_exact_than_plain_torch(shape, config, reduction):
    case, plain, truth = confident(*shape)
    upstream = 1.0 if reduction == "mean" else 1.0 / shape[0]
    ours = run(linear_cross_entropy, case, upstream=upstream, config=config, reduction=reduction)
    if reduction == "mean":
        del ours["loss"]
    hold_strictly(ours, plain, truth)


def test_a_bias_gradient_that_is_summed_over_many_chunks():
    case = make(512, 16, 203, torch.float32, ("bias",))
    ours = run(linear_cross_entropy, case, ("bias",), config=Config("chunked", chunk=4))
    plain, truth = expect(case, torch.float32, ("bias",))
    hold_strictly({"bias": ours["bias"]}, plain, truth)


@pytest.mark.skipif(torch.cuda.is_available(), reason="compiled kernels run in tests/gpu")
@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")
@pytest.mark.parametrize(("config", "shape"), INTERPRETED, ids=str)
def test_no_less_exact_than_plain_torch_on_triton(config, shape, monkeypatch):
    triton_backend = pytest.importorskip("flce_tune.kernels.triton.backend")
    case, plain, truth = confident(*shape)
    for name, module in list(sys.modules.items()):
        if name.startswith("flce_tune.kernels.") and hasattr(module, "backend_of"):
            monkeypatch.setattr(module, "backend_of", lambda tensor: triton_backend)
    inputs, loss = Inputs(case.x, case.weight, case.target, case.bias), LossSpec()
    weights = torch.full((shape[0],), 1.0 / shape[0])
    strategy = strategies.get(config.strategy)
    statistics, grads = strategy.train(inputs, weights, loss, Wanted(True, True, True), config)
    ours = {"x": grads.dx, "weight": grads.dw, "bias": grads.db}
    ours["loss"] = losses.row_losses(inputs, statistics, loss)
    hold_strictly(ours, plain, truth)
