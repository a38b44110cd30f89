"""Every strategy × reduction × option × dtype against plain torch, with poisoned memory."""

import pytest
import torch
from exactness import assert_as_exact
from loss_cases import FEATURES, compare, expect, hold, make, run

from flce_tune.kernels import reference
from flce_tune.kernels.config import Config
from flce_tune.kernels.op import linear_cross_entropy

pytestmark = pytest.mark.usefixtures("poison")

CONFIGS = {
    "chunked": Config("chunked", chunk=32),
    "full": Config("full"),
    "recompute": Config("recompute", slab=64),
}
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
OPTIONS = {name: (name,) for name in FEATURES} | {"nothing": (), "everything": FEATURES}
N, D, V = 97, 24, 203


def random_upstream(shape, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("features", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_loss_and_gradients_are_as_exact_as_plain_torch(config, features, reduction, dtype):
    if reduction != "mean":
        features = tuple(name for name in features if name != "divisor")
    case = make(N, D, V, dtype, features)
    upstream = random_upstream(N) if reduction == "none" else None
    compare(case, dtype, upstream=upstream, config=config, reduction=reduction)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize(
    "needs", [("x",), ("weight",), ("bias",), ("x", "bias"), ("weight", "bias"), ()], ids=str
)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_frozen_inputs(config, needs, reduction, dtype):
    case = make(N, D, V, dtype, ("bias", "ignored", "label_smoothing"))
    ours = compare(case, dtype, needs, config=config, reduction=reduction)
    assert set(ours) == {"loss", *needs}


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_label_may_be_the_ignore_index(dtype, reduction):
    case = make(N, D, 5, dtype, ("bias", "label_smoothing", "class_weight"))
    compare(case, dtype, reduction=reduction, ignore_index=2)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_shift_predicts_the_next_token(config, reduction):
    case = make((3, 21), D, V, torch.float32, ("bias", "token_weight", "z_loss", "ignored"))
    moved = {"token_weight": case.options["token_weight"][:, 1:]}
    upstream = random_upstream((3, 20)) if reduction == "none" else None
    ours = run(
        linear_cross_entropy, case, upstream=upstream,
        reduction=reduction, shift=True, config=config,
    )  # fmt: skip

    def written_out(x, weight, target, **options):
        return reference.linear_cross_entropy(
            x[:, :-1], weight, target[:, 1:], **(options | moved), reduction=reduction
        )

    plain = run(written_out, case, upstream=upstream)
    moved = {"token_weight": moved["token_weight"].double()}
    truth = run(written_out, case.to(torch.float64), upstream=upstream)
    for name, value in ours.items():
        assert_as_exact(name, value, plain[name], truth[name], torch.float32)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("shape", [(5,), (1,), (2, 7), (2, 3, 4)], ids=str)
def test_any_number_of_leading_dimensions(config, shape):
    case = make(shape, D, V, torch.float32, ("bias", "ignored"))
    for reduction in ("mean", "none"):
        result = compare(case, torch.float32, config=config, reduction=reduction)
        assert result["x"].shape == (*shape, D)


def test_a_single_token_without_a_leading_dimension():
    case = make((), D, V, torch.float32)
    compare(case, torch.float32)
    assert compare(case, torch.float32, reduction="none")["loss"].shape == ()


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("vocab", [1, 2, 3])
@pytest.mark.parametrize("hidden", [1, 3])
def test_tiny_sizes(config, vocab, hidden):
    """Of 16 draws together: the errors of one draw's two or three elements are a matter of luck."""
    found = []
    for seed in range(16):
        case = make(33, hidden, vocab, torch.float32, ("bias",), seed=seed)
        ours = run(linear_cross_entropy, case, config=config)
        found.append((ours, *expect(case, torch.float32)))
    pooled = [
        {name: torch.stack([result[name] for result in results]) for name in results[0]}
        for results in zip(*found, strict=True)
    ]
    hold(*pooled, torch.float32)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("offset", [-(2.0**15), -64.0, 64.0, 2.0**15])
def test_logits_far_from_zero_cost_one_rounding_of_the_lse(config, offset):
    case = make(N, D, V, torch.float32, ("bias",))
    shifted = type(case)(case.x, case.weight, case.target, case.bias + offset)
    truth = run(reference.linear_cross_entropy, shifted.to(torch.float64))
    ours = run(linear_cross_entropy, shifted, config=config)
    ulp = abs(offset) * 2.0**-23
    for name, value in ours.items():
        error = (value.double() - truth[name]).abs().max()
        assert float(error) <= 4 * ulp * max(1.0, float(truth[name].abs().max())), name


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_equal_logits(config):
    case = make(N, D, 200, torch.float32)
    case.weight.zero_()
    ours = compare(case, torch.float32, config=config)
    assert float(ours["loss"]) == pytest.approx(5.298317366548036, rel=1e-6)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_twice_gives_the_same_bits(config, reduction, dtype):
    case = make(N, D, V, dtype, ("bias", "ignored", "softcap"))
    first, second = (
        run(linear_cross_entropy, case, reduction=reduction, config=config) for _ in range(2)
    )
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_gradient_dtypes_are_the_inputs_and_the_loss_is_float32(config, reduction):
    case = make(9, D, V, torch.bfloat16, ("bias",))
    mixed = run(
        linear_cross_entropy,
        type(case)(case.x.float(), case.weight, case.target, case.bias.half()),
        reduction=reduction, config=config,
    )  # fmt: skip
    dtypes = {name: value.dtype for name, value in mixed.items()}
    assert dtypes == {
        "loss": torch.float32, "x": torch.float32, "weight": torch.bfloat16, "bias": torch.float16,
    }  # fmt: skip
