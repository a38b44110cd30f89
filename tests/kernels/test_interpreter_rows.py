"""Row kernels through Triton's interpreter, against plain torch.

The interpreter rounds stores to bfloat16 toward zero, so those are left to the GPU.
"""

import pytest
import torch
from exactness import assert_as_exact
from loss_cases import make

from flce_tune.kernels import loss as losses
from flce_tune.kernels import torch_backend
from flce_tune.kernels.backends import logits_buffer
from flce_tune.kernels.values import Inputs, LossSpec, Wanted

triton_backend = pytest.importorskip("flce_tune.kernels.triton.backend")
scale = pytest.importorskip("flce_tune.kernels.triton.scale")

pytestmark = [
    pytest.mark.usefixtures("poison"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="compiled kernels run in tests/gpu"),
]
N, D, V = 11, 16, 150
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SPECS = {
    "plain": LossSpec(),
    "smoothed": LossSpec(label_smoothing=0.125, z_loss=0.03125),
    "capped and scaled": LossSpec(softcap=4.0, logit_scale=1.75),
}
EVERYTHING = Wanted(entropy=True, prediction=True)
STATISTICS = ("lse", "target_logit", "logit_sum", "mean_logit", "prediction")


def prepared(dtype, features=("ignored",)):
    """Inputs, with a label out of range."""
    case = make(N, D, V, dtype, features)
    case.target[4] = V + 3
    class_weight = case.options.get("class_weight")
    return Inputs(
        case.x, case.weight, case.target, case.bias,
        None if class_weight is None else class_weight.float(),
    )  # fmt: skip


def in_float64(inputs):
    return Inputs(
        inputs.x.double(), inputs.weight.double(), inputs.target,
        None if inputs.bias is None else inputs.bias.double(),
        None if inputs.class_weight is None else inputs.class_weight.double(),
    )  # fmt: skip


def stored_logits(inputs):
    raw = logits_buffer(len(inputs.x), len(inputs.weight), inputs.x)
    torch_backend.raw_logits(inputs, raw)
    return raw


@pytest.fixture(params=[16, 1024], ids=["small blocks", "one block"])
def block(request, monkeypatch):
    """Columns per step of the row kernels."""
    monkeypatch.setattr(triton_backend, "STATISTICS_LANES", request.param)
    monkeypatch.setattr(triton_backend, "GRADIENT", (4 * request.param, 2))


@pytest.mark.usefixtures("block")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("features", [("ignored",), ("bias", "class_weight")], ids=str)
def test_statistics_and_gradient_of_stored_logits(dtype, spec, features):
    inputs = prepared(dtype, features)
    raw = stored_logits(inputs)
    wide = raw.double()
    got = triton_backend.statistics(raw, inputs, spec, EVERYTHING)
    plain = torch_backend.statistics(raw, inputs, spec, EVERYTHING)
    exact = in_float64(inputs)
    truth = torch_backend.statistics(wide, exact, spec, EVERYTHING)
    for name in STATISTICS:
        value = getattr(truth, name)
        if value is None:
            assert getattr(got, name) is None
        elif name == "prediction":
            assert torch.equal(got.prediction, value)
        else:
            assert_as_exact(name, getattr(got, name), getattr(plain, name), value, torch.float32)

    if dtype == torch.bfloat16:
        return
    generator = torch.Generator().manual_seed(5)
    row_weight, grad_lse, grad_entropy = torch.randn(3, N, generator=generator)
    row_weight[inputs.target == -100] = 0
    grad_entropy[7] = grad_lse[7] = row_weight[7] = 0
    for upstreams in ((), (grad_lse, grad_entropy)):
        given = losses.coefficients(inputs, plain, row_weight, spec, *upstreams)
        exact_given = losses.coefficients(
            exact, truth, row_weight.double(), spec, *(u.double() for u in upstreams)
        )
        ours, theirs, right = raw.clone(), raw.clone(), wide.clone()
        triton_backend.gradient(ours, inputs, plain, given, spec, out=ours)
        torch_backend.gradient(theirs, inputs, plain, given, spec, out=theirs)
        torch_backend.gradient(right, exact, truth, exact_given, spec, out=right)
        assert_as_exact("gradient", ours, theirs, right, dtype)
        assert not ours[7].any()
        parts = raw.clone()
        for columns in (slice(0, 97), slice(97, V)):
            part = parts[:, columns]
            triton_backend.gradient(part, inputs, plain, given, spec, part, columns.start)
        assert torch.equal(parts.nan_to_num(7.0), ours.nan_to_num(7.0))


