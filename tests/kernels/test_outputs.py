"""Statistics beside the loss, and linear_logprobs."""

import pytest
import torch
from exactness import assert_as_exact
from loss_cases import make

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
EVERYTHING = ("lse", "token_loss", "entropy", "prediction", "accuracy", "z_loss")
with_configs = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
with_dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)


def call(case, **keywords):
    return linear_cross_entropy(
        case.x, case.weight, case.target, bias=case.bias, **case.options, **keywords
    )


def statistics(case, dtype):
    """Row statistics of plain torch in a dtype."""
    case = case.to(dtype)
    options = {k: case.options.get(k) for k in ("softcap", "logit_scale")}
    z = reference.logits(case.x, case.weight, case.bias, **options)
    return reference.row_statistics(z, case.target)


@with_configs
@with_dtypes
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("needs_grad", [False, True])
def test_outputs_are_as_exact_as_plain_torch(config, dtype, reduction, needs_grad):
    features = ("bias", "softcap", "z_loss", "label_smoothing", "ignored", "token_weight")
    case = make(N, D, V, dtype, features)
    case.x.requires_grad_(needs_grad)
    got = call(case, reduction=reduction, outputs=EVERYTHING, config=config)
    plain, truth = statistics(case, dtype), statistics(case, torch.float64)
    counted = case.target != -100
    for name in ("lse", "entropy"):
        value = getattr(got, name)
        assert value.dtype == torch.float32
        assert not value.requires_grad
        assert_as_exact(name, value, plain[name], truth[name], dtype)
    lse = truth["lse"].masked_fill(~counted, 0)
    z_loss = 0.03125 * lse.square()
    plain_z_loss = 0.03125 * plain["lse"].masked_fill(~counted, 0).square()
    assert_as_exact("z_loss", got.z_loss, plain_z_loss, z_loss, dtype)
    unweighted = {k: v for k, v in case.options.items() if k != "token_weight"}
    rows = {
        d: reference.linear_cross_entropy(
            *(t.detach().to(d) for t in (case.x, case.weight)), case.target,
            bias=case.bias.to(d), reduction="none", **unweighted,
        )
        for d in (dtype, torch.float64)
    }  # fmt: skip
    assert_as_exact("token_loss", got.token_loss, rows[dtype], rows[torch.float64], dtype)
    assert torch.equal(got.token_loss[~counted], torch.zeros(int((~counted).sum())))
    if dtype == torch.float32:
        assert torch.equal(got.prediction, truth["prediction"])
        hits = (truth["prediction"] == case.target)[counted].double().mean()
        assert float(got.accuracy) == pytest.approx(float(hits))
    assert torch.equal(got.loss.detach(), call(case, reduction=reduction, config=config).detach())


@with_configs
def test_only_what_is_asked_for_is_returned(config):
    case = make(N, D, V)
    got = call(case, outputs=("lse", "accuracy"), config=config)
    assert (got.token_loss, got.entropy, got.prediction, got.z_loss) == (None,) * 4
    assert got.lse.shape == (N,)
    assert got.accuracy.shape == ()


@with_configs
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_the_prediction_is_the_first_of_equal_maxima(config, dtype):
    case = make(N, D, V, dtype)
    case.weight[150] = case.weight[20]
    x = case.weight[20].expand(N, D) * 8
    got = linear_cross_entropy(x, case.weight, case.target, outputs=("prediction",), config=config)
    assert got.prediction.tolist() == [20] * N


def test_outputs_have_the_targets_shape_and_shift_drops_the_last_position():
    case = make((3, 11), D, V)
    got = call(case, outputs=EVERYTHING, z_loss=0.5)
    shifted = call(case, outputs=EVERYTHING, z_loss=0.5, shift=True)
    for name in ("lse", "token_loss", "entropy", "prediction", "z_loss"):
        assert getattr(got, name).shape == (3, 11), name
        assert getattr(shifted, name).shape == (3, 10), name
    assert torch.equal(shifted.lse, got.lse[:, :-1])


