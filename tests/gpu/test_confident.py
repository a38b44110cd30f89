"""Confident predictions in float32 on a GPU, with no allowance for statistics."""

import pytest
import torch
from confident import confident, hold_strictly
from gpu import ATOMIC, cuts, needs_gpu
from loss_cases import hold, run

from flce_tune.kernels.op import linear_cross_entropy

pytestmark = needs_gpu
CONFIGS = cuts({}, chunk=32, slab=256) | {"atomic": ATOMIC}


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("shape", [(256, 32, 200), (192, 64, 1000), (64, 64, 50257)], ids=str)
def test_no_less_exact_than_plain_torch(shape, config, reduction, request):
    if config.strategy == "atomic" and shape[0] == 64:
        # dX 3.9 times, dW 2.2 times plain torch's on an H200: few rows, other sums.
        request.applymarker(pytest.mark.xfail(strict=False, reason="see docs/accuracy.md"))
    case, plain, truth = confident(*shape, "cuda")
    upstream = 1.0 if reduction == "mean" else 1.0 / shape[0]
    ours = run(linear_cross_entropy, case, upstream=upstream, config=config, reduction=reduction)
    if reduction == "mean":
        del ours["loss"]
    if config.strategy == "atomic":  # its atomics add up dW and db one row after the other
        sums = {name: ours.pop(name) for name in ("weight", "bias")}
        names = sums.keys()
        hold(sums, {n: plain[n] for n in names}, {n: truth[n] for n in names}, torch.float32)
    hold_strictly(ours, plain, truth)
