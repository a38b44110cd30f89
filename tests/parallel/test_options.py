"""A vocabulary split over two or three ranks gives what one rank gives, for every option."""

import pytest
import torch
from loss_cases import FEATURES, expect, hold, make
from split_cases import (
    PADDING,
    differentiated,
    even,
    joined,
    logprobs,
    plain_split,
    run_split,
    statistics,
)

from flce_tune.kernels.config import Config
from flce_tune.kernels.op import linear_cross_entropy

N, D, V = 33, 24, 103
CONFIGS = [
    Config("full"),
    Config("chunked", chunk=12),
    Config("recompute", slab=16),
]
NUMERATORS = {
    "factored": Config("factored", chunk=64, slab=32),
    "factored, chunks": Config("factored", chunk=12, slab=16),
    "overlay": Config("overlay", slab=16),
}
WITHOUT_NUMERATORS = {"label_smoothing", "softcap"}
SPLITS = {
    "uneven": ([0, 60, 103], 0),
    "padded": ([0, 52, 103], PADDING),
    "three, one of a single class": ([0, 1, 70, 103], 0),
    "three, the last only padding": ([0, 60, 103, 103], PADDING),
    "three, the first only padding": ([0, 0, 60, 103], PADDING),
}


def check(ranks, case, dtype, bounds, padding=0, needs=("x", "weight", "bias"), **keywords):
    more = {k: keywords.pop(k) for k in ("config", "drop_ignored") if k in keywords}
    size = len(bounds) - 1
    parts = ranks.run(size, run_split, case, bounds, padding, needs, **keywords, **more)
    hold(joined(parts, bounds), *expect(case, dtype, needs, **keywords), dtype)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("feature", [*FEATURES, "all"])
def test_every_option_alone_and_together(ranks, feature, reduction):
    features = [f for f in FEATURES if f != "divisor" or reduction == "mean"]
    chosen = features if feature == "all" else [feature]
    if not set(chosen) <= set(features):
        pytest.skip("divisor goes with the mean")
    case = make(N, D, V, torch.float64, chosen)
    for size in (1, 2, 3) if feature == "all" else (2,):
        check(ranks, case, torch.float64, even(V, size), reduction=reduction)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.strategy)
@pytest.mark.parametrize("split", SPLITS)
def test_every_split_with_every_strategy(ranks, split, config):
    bounds, padding = SPLITS[split]
    case = make(N, D, V, torch.float64, FEATURES)
    check(ranks, case, torch.float64, bounds, padding, config=config)
    plain = make(N, D, V, torch.float64, ["ignored", "bias"])
    check(ranks, plain, torch.float64, bounds, padding, config=config, reduction="none")


@pytest.mark.parametrize("config", NUMERATORS.values(), ids=NUMERATORS)
@pytest.mark.parametrize("split", SPLITS)
def test_every_split_with_numerators(ranks, split, config):
    bounds, padding = SPLITS[split]
    case = make(N, D, V, torch.float64, [f for f in FEATURES if f not in WITHOUT_NUMERATORS])
    case.x[:4] *= 30.0  # far from what the row goes by where its label is another rank's
    check(ranks, case, torch.float64, bounds, padding, config=config)
    check(ranks, case, torch.float64, bounds, padding, needs=("weight",), config=config)
    plain = make(N, D, V, torch.float64, ["ignored", "bias"])
    check(ranks, plain, torch.float64, bounds, padding, config=config, reduction="none")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("config", NUMERATORS.values(), ids=NUMERATORS)
def test_numerators_are_as_exact_as_plain_torch(ranks, dtype, config):
    case = make(128, 64, 517, dtype, ["ignored", "bias", "z_loss"])
    check(ranks, case, dtype, even(517, 2), config=config)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("config", CONFIGS[:2], ids=lambda c: c.strategy)
def test_as_exact_as_plain_torch(ranks, dtype, config):
    case = make(128, 64, 517, dtype, ["ignored", "bias", "label_smoothing", "softcap"])
    check(ranks, case, dtype, even(517, 2), config=config)


@pytest.mark.parametrize("needs", [("x",), ("weight",), ("bias",), ("x", "bias"), ()])
def test_only_what_requires_grad_gets_a_gradient(ranks, needs):
    case = make(N, D, V, torch.float64, ["bias"])
    for reduction in ("mean", "none"):
        check(ranks, case, torch.float64, even(V, 2), needs=needs, reduction=reduction)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_recomputing_is_as_exact_as_plain_torch_on_the_same_split(ranks, reduction):
    bounds = even(517, 3)
    case = make(128, 64, 517, torch.bfloat16, ["ignored", "bias", "label_smoothing", "softcap"])
    config = Config("recompute", slab=64)
    parts = ranks.run(3, run_split, case, bounds, reduction=reduction, config=config)
    _, truth = expect(case, torch.bfloat16, reduction=reduction)
    plain = plain_split(case, bounds, reduction=reduction)
    hold(joined(parts, bounds), plain, truth, torch.bfloat16)


def test_any_upstream_gradient(ranks):
    case = make(N, D, V, torch.float64, ["ignored"])
    check(ranks, case, torch.float64, even(V, 2), upstream=-2.5)
    upstream = torch.linspace(-1, 1, N, dtype=torch.float64)
    check(ranks, case, torch.float64, even(V, 3), upstream=upstream, reduction="none")


def test_ignored_tokens_left_out(ranks):
    case = make(400, D, V, torch.float64, ["bias", "token_weight"])
    case.target[:300] = -100
    for reduction in ("mean", "none"):
        check(ranks, case, torch.float64, even(V, 2), reduction=reduction, drop_ignored=True)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.strategy)
def test_statistics_beside_the_loss(ranks, config):
    names = ("lse", "token_loss", "entropy", "prediction", "accuracy", "z_loss")
    case = make(N, D, V, torch.float64, ["ignored", "bias", "softcap", "z_loss"])
    case.weight[40], case.bias[40] = case.weight[80], case.bias[80]  # equal logits on two ranks
    case.x[5] = 4 * case.weight[80]
    whole = linear_cross_entropy(
        case.x, case.weight, case.target, bias=case.bias, outputs=names, **case.options
    )
    assert whole.prediction[5] == 40
    for bounds, padding in (even(V, 2), 0), ([0, 0, 60, 103], PADDING):
        for mine in ranks.run(
            len(bounds) - 1, statistics, case, bounds, padding, outputs=names, config=config
        ):
            for name in ("loss", *names):
                torch.testing.assert_close(getattr(mine, name), getattr(whole, name), msg=name)


def test_lse_can_be_differentiated(ranks):
    case = make(N, D, V, torch.float64, ["ignored", "bias"])
    for part in ranks.run(2, differentiated, case, even(V, 2)):
        for ours, truth in part:
            torch.testing.assert_close(ours, truth)


def test_logprobs_and_entropy(ranks):
    case = make(N, D, V, torch.float64, ["ignored"])
    for bounds in (even(V, 2), [0, 0, 60, 103]):
        for part in ranks.run(len(bounds) - 1, logprobs, case, bounds):
            for ours, truth in part:
                torch.testing.assert_close(ours, truth)
