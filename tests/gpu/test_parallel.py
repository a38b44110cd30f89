"""A vocabulary split over two GPUs with NCCL: as exact as one, whatever the strategy."""

import pytest
import split_gpu
import torch
from gpu import LARGE, cuts, needs_gpu
from loss_cases import FEATURES, expect, hold, make
from ranks import Ranks
from split_cases import PADDING, even, joined, plain_split

from flce_tune.kernels import reference
from flce_tune.kernels.config import Config
from flce_tune.kernels.op import linear_cross_entropy

pytestmark = [
    *needs_gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

BF16 = torch.bfloat16
N, D, V = 700, 256, 5001
CONFIGS = {
    f"{name}, {how}": config
    for how, tiles in (("library", {}), ("tiles", LARGE))
    for name, config in cuts(tiles, 256, 2048).items()
    if config.strategy in ("full", "chunked", "recompute")
}
NUMERATORS = {
    "factored": Config("factored", chunk=1024, slab=1024, **LARGE),
    "factored, chunks": Config("factored", chunk=256, slab=1024, **LARGE),
    "overlay": Config("overlay", slab=1024, **LARGE),
}
OPTIONS = ("ignored", "bias", "label_smoothing", "z_loss", "class_weight", "token_weight")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    processes = Ranks(2, tmp_path_factory.mktemp("ranks") / "rendezvous", "nccl")
    yield processes
    processes.close()


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("options", [("ignored",), OPTIONS], ids=["plain", "options"])
def test_loss_and_gradients(ranks, config, options):
    case = make(N, D, V, BF16, options)
    for bounds, padding in (even(V, 2), 0), ([0, 1800, V], PADDING):
        parts = ranks.run(2, split_gpu.split, case, bounds, padding, config=config)
        plain, truth = expect(case, BF16)
        if config.strategy == "recompute":  # each rank's part of dX is rounded before the sum
            plain = plain_split(case, bounds)
        hold(joined(parts, bounds), plain, truth, BF16)


@pytest.mark.parametrize("config", NUMERATORS.values(), ids=NUMERATORS)
@pytest.mark.parametrize("options", [("ignored",), ("bias", "z_loss", "class_weight")], ids=str)
def test_numerators(ranks, config, options):
    case = make(N, D, V, BF16, options)
    for bounds, padding in (even(V, 2), 0), ([0, 1800, V], PADDING), ([0, V, V], PADDING):
        parts = ranks.run(2, split_gpu.split, case, bounds, padding, config=config)
        hold(joined(parts, bounds), *expect(case, BF16), BF16)


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_every_option(ranks, reduction):
    features = [f for f in FEATURES if f != "divisor"]
    case = make(N, D, V, torch.float32, features)
    parts = ranks.run(2, split_gpu.split, case, even(V, 2), reduction=reduction)
    hold(
        joined(parts, even(V, 2)), *expect(case, torch.float32, reduction=reduction), torch.float32
    )


def test_statistics(ranks):
    names = ("lse", "token_loss", "entropy", "prediction")
    case = make(N, D, V, torch.float32, ["ignored", "bias"])
    whole = linear_cross_entropy(case.x, case.weight, case.target, bias=case.bias, outputs=names)
    for part in ranks.run(2, split_gpu.outputs, case, even(V, 2), outputs=names):
        for name in names:
            torch.testing.assert_close(part[name], getattr(whole, name), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("in_place", [False, True])
def test_given_logits(ranks, in_place):
    case = make(N, D, V, BF16, ["ignored"])
    logits = reference.logits(case.x, case.weight)

    def plain(dtype):
        leaf = logits.to(dtype).requires_grad_()
        loss = reference.cross_entropy(leaf, case.target)
        (gradient,) = torch.autograd.grad(loss, leaf)
        return {"loss": loss.detach(), "logits": gradient.t()}

    options = {"in_place": in_place}
    parts = ranks.run(2, split_gpu.given, logits, case.target, options, even(V, 2), 0)
    assert all(bool(part["overwritten"]) == in_place for part in parts)
    whole = torch.cat([part["logits"] for part in parts])
    ours = {"loss": parts[0]["loss"], "logits": whole}
    hold(ours, plain(BF16), plain(torch.float64), BF16)


def test_labels_that_nobody_holds_are_nan_on_every_rank(ranks):
    case = make(N, D, V, BF16)
    case.target[3], case.target[5] = V, -7
    for loss, rows in ranks.run(2, split_gpu.unknown_labels, case, even(V, 2)):
        assert loss.isnan().nonzero().flatten().tolist() == [3, 5]
        assert rows.nonzero().flatten().tolist() == [3, 5]


def test_cuda_graph(ranks):
    case = make(N, D, V, BF16)
    for loss, dx, plain_loss, plain_dx in ranks.run(2, split_gpu.captured, case, even(V, 2)):
        assert torch.equal(loss, plain_loss)
        assert torch.equal(dx, plain_dx)


def test_default_config(ranks):
    case = make(N, D, V, BF16, ["ignored"])
    parts = ranks.run(2, split_gpu.split, case, even(V, 2), config=None)
    hold(joined(parts, even(V, 2)), *expect(case, BF16), BF16)
    limited = ranks.run(2, split_gpu.split, case, even(V, 2), workspace_limit=1 << 20)
    assert torch.isfinite(joined(limited, even(V, 2))["loss"])
