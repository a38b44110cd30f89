"""The reductions over tokens through Triton's interpreter, against torch's operators."""

import pytest
import torch
from loss_cases import make

from flce_tune.kernels import loss as losses
from flce_tune.kernels.values import Inputs, LossSpec, Statistics

reduce = pytest.importorskip("flce_tune.kernels.triton.reduce")
launched = pytest.importorskip("flce_tune.kernels.triton.coefficients")

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),
    pytest.mark.usefixtures("poison"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="compiled kernels run in tests/gpu"),
]
N, V = 90, 37
SPEC = LossSpec(label_smoothing=0.125, z_loss=0.03125)


@pytest.fixture(params=[32, 4096], ids=["blocks of 32", "one block"])
def block(request, monkeypatch):
    monkeypatch.setattr(reduce, "MOST_ROWS", request.param)


def labels_of(features, dtype=torch.float32, n=N):
    case = make(n, 8, V, dtype, ("ignored", *features))
    if n > 4:
        case.target[4] = V + 3
    weights = [case.options.get(name) for name in ("class_weight", "token_weight")]
    class_weight, token_weight = (None if w is None else w.float() for w in weights)
    return Inputs(case.x, case.weight, case.target, None, class_weight), token_weight


@pytest.mark.usefixtures("block")
@pytest.mark.parametrize("later", [False, True], ids=["divided", "divided later"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("given", [None, 7.0], ids=["own divisor", "given divisor"])
@pytest.mark.parametrize("features", [(), ("class_weight", "token_weight")], ids=str)
def test_row_weights(later, reduction, given, features):
    if given is not None and reduction == "sum":
        pytest.skip("divisor goes with the mean")
    labels, token_weight = labels_of(features)
    divisor = None if given is None else torch.tensor(given)
    arguments = (labels, SPEC, token_weight, divisor, reduction, torch.float32)
    ours = reduce.row_weights(*arguments, later=later)
    expected = losses.all_row_weights(*arguments, later=later)
    for name in ("weight", "divisor", "applied", "left"):
        torch.testing.assert_close(getattr(ours, name), getattr(expected, name))


@pytest.mark.parametrize("later", [False, True], ids=["divided", "divided later"])
def test_without_a_row_that_counts_every_weight_is_zero(later):
    labels, _ = labels_of(())
    labels.target[:] = -100
    got = reduce.row_weights(labels, SPEC, None, None, "mean", torch.float32, later=later)
    assert not got.applied.any()
    assert got.divisor == 0.0
    assert (got.left is not None) == later
    assert got.left is None or got.left == 0.0


def test_a_weight_that_is_nan_stays_so():
    labels, _ = labels_of(())
    token_weight = torch.ones(N)
    token_weight[5] = float("nan")
    got = reduce.row_weights(labels, SPEC, token_weight, None, "mean", torch.float32, later=False)
    assert got.divisor.isnan()
    assert got.applied.isnan().all()


@pytest.mark.usefixtures("block")
@pytest.mark.parametrize("spec", [LossSpec(), SPEC], ids=["plain", "smoothed"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("features", [(), ("class_weight", "token_weight")], ids=str)
def test_total_loss(spec, reduction, features):
    labels, token_weight = labels_of(features)
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(4, N, generator=generator)
    rows[2] *= 1e-7  # what rounding leaves out of the lse
    rows[1, 4] = float("nan")  # the label that is no column
    statistics = Statistics(
        lse=rows[0] + 5, lse_low=rows[2], target_logit=rows[1],
        logit_sum=rows[3] if spec.label_smoothing else None,
    )  # fmt: skip
    weights = losses.all_row_weights(
        labels, spec, token_weight, None, reduction, torch.float32, later=False
    )
    value, each = reduce.total_loss(labels, statistics, spec, weights)
    expected, expected_each = losses.total_loss(labels, statistics, spec, weights)
    torch.testing.assert_close(each, expected_each, equal_nan=True)
    torch.testing.assert_close(value, expected, equal_nan=True)
    assert value.isnan()
    known = labels.target != V + 3
    labels.target[~known] = -100
    value, each = reduce.total_loss(labels, statistics, spec, weights)
    expected, _ = losses.total_loss(labels, statistics, spec, weights)
    torch.testing.assert_close(value, expected)
    assert not value.isnan()


@pytest.mark.parametrize("spec", [LossSpec(), SPEC], ids=["plain", "smoothed"])
@pytest.mark.parametrize("features", [(), ("class_weight", "token_weight")], ids=str)
@pytest.mark.parametrize("upstreams", ["none", "scalar", "of lse and entropy"])
@pytest.mark.parametrize("n", [0, 1, N, 700])
def test_coefficients(spec, features, upstreams, n):
    labels, token_weight = labels_of(features, n=n)
    generator = torch.Generator().manual_seed(5)
    rows = torch.randn(5, n, generator=generator)
    statistics = Statistics(rows[0], rows[1] * 1e-3, rows[2], mean_logit=rows[3])
    weight = losses.row_weights(labels, spec, token_weight, None, "sum", torch.float32)[0]
    more = {
        "none": {},
        "scalar": {"upstream": torch.tensor(-1.5)},
        "of lse and entropy": {"grad_lse": torch.tensor(0.5).expand(n), "grad_entropy": rows[4]},
    }[upstreams]
    ours = launched.coefficients(labels, statistics, weight, spec, **more)
    expected = losses.coefficients(labels, statistics, weight, spec, **more)
    for name in ("a", "b", "c", "e"):
        torch.testing.assert_close(getattr(ours, name), getattr(expected, name))


@pytest.mark.parametrize("coefficients", [launched.coefficients, losses.coefficients])
def test_a_row_that_does_not_count_stays_so_whatever_the_upstream_gradient(coefficients):
    labels, _ = labels_of(())
    weight = (labels.target != -100).float()
    statistics = Statistics(*torch.zeros(3, N))
    got = coefficients(labels, statistics, weight, SPEC, upstream=torch.tensor(float("nan")))
    for rows in (got.a, got.b, got.e):
        assert torch.equal(rows.isnan(), weight != 0)
    assert not got.a[weight == 0].any()
