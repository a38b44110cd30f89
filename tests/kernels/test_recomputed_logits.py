"""Logits that are computed twice must come out the same: a library rounds by its call's shape."""

import pytest
import torch
from loss_cases import compare, expect, hold, make, run

from flce_tune.kernels import torch_backend
from flce_tune.kernels.config import Config
from flce_tune.kernels.op import linear_cross_entropy
from flce_tune.kernels.strategies import common

N, D, V = 300, 16, 1003
CONFIGS = {
    "recompute": Config("recompute", slab=256),
    "one slab": Config("recompute", slab=1024),
    "chunked": Config("chunked", chunk=96),
    "full": Config("full"),
}


@pytest.fixture
def calls(monkeypatch):
    """Arguments that decide which kernel a library takes, and what it multiplies."""
    seen = []
    compute = torch_backend.raw_logits

    def record(inputs, out):
        seen.append((*(t.stride() for t in (inputs.x, inputs.weight, out)), out.shape,
                     inputs.x.sum().item(), inputs.weight.sum().item()))  # fmt: skip
        compute(inputs, out)

    monkeypatch.setattr(torch_backend, "raw_logits", record)
    return seen


@pytest.mark.parametrize("budget", [48 << 20, 256 * 1024], ids=["one block", "blocks of rows"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_backward_makes_the_calls_of_forward(config, budget, calls, monkeypatch):
    monkeypatch.setattr(common, "EVALUATION_BYTES", budget)
    case = make(N, D, V, torch.bfloat16, ("bias", "ignored"))
    leaf = case.x.requires_grad_()
    loss = linear_cross_entropy(
        leaf, case.weight, case.target, bias=case.bias, reduction="none", config=config
    )
    forward = sorted(calls)
    calls.clear()
    loss.sum().backward()
    assert sorted(calls) == forward


@pytest.mark.parametrize("budget", [48 << 20, 256 * 1024], ids=["one block", "blocks of rows"])
def test_training_makes_each_call_twice(budget, calls, monkeypatch):
    monkeypatch.setattr(common, "EVALUATION_BYTES", budget)
    case = make(N, D, V, torch.bfloat16, ("bias", "ignored"))
    run(linear_cross_entropy, case, config=CONFIGS["recompute"])
    assert len(calls) == 8
    assert sorted(calls[:4]) == sorted(calls[4:])


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_library_that_rounds_wide_products_twice(reduction, monkeypatch):
    """What cuBLAS did on an H200 to the row whose largest p, 0.56, is not its label's."""
    case = make(1000, 256, 5000, torch.bfloat16, ("ignored", "bias"))
    plain, truth = expect(case, torch.bfloat16, reduction=reduction)
    compute = torch_backend.raw_logits

    def rounded_twice(inputs, out):
        if inputs.vocab < 1000:
            compute(inputs, out)
        else:
            torch.add(inputs.x @ inputs.weight.t(), inputs.bias, out=out)

    monkeypatch.setattr(torch_backend, "raw_logits", rounded_twice)
    config = Config("recompute", slab=512)
    hold(run(linear_cross_entropy, case, reduction=reduction, config=config), plain, truth,
         torch.bfloat16)  # fmt: skip


@pytest.mark.parametrize("budget", [48 << 20, 256 * 1024], ids=["one block", "blocks of rows"])
@pytest.mark.parametrize("slab", [256, 512, 1024])
def test_statistics_of_slabs(slab, budget, monkeypatch):
    monkeypatch.setattr(common, "EVALUATION_BYTES", budget)
    features = ("ignored", "bias", "label_smoothing", "softcap", "class_weight", "z_loss")
    case = make(N, D, V, torch.float32, features)
    config = Config("recompute", slab=slab)
    compare(case, torch.float32, reduction="none", config=config)
    names = ("lse", "entropy", "prediction")
    got, once = (
        linear_cross_entropy(case.x, case.weight, case.target, bias=case.bias, **case.options,
                             outputs=names, config=c) for c in (config, Config("full"))
    )  # fmt: skip
    assert torch.equal(got.prediction, once.prediction)
    torch.testing.assert_close(got.lse, once.lse, rtol=2**-22, atol=0)
    torch.testing.assert_close(got.entropy, once.entropy, rtol=2**-20, atol=2**-20)