@pytest.mark.usefixtures("block")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("first", "stride"), [(0, V), (1, V + 3), (3, V + 16), (6, V)], ids=str)
def test_rows_may_begin_anywhere(dtype, first, stride):
    """The same bits as aligned rows; what lies between the rows is neither used nor written."""
    inputs = prepared(dtype, ("ignored", "class_weight"))
    spec = SPECS["plain"]
    raw = stored_logits(inputs)
    aligned = torch.full((N, V + 10), float("nan"), dtype=dtype)[:, :V].copy_(raw)
    flat = torch.full((first + N * stride + 8,), float("nan"), dtype=dtype)
    anywhere = flat[first:].as_strided((N, V), (stride, 1)).copy_(raw)
    right, got = (
        triton_backend.statistics(r, inputs, spec, EVERYTHING) for r in (aligned, anywhere)
    )
    assert torch.allclose(got.lse, right.lse, rtol=1e-6)
    assert torch.equal(got.target_logit.nan_to_num(7.0), right.target_logit.nan_to_num(7.0))
    assert torch.equal(got.prediction, right.prediction)
    given = losses.coefficients(inputs, right, torch.ones(N), spec)
    elsewhere = torch.full_like(raw, float("nan"))
    triton_backend.gradient(anywhere, inputs, right, given, spec, out=elsewhere)
    triton_backend.gradient(anywhere, inputs, right, given, spec, out=anywhere)
    triton_backend.gradient(aligned, inputs, right, given, spec, out=aligned)
    for out in (anywhere, elsewhere):
        assert torch.equal(out.nan_to_num(7.0), aligned.nan_to_num(7.0))
    anywhere.fill_(float("nan"))
    assert flat.isnan().all()


@pytest.mark.usefixtures("block")
def test_bug_015_statistics_of_rows_with_minus_infinities():
    raw = torch.full((5, V), -float("inf"))
    raw[0, 3] = raw[1, 70] = raw[2, V - 1] = 0.5
    raw[4] = 0.0
    inputs = Inputs(torch.zeros(5, 1), torch.zeros(V, 1), torch.tensor([3, 70, V - 1, 0, 0]))
    got = triton_backend.statistics(raw, inputs, LossSpec(), EVERYTHING)
    rows = losses.row_losses(inputs, got, LossSpec())
    assert rows[:3].tolist() == [0.0, 0.0, 0.0]
    assert rows[3].isnan()
    assert float(rows[4]) == pytest.approx(torch.tensor(float(V)).log().item())
    assert got.prediction[:3].tolist() == [3, 70, V - 1]
    assert (got.lse - got.mean_logit)[:3].tolist() == [0.0, 0.0, 0.0]
    given = losses.coefficients(inputs, got, torch.tensor([1.0, 1.0, 1.0, 0.0, 1.0]), LossSpec())
    triton_backend.gradient(raw, inputs, got, given, LossSpec(), out=raw)
    assert not raw[:4].any()
    assert torch.allclose(raw[4].sum(), torch.tensor(0.0), atol=1e-6)


@pytest.mark.parametrize("cap", [0.5, 30.0])
def test_softcap_of_small_logits(cap):
    """Every digit of float32, from a millionth of the cap to where it is all cap."""
    magnitudes = torch.logspace(-6, 1.5, V // 2)
    values = torch.cat([magnitudes, -magnitudes]) * cap
    raw = values.expand(V, V).contiguous()
    inputs = Inputs(torch.zeros(V, 1), torch.zeros(V, 1), torch.arange(V))
    spec = LossSpec(softcap=cap)
    got = triton_backend.statistics(raw, inputs, spec, Wanted()).target_logit
    truth = cap * torch.tanh(values.double() / cap)
    torch.testing.assert_close(got.double(), truth, rtol=3 * 2.0**-23, atol=0.0)


@pytest.mark.usefixtures("block")
def test_the_prediction_is_the_first_of_equal_maxima():
    raw = torch.zeros(4, V)
    for row, column in enumerate((0, 63, 64, 100)):
        raw[row, column:] = 1.0
    inputs = Inputs(torch.zeros(4, 1), torch.zeros(V, 1), torch.zeros(4, dtype=torch.int64))
    got = triton_backend.statistics(raw, inputs, LossSpec(), EVERYTHING)
    assert got.prediction.tolist() == [0, 63, 64, 100]


@pytest.mark.usefixtures("block")
def test_a_nan_logit_is_seen():
    raw = torch.zeros(2, V)
    raw[1, 77] = float("nan")
    inputs = Inputs(torch.zeros(2, 1), torch.zeros(V, 1), torch.zeros(2, dtype=torch.int64))
    got = triton_backend.statistics(raw, inputs, LossSpec(), Wanted())
    assert got.lse.isnan().tolist() == [False, True]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("factor", [1.0, 0.0, -2.5])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_scaling_in_place(dtype, factor, count):
    sizes = [(3, 1777), (9000,), (17,)][:count]
    tensors = [torch.randn(size).to(dtype) for size in sizes]
    expected = [(tensor.float() * factor).to(dtype) for tensor in tensors]
    scale.scale_unless_one(tensors, torch.tensor(factor))
    for tensor, wanted in zip(tensors, expected, strict=True):
        assert torch.equal(tensor, wanted)


@pytest.mark.parametrize("tensor", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("out", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("total", [1, 4096, 5331])
def test_adding_a_scaled_gradient(tensor, out, total):
    generator = torch.Generator().manual_seed(2)
    gradient = torch.randn(total, generator=generator).to(tensor)
    prior = torch.randn(total, generator=generator).to(out)
    around = torch.full((total + 2,), 7.0, dtype=out)
    around[1:-1] = prior
    scale.add_scaled(around[1:-1], gradient, torch.tensor(-2.5))
    expected = (prior.float() + gradient.float() * -2.5).to(out)
    ulp = torch.finfo(out).eps
    torch.testing.assert_close(around[1:-1], expected, rtol=ulp, atol=ulp / 8)
    assert around[[0, -1]].tolist() == [7.0, 7.0]
