"""Faults users of similar software met, each with its right value."""

import math

import pytest
import torch
import torch.nn.functional as F
from loss_cases import Case, compare, make, run

from flce_tune.kernels import reference
from flce_tune.kernels.config import Config
from flce_tune.kernels.op import linear_cross_entropy, linear_logprobs

pytestmark = pytest.mark.usefixtures("poison")

CONFIGS = {
    "chunked": Config("chunked", chunk=32),
    "full": Config("full"),
    "recompute": Config("recompute", slab=64),
}
N, D, V = 97, 24, 203
INF = float("inf")
with_configs = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
with_reductions = pytest.mark.parametrize("reduction", ["mean", "sum", "none"])


@with_configs
@pytest.mark.parametrize("vocab", [129, 257, 1000])
def test_bug_002_no_column_beyond_the_vocabulary_joins_the_softmax(config, vocab):
    x, weight = torch.zeros(4, 8), torch.zeros(vocab, 8)
    case = Case(x, weight, torch.arange(4), torch.full((vocab,), -20.0))
    got = run(linear_cross_entropy, case, config=config)
    assert float(got["loss"]) == pytest.approx(math.log(vocab), rel=1e-6)
    assert float(got["bias"].sum()) == pytest.approx(0.0, abs=1e-6)
    rows = run(linear_cross_entropy, make(N, D, vocab), ("bias",), reduction="none")
    assert bool((rows["loss"] >= 0).all())


@with_configs
@with_reductions
@pytest.mark.parametrize("bias", [(), ("bias",)], ids=["no bias", "bias"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "z_loss": 0.1}], ids=str)
def test_bug_004_every_label_ignored(config, reduction, bias, dtype, options):
    case = make(4, D, V, dtype, bias)
    case.target.fill_(-100)
    got = run(linear_cross_entropy, case, reduction=reduction, config=config, **options)
    expected = F.cross_entropy(torch.zeros(4, V), case.target, reduction=reduction)
    assert torch.equal(got["loss"], expected) or (got["loss"].isnan() and expected.isnan())
    for name in ("x", "weight", *bias):
        assert not got[name].any(), name
        assert got[name].isfinite().all(), name


@with_configs
@pytest.mark.parametrize("divisor", [0, 0.0, 5, torch.tensor(0), torch.tensor(5.0)], ids=repr)
@pytest.mark.parametrize("per_token", [False, True])
def test_bug_004_every_label_ignored_with_a_divisor(config, divisor, per_token):
    case = make(4, D, V, torch.float32, ("bias",))
    case.target.fill_(-100)
    weight = torch.ones(4, requires_grad=per_token)  # its gradient takes the path per token
    got = run(linear_cross_entropy, case, token_weight=weight, divisor=divisor, config=config)
    assert got["loss"].isnan() if float(divisor) == 0 else float(got["loss"]) == 0.0
    for name in ("x", "weight", "bias"):
        assert not got[name].any(), name


@with_configs
def test_bug_004_logprobs_of_ignored_labels_only(config):
    case = make(4, D, V)
    case.target.fill_(-100)
    case.x.requires_grad_()
    logprob, _ = linear_logprobs(case.x, case.weight, case.target, config=config)
    logprob.sum().backward()
    assert not logprob.any()
    assert not case.x.grad.any()


@with_configs
@with_reductions
@pytest.mark.parametrize("features", [("bias",), ("class_weight", "label_smoothing")], ids=str)
def test_no_tokens_at_all(config, reduction, features):
    case = make((2, 0), D, V, torch.float32, features)
    got = run(linear_cross_entropy, case, reduction=reduction, config=config)
    expected = run(reference.linear_cross_entropy, case, reduction=reduction)
    assert set(got) == set(expected)
    for name, value in got.items():
        torch.testing.assert_close(value, expected[name], equal_nan=True)
    shifted = run(linear_cross_entropy, case, reduction=reduction, shift=True)
    assert shifted["loss"].shape == expected["loss"].shape
    logprob, entropy = linear_logprobs(case.x, case.weight, case.target)
    assert logprob.shape == entropy.shape == (2, 0)


