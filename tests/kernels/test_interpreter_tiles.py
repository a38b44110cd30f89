"""GEMM kernels through Triton's interpreter (whose bfloat16 products are wrong: float16 here)."""

from dataclasses import replace

import pytest
import torch
from exactness import assert_as_exact
from loss_cases import make

from flce_tune.kernels import loss as losses
from flce_tune.kernels import torch_backend
from flce_tune.kernels.backends import logits_buffer
from flce_tune.kernels.config import Tile
from flce_tune.kernels.values import Inputs, LossSpec, Wanted

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
triton_backend = pytest.importorskip("flce_tune.kernels.triton.backend")
launch = pytest.importorskip("flce_tune.kernels.triton.launch")
product = pytest.importorskip("flce_tune.kernels.triton.product")

pytestmark = [
    pytest.mark.usefixtures("poison"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="compiled kernels run in tests/gpu"),
]
N, D, V = 40, 48, 200
TILE = Tile(16, 64, 16, num_warps=4, num_stages=2, group=2)
SPECS = {
    "plain": LossSpec(),
    "smoothed": LossSpec(label_smoothing=0.125, z_loss=0.03125),
    "capped": LossSpec(softcap=4.0),
    "scaled": LossSpec(logit_scale=1.75),
    "everything": LossSpec(-100, 0.125, 4.0, 1.75, 0.03125),
}
FEATURES = ((), ("bias", "class_weight"))
EVERYTHING = Wanted(entropy=True, prediction=True)
STATISTICS = ("lse", "target_logit", "logit_sum", "mean_logit", "prediction")


def prepared(dtype, features, vocab=V):
    case = make(N, D, vocab, dtype, ("ignored", *features))
    case.target[4], case.target[5] = vocab + 3, -7
    case.target[7], case.target[8] = 0, vocab - 1
    class_weight = case.options.get("class_weight")
    if class_weight is not None:
        class_weight = class_weight.float()
    inputs = Inputs(case.x, case.weight, case.target, case.bias, class_weight)
    exact = Inputs(*(
        t.double() if t is not None and t.is_floating_point() else t
        for t in (case.x, case.weight, case.target, case.bias, class_weight)
    ))  # fmt: skip
    return inputs, exact


def nan_logits(inputs):
    return logits_buffer(len(inputs.x), len(inputs.weight), inputs.x)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("features", FEATURES, ids=str)
@pytest.mark.parametrize("vocab", [V, 192])
def test_logits_and_their_statistics(dtype, spec, features, vocab):
    inputs, exact = prepared(dtype, features, vocab)
    stored, plain_stored = nan_logits(inputs), nan_logits(inputs)
    exact_stored = nan_logits(exact)
    plain = torch_backend.logits(inputs, spec, EVERYTHING, plain_stored, None)
    truth = torch_backend.logits(exact, spec, EVERYTHING, exact_stored, None)
    with_store = triton_backend.logits(inputs, spec, EVERYTHING, stored, TILE)
    assert_as_exact("logits", stored, plain_stored, exact_stored, dtype)
    of_stored = torch_backend.statistics(stored.double(), exact, spec, EVERYTHING)
    without = triton_backend.logits(inputs, spec, EVERYTHING, None, TILE)
    for name in STATISTICS:
        right = getattr(truth, name)
        if right is None:
            assert getattr(with_store, name) is None
            assert getattr(without, name) is None
        elif name == "prediction":
            assert torch.equal(without.prediction, right)
            assert torch.equal(with_store.prediction, of_stored.prediction)
        else:
            value = getattr(plain, name)
            assert_as_exact(name, getattr(with_store, name), value, right, dtype)
            assert_as_exact(name, getattr(without, name), value, right, dtype)
            # what is stored is what the statistics are of
            close = getattr(of_stored, name).float()
            torch.testing.assert_close(
                getattr(with_store, name), close, rtol=1e-5, atol=1e-4, equal_nan=True
            )


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("features", FEATURES, ids=str)
@pytest.mark.parametrize("on_statistics", [False, True])
def test_slabs_of_the_gradient(dtype, spec, features, on_statistics):
    inputs, exact = prepared(dtype, features)
    plain_out, right = nan_logits(inputs), nan_logits(exact)
    plain = torch_backend.logits(inputs, spec, EVERYTHING, plain_out, None)
    plain = replace(plain, lse_low=torch.zeros(N))  # tiles subtract lse·log2(e), rounded, as one
    truth = torch_backend.logits(exact, spec, EVERYTHING, right, None)
    ours = triton_backend.logits(inputs, spec, EVERYTHING, None, TILE)
    generator = torch.Generator().manual_seed(5)
    row_weight, *upstreams = torch.randn(3, N, generator=generator)
    row_weight[inputs.target == -100] = 0
    upstreams = upstreams if on_statistics else []

    def coefficients(inputs, statistics):
        dtype = statistics.lse.dtype
        return losses.coefficients(
            inputs, statistics, row_weight.to(dtype), spec, *(u.to(dtype) for u in upstreams)
        )

    torch_backend.gradient(
        plain_out, inputs, plain, coefficients(inputs, plain), spec, out=plain_out
    )
    torch_backend.gradient(right, exact, truth, coefficients(exact, truth), spec, out=right)
    out = nan_logits(inputs)
    for columns in (slice(0, 128), slice(128, V)):
        triton_backend.slab_gradient(
            inputs, columns, ours, coefficients(inputs, ours), spec, out[:, columns], TILE
        )
    known = (inputs.target < V) & ((inputs.target >= 0) | (inputs.target == -100))
    assert_as_exact("gradient", out[known], plain_out[known], right[known], dtype)
    if not on_statistics:
        assert not out[inputs.target == -100].any()


