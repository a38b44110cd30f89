"""Confident predictions in float32 on a GPU, with no allowance for statistics."""

import pytest
from confident import confident, hold_strictly
from gpu import ATOMIC, cuts, needs_gpu
from loss_cases import run

from flce_tune.kernels.op import linear_cross_entropy

pytestmark = needs_gpu
CONFIGS = cuts({}, chunk=32, slab=256) | {"atomic": ATOMIC}


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("shape", [(256, 32, 200), (192, 64, 1000), (64, 64, 50257)], ids=str)
def test_no_less_exact_than_plain_torch(shape, config, reduction):
    case, plain, truth = confident(*shape, "cuda")
    upstream = 1.0 if reduction == "mean" else 1.0 / shape[0]
    ours = run(linear_cross_entropy, case, upstream=upstream, config=config, reduction=reduction)
    if reduction == "mean":
        del ours["loss"]
    hold_strictly(ours, plain, truth)