@with_configs
@pytest.mark.parametrize("place", [0, 100, V - 1])
def test_bug_015_one_finite_logit(config, place):
    case = make(9, D, V, torch.float32)
    bias = torch.full((V,), -INF)
    bias[place] = 0.5
    case.target.fill_(place)
    got = run(linear_cross_entropy, Case(case.x, case.weight, case.target, bias), config=config)
    ulp = 2.0**-23 * float((case.x @ case.weight.t()).abs().max())
    recomputed = 16 * ulp if config.strategy == "recompute" else 0.0  # logits differ by roundings
    assert float(got["loss"]) == 0.0
    for name in ("x", "weight", "bias"):
        assert float(got[name].abs().max()) <= recomputed, name


@with_configs
@pytest.mark.parametrize("place", [0, 100, V - 1])
def test_bug_015_a_label_at_minus_infinity(config, place):
    bias = torch.full((V,), -INF)
    bias[place] = 0.0
    label = (place + 57) % V
    case = Case(torch.zeros(3, D), torch.zeros(V, D), torch.full((3,), label), bias)
    got = run(linear_cross_entropy, case, reduction="sum", config=config)
    assert float(got["loss"]) == INF
    expected = torch.zeros(V)
    expected[place], expected[label] = 3.0, -3.0
    assert torch.equal(got["bias"], expected)


@with_configs
def test_bug_015_a_row_of_minus_infinities_is_nan_alone(config):
    x = torch.zeros(5, D)
    x[2, 0] = INF
    weight = torch.zeros(V, D)
    weight[:, 0] = -1.0
    case = Case(x, weight, torch.arange(5))
    got = run(linear_cross_entropy, case, ("x",), reduction="none", config=config)
    others = torch.tensor([0, 1, 3, 4])
    assert got["loss"][2].isnan()
    torch.testing.assert_close(got["loss"][others], torch.full((4,), math.log(V)))
    assert got["x"][2].isnan().any()
    assert got["x"][others].isfinite().all()


@with_configs
def test_bug_015_entropy_and_smoothing_beside_minus_infinity(config):
    bias = torch.full((V,), -INF)
    bias[:4] = 0.0
    case = Case(torch.zeros(3, D), torch.zeros(V, D), torch.tensor([0, 1, 2]), bias)
    _, entropy = linear_logprobs(case.x, case.weight, case.target, bias=bias, config=config)
    torch.testing.assert_close(entropy, torch.full((3,), math.log(4)))
    smooth = linear_cross_entropy(
        case.x, case.weight, case.target, bias=bias, label_smoothing=0.1, config=config
    )
    assert float(smooth) == INF


@with_configs
@with_reductions
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "layout", ["transposed", "narrow", "expanded", "every other", "column-major", "shifted by one"]
)
def test_bug_028_inputs_of_any_strides(config, reduction, dtype, layout):
    hidden = 24
    base = make((6, 16), hidden, V, dtype, ("bias", "ignored"))

    def laid_out(tensor):
        rows, width = tensor.shape
        if layout == "narrow":
            wide = tensor.new_full((rows, width + 7), float("nan"))
            wide[:, :width] = tensor
            return wide[:, :width]
        if layout == "every other":
            wide = tensor.new_full((rows, 2 * width), float("nan"))
            wide[:, ::2] = tensor
            return wide[:, ::2]
        if layout == "column-major":
            return tensor.t().contiguous().t()
        if layout == "shifted by one":
            flat = tensor.new_full((rows * width + 1,), float("nan"))
            flat[1:] = tensor.reshape(-1)
            return flat[1:].view(rows, width)
        return tensor

    x, weight = base.x, laid_out(base.weight)
    if layout == "transposed":
        x = x.transpose(0, 1).contiguous().transpose(0, 1)
    elif layout == "expanded":
        x = x[:1].expand(6, 16, hidden)
    else:
        x = laid_out(x.reshape(96, hidden)).view(6, 16, hidden)
    wide_bias = base.bias.new_full((2 * V,), float("nan"))
    wide_bias[::2] = base.bias
    strided = [x, weight, wide_bias[::2]]
    assert torch.equal(weight, base.weight)

    def outcome(x, weight, bias):
        leaves = [x.detach().requires_grad_(), weight.detach().requires_grad_(),
                  bias.detach().requires_grad_()]  # fmt: skip
        loss = linear_cross_entropy(
            leaves[0], leaves[1], base.target, bias=leaves[2], reduction=reduction, config=config
        )
        return loss, *torch.autograd.grad(loss.sum(), leaves)

    for got, want in zip(
        outcome(*strided), outcome(*(t.contiguous() for t in strided)), strict=True
    ):
        torch.testing.assert_close(got, want)