def test_bug_002_logits_far_below_zero_and_a_ragged_tile():
    inputs, _ = prepared(torch.float32, ())
    inputs = Inputs(inputs.x * 0, inputs.weight, inputs.target, torch.full((V,), -20.0))
    for out in (None, nan_logits(inputs)):
        got = triton_backend.logits(inputs, LossSpec(), Wanted(), out, TILE)
        expected = torch.full((N,), V).log() - 20
        torch.testing.assert_close(got.lse, expected)


@pytest.mark.parametrize("place", [0, 63, 64, V - 1])
@pytest.mark.parametrize("store", [False, True])
def test_bug_015_tiles_of_minus_infinities(place, store):
    bias = torch.full((V,), -float("inf"))
    bias[place] = 0.5
    target = torch.full((3,), place)
    target[2] = (place + 1) % V
    inputs = Inputs(torch.zeros(3, D), torch.zeros(V, D), target, bias)
    out = nan_logits(inputs) if store else None
    spec = LossSpec()
    got = triton_backend.logits(inputs, spec, EVERYTHING, out, TILE)
    assert losses.row_losses(inputs, got, spec).tolist() == [0.0, 0.0, float("inf")]
    assert got.prediction.tolist() == [place] * 3
    assert (got.lse - got.mean_logit).tolist() == [0.0] * 3
    given = losses.coefficients(inputs, got, torch.ones(3), spec)
    gradient = nan_logits(inputs)
    triton_backend.slab_gradient(inputs, slice(0, V), got, given, spec, gradient, TILE)
    expected = torch.zeros(3, V)
    expected[2, place], expected[2, target[2]] = 1.0, -1.0
    assert torch.equal(gradient, expected)


def operands(dtype, transposed, m=40, k=88, n=48):
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(m, k, generator=generator).to(dtype)
    b = torch.randn(k, n, generator=generator).to(dtype)
    if transposed:
        stored = logits_buffer(k, m, a)
        a = stored.copy_(a.t()).t()
    return a, b


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("contraction", ["v", "n"])
def test_a_product_written_once(transposed, dtype, contraction):
    a, b = operands(dtype, transposed)
    out = torch.full((40, 48), float("nan"), dtype=dtype)
    tile = Tile(16, 32, 32, 4, 2, 2)
    launch.launch_product(a, b, out, None, tile, contraction, "weight_dtype", False, True)
    assert_as_exact("product", out, a @ b, a.double() @ b.double(), dtype)


PARTS = 5


def accumulate(out, extra, transposed, accumulator, last):
    """The exact sum, after adding PARTS products; ``last``: round the result into ``out``."""
    rows = len(out)
    truth = torch.zeros(out.shape, dtype=torch.float64)
    for part in range(PARTS):
        a, b = operands(torch.float16, transposed, m=rows)
        a *= part - 2.5
        truth += a.double() @ b.double()
        launch.launch_product(
            a, b, out, extra, Tile(16, 16, 32, 4, 2, 2), "v", accumulator,
            part > 0, last and part == PARTS - 1,
        )  # fmt: skip
    return truth