@with_configs
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_return_lse_can_be_differentiated(config, reduction):
    case = make(N, D, V, torch.float32, ("bias", "softcap", "ignored", "label_smoothing"))
    up = torch.randn(2, N, generator=torch.Generator().manual_seed(3))

    def gradients(dtype, ours):
        leaves = [t.to(dtype).detach().requires_grad_() for t in (case.x, case.weight, case.bias)]
        if ours:
            loss, lse = linear_cross_entropy(
                *leaves[:2], case.target, bias=leaves[2], reduction=reduction,
                return_lse=True, config=config, **case.options,
            )  # fmt: skip
        else:
            loss = reference.linear_cross_entropy(
                *leaves[:2], case.target, bias=leaves[2], reduction=reduction, **case.options
            )
            z = reference.logits(*leaves[:2], leaves[2], case.options["softcap"])
            lse = torch.logsumexp(z, -1)
        total = (loss * up[0].to(dtype)).sum() + (lse * up[1].to(dtype)).sum()
        return lse, *torch.autograd.grad(total, leaves)

    names = ("lse", "x", "weight", "bias")
    results = zip(
        names, gradients(torch.float32, True), gradients(torch.float32, False),
        gradients(torch.float64, False), strict=True,
    )  # fmt: skip
    for name, ours, plain, truth in results:
        assert_as_exact(name, ours, plain, truth, torch.float32)


@with_configs
@with_dtypes
@pytest.mark.parametrize("features", [(), ("bias", "softcap")], ids=["plain", "bias and softcap"])
@pytest.mark.parametrize("terms", ["logprob", "entropy", "both"])
def test_logprobs_and_entropies_and_their_gradients(config, dtype, features, terms):
    case = make(N, D, V, dtype, features)
    up = torch.randn(2, N, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    if terms != "both":
        up[0 if terms == "entropy" else 1] = 0

    def run(dtype, ours):
        case_ = case.to(dtype)
        given = [t for t in (case_.x, case_.weight, case_.bias) if t is not None]
        leaves = [t.detach().requires_grad_() for t in given]
        bias = leaves[2] if len(leaves) == 3 else None
        softcap = case.options.get("softcap")
        if ours:
            logprob, entropy = linear_logprobs(
                *leaves[:2], case.target, bias=bias, temperature=1.6, softcap=softcap,
                config=config,
            )  # fmt: skip
        else:
            z = reference.logits(*leaves[:2], bias, softcap, 1 / 1.6)
            result = reference.row_statistics(z, case.target)
            logprob, entropy = result["logprob"], result["entropy"]
        total = (logprob * up[0].to(logprob.dtype)).sum() + (entropy * up[1].to(entropy)).sum()
        return dict(
            zip(
                ("logprob", "entropy", "x", "weight", "bias"),
                (logprob, entropy, *torch.autograd.grad(total, leaves)), strict=False,
            )
        )  # fmt: skip

    ours, plain, truth = run(dtype, True), run(dtype, False), run(torch.float64, False)
    assert set(ours) == set(truth)
    for name, value in ours.items():
        assert_as_exact(name, value, plain[name], truth[name], dtype)


def test_logprobs_without_entropy_and_of_ignored_labels():
    case = make((4, 6), D, V, torch.float32, ("ignored",))
    case.x.requires_grad_()
    logprob, entropy = linear_logprobs(case.x, case.weight, case.target, entropy=False)
    assert entropy is None
    assert logprob.shape == (4, 6)
    ignored = case.target == -100
    assert torch.equal(logprob[ignored], torch.zeros(int(ignored.sum())))
    logprob.sum().backward()
    assert not case.x.grad[ignored].any()
    assert case.x.grad[~ignored].all()


def test_entropy_of_an_ignored_label_counts():
    case = make(N, D, V, torch.float32, ("ignored",))
    _, entropy = linear_logprobs(case.x, case.weight, case.target)
    truth = statistics(case, torch.float64)["entropy"]
    plain = statistics(case, torch.float32)["entropy"]
    assert_as_exact("entropy", entropy, plain, truth, torch.float32)