@with_configs
@with_reductions
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_bug_030_a_large_bias(config, reduction, dtype):
    case = make(N, D, V, dtype, ("bias",))
    case.bias.mul_(5)
    got = compare(case, dtype, config=config, reduction=reduction)
    assert bool((got["loss"] >= 0).all())


def test_bug_030_no_bias_is_a_bias_of_zeros():
    case = make(N, D, V, torch.float32)
    without = run(linear_cross_entropy, case)
    zeros = run(linear_cross_entropy, Case(case.x, case.weight, case.target, torch.zeros(V)))
    for name, value in without.items():
        torch.testing.assert_close(value, zeros[name])


@with_configs
@with_reductions
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_bug_041_a_softcap_of_large_logits_and_its_derivative(config, reduction, dtype):
    case = make(N, D, V, dtype, ("bias",))
    case.weight.mul_(16)
    case = case.with_options(softcap=30.0)
    z = reference.logits(case.x.double(), case.weight.double(), case.bias.double())
    assert float(z.abs().max()) > 100
    got = compare(case, dtype, config=config, reduction=reduction)
    assert bool(got["x"].any())


@with_configs
@with_reductions
@pytest.mark.parametrize("weighted", [False, True])
def test_bug_044_smoothing_leaves_ignored_rows_out(config, reduction, weighted):
    case = make(5, 3, 7, torch.float32, ("bias",))
    case = Case(case.x, case.weight, torch.tensor([1, 2, -100, 3, -100]), case.bias)
    kept = case.target != -100
    fewer = Case(case.x[kept], case.weight, case.target[kept], case.bias)
    options = {"label_smoothing": 0.1, "reduction": reduction, "config": config}
    if weighted:
        options["class_weight"] = torch.rand(7) + 0.5
    got, want = (
        run(linear_cross_entropy, case, **options),
        run(linear_cross_entropy, fewer, **options),
    )
    loss = got["loss"][kept] if reduction == "none" else got["loss"]
    torch.testing.assert_close(loss, want["loss"])
    torch.testing.assert_close(got["x"][kept], want["x"])
    assert not got["x"][~kept].any()
    for name in ("weight", "bias"):
        torch.testing.assert_close(got[name], want[name])


@with_configs
@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("garbage", [float("nan"), INF])
def test_weights_of_ignored_tokens_are_never_used(config, per_token, garbage):
    case = make(N, D, V, torch.float32, ("bias", "ignored", "token_weight"))
    clean = run(linear_cross_entropy, case, config=config)
    weight = case.options["token_weight"].masked_fill(case.target == -100, garbage)
    weight.requires_grad_(per_token)
    dirty = run(linear_cross_entropy, case.with_options(token_weight=weight), config=config)
    for name, value in dirty.items():
        torch.testing.assert_close(value, clean[name], rtol=1e-4, atol=1e-6)


@with_configs
@pytest.mark.parametrize("large", [1e30, 3e38])
def test_hidden_states_of_ignored_tokens_do_not_spread(config, large):
    """Not even if their logits overflow."""
    case = make(N, D, V, torch.float32, ("bias", "ignored"))
    clean = run(linear_cross_entropy, case, config=config)
    x = case.x.masked_fill((case.target == -100)[:, None], large)
    dirty = run(linear_cross_entropy, Case(x, case.weight, case.target, case.bias), config=config)
    for name in ("loss", "x", "weight", "bias"):
        torch.testing.assert_close(dirty[name], clean[name])
