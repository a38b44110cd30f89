"""Row factors and labels' gradients through Triton's interpreter, against torch's operators."""

from dataclasses import replace

import pytest
import torch
from loss_cases import make

from flce_tune.kernels import loss as losses
from flce_tune.kernels import torch_numerators
from flce_tune.kernels.strategies.labels import _sorted_by_chunk
from flce_tune.kernels.values import Inputs, LossSpec, Statistics

kernels = pytest.importorskip("flce_tune.kernels.triton.factors")

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),
    pytest.mark.usefixtures("poison"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="compiled kernels run in tests/gpu"),
]
N, V = 200, 37
SPECS = {
    "plain": LossSpec(),
    "all it knows": LossSpec(ignore_index=-100, logit_scale=1.75, z_loss=0.03125),
}
with_specs = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
with_weights = pytest.mark.parametrize("features", [(), ("class_weight",)], ids=["", "weights"])


def case(features):
    """Inputs, row weights, this rank's statistics and totals, in double precision."""
    given = make(N, 8, V, torch.float64, ("ignored", *features))
    weight = given.options.get("class_weight")
    inputs = Inputs(given.x, given.weight, given.target, None, weight)
    inputs.target[3], inputs.target[4], inputs.target[9] = V + 2, -7, 5
    known = (inputs.target >= 0) & (inputs.target < V)
    row_weight = (inputs.target != -100).double() / N
    row_weight[4] = row_weight[9] = 0.0
    row_weight[6] = -0.5
    generator = torch.Generator().manual_seed(3)
    lse, low, below, total = torch.rand(4, N, generator=generator, dtype=torch.float64)
    lse, low = 9 * lse, 1e-7 * (low - 0.5)
    label = torch.where(known, lse - 9 * below, torch.nan)
    lse[9] = total[9] = torch.inf  # a row of infinite logits that does not count
    total[11] = torch.nan
    return inputs, row_weight, Statistics(lse, low, label), total + 0.5


def as_float32(inputs, row_weight, statistics, total):
    weight = None if inputs.class_weight is None else inputs.class_weight.float()
    rounded = (statistics.lse, statistics.lse_low, statistics.target_logit)
    return (
        replace(inputs, class_weight=weight),
        row_weight.float(),
        Statistics(*(vector.float() for vector in rounded)),
        total.float(),
    )


def compare(ours, expected, rtol=2e-6, atol=1e-9):
    for name in ("row", "label", "ordered"):
        got, wanted = getattr(ours, name), getattr(expected, name)
        torch.testing.assert_close(
            got.double(), wanted.double(), rtol=rtol, atol=atol, equal_nan=True, msg=name
        )


@with_specs
@with_weights
@pytest.mark.parametrize("told", [False, True], ids=["own coefficients", "given ones"])
def test_factors(told, features, spec):
    inputs, row_weight, statistics, total = as_float32(*case(features))
    given = losses.coefficients(inputs, statistics, row_weight, spec) if told else None
    arguments = (inputs, total, statistics, statistics, given, row_weight, spec)
    ours, expected = kernels.factors(*arguments), torch_numerators.factors(*arguments)
    compare(ours, expected)
    assert ours.row[3].isnan()  # a label out of range
    assert ours.row[11].isnan()
    assert not ours.label[[3, 4]].any()
    for row in (4, 9):  # no weight
        if not (spec.z_loss and row == 9):
            assert ours.row[row] == ours.label[row] == 0.0
    assert ours.ordered is ours.label


@with_specs
def test_in_the_order_of_labels(spec):
    inputs, row_weight, statistics, total = as_float32(*case(("class_weight",)))
    _, order = _sorted_by_chunk(inputs.target, V, ())
    arguments = (inputs, total, statistics, statistics, None, row_weight, spec, order + 512, 512)
    ours = kernels.factors(*arguments)
    compare(ours, torch_numerators.factors(*arguments))
    assert torch.equal(ours.ordered, ours.label[order])


def test_columns_that_other_ranks_have():
    inputs, row_weight, local, total = as_float32(*case(()))
    merged = replace(local, lse=local.lse + torch.rand(N), lse_low=local.lse_low * 0.5)
    local.lse[20] = -torch.inf  # no share at all
    given = losses.coefficients(inputs, merged, row_weight, LossSpec())
    given.b[::2] = 0.0  # others' labels
    poisoned = replace(merged, lse=merged.lse.clone())
    poisoned.lse[31] = torch.nan  # a label that nobody has
    arguments = (inputs, total, local, poisoned, given, row_weight, LossSpec())
    ours = kernels.factors(*arguments)
    compare(ours, torch_numerators.factors(*arguments))
    assert ours.row[20] == 0.0
    assert ours.row[31].isnan()
    assert not ours.label[::2].any()


@pytest.mark.parametrize("confidence", [1e-1, 1e-3, 1e-5, 1e-7])
def test_confident_rows_lose_nothing(confidence):
    """p - 1 in float32, with what the lse's rounding left out, as in double precision."""
    inputs, row_weight, _, total = case(())
    lse = torch.full((N,), 3.0, dtype=torch.float64)
    label = lse - round(confidence * 2**20) / 2**20
    exact = (inputs, row_weight, Statistics(lse, 0 * lse + confidence / 7, label), total)
    results = []
    for factors, (some, weights, statistics, sums) in (
        (kernels.factors, as_float32(*exact)),
        (torch_numerators.factors, exact),
    ):
        results.append(factors(some, sums, statistics, statistics, None, weights, LossSpec()))
    compare(*results, rtol=1e-6, atol=1e-12)