with_shapes = pytest.mark.parametrize(
    ("transposed", "rows"), [(False, 40), (True, 40), (False, 33), (True, 33)]
)


@with_shapes
def test_a_float32_sum_of_products_rounds_once(transposed, rows):
    out = torch.full((rows, 48), float("nan"), dtype=torch.float16)
    extra = torch.full((rows, 48), float("nan"))
    truth = accumulate(out, extra, transposed, "fp32", last=True)
    assert_as_exact("sum", out, truth.half(), truth, torch.float16)


@with_shapes
def test_a_split24_sum_of_products_keeps_17_bits(transposed, rows):
    out = torch.full((rows, 48), float("nan"), dtype=torch.bfloat16)
    extra = torch.full((rows, 48), 255, dtype=torch.uint8)
    truth = accumulate(out, extra, transposed, "split24", last=False)
    bits = (out.view(torch.int16).int() << 16) | (extra.int() << 8)
    error = (bits.view(torch.float32) - truth).abs().max()
    assert float(error) <= PARTS * 2.0**-17 * float(truth.abs().max())
    truth += accumulate_last(out, extra, transposed)
    truncated = (out - truth).abs().max()  # the interpreter rounds to bfloat16 toward zero
    assert float(truncated) <= 2.0**-7 * float(truth.abs().max())


def accumulate_last(out, extra, transposed):
    a, b = operands(torch.float16, transposed, m=len(out))
    launch.launch_product(a, b, out, extra, Tile(16, 16, 32, 4, 2, 2), "v", "split24", True, True)
    return a.double() @ b.double()


def test_a_sum_in_the_weights_dtype_rounds_every_time():
    out = torch.full((40, 48), float("nan"), dtype=torch.float16)
    expected = torch.zeros(40, 48, dtype=torch.float16)
    for part in range(PARTS):
        a, b = operands(torch.float16, False)
        expected = (expected.float() + a.float() @ b.float()).half()
        launch.launch_product(
            a, b, out, None, Tile(16, 16, 32, 4, 2, 2), "v", "weight_dtype",
            part > 0, part == PARTS - 1,
        )  # fmt: skip
    torch.testing.assert_close(out, expected, rtol=2.0**-10, atol=0.0)


@triton.jit
def split_kernel(value_ptr, high_ptr, low_ptr, back_ptr, BLOCK: tl.constexpr):
    places = tl.arange(0, BLOCK)
    high, low = product.narrow(tl.load(value_ptr + places))
    tl.store(high_ptr + places, high)
    tl.store(low_ptr + places, low)
    tl.store(back_ptr + places, product.widen(high, low))


def split24(value):
    """Through the kernel: the bfloat16, the byte, and both put together again."""
    value = value.contiguous()
    high = torch.empty(value.shape, dtype=torch.bfloat16)
    low = torch.empty(value.shape, dtype=torch.uint8)
    back = torch.empty_like(value)
    split_kernel[(1,)](value, high, low, back, BLOCK=len(value))
    return high, low, back


def test_split24_keeps_the_upper_24_bits_rounded_to_nearest():
    bits = torch.randint(-(2**31), 2**31, (4096,), generator=torch.Generator().manual_seed(0))
    value = bits.to(torch.int32).view(torch.float32)
    value = torch.where(value.isfinite() & (value.abs() < 3.4e38), value, 1.0)
    high, low, back = split24(value)
    expected = (value.view(torch.int32).long() + 0x80) & ~0xFF
    assert torch.equal(back.view(torch.int32).long(), expected)
    joined = (high.view(torch.int16).long() & 0xFFFF) << 16 | low.long() << 8
    assert torch.equal(joined, expected & 0xFFFFFFFF)


def test_split24_of_special_values():
    value = torch.tensor([
        0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1.0, -1.0, 2.0**-126,
    ])  # fmt: skip
    _, _, back = split24(value)
    assert torch.equal(back[:4], value[:4])
    assert back[4].isnan()
    assert torch.equal(back[5:], value[5:])
    assert torch.signbit(back[1])
