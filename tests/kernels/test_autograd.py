"""Every corner of autograd: upstream gradients, second backwards, checkpoints, autocast."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from loss_cases import compare, make, run
from torch.utils.checkpoint import checkpoint

from flce_tune.kernels import reference
from flce_tune.kernels.config import Config
from flce_tune.kernels.module import LinearCrossEntropy
from flce_tune.kernels.op import linear_cross_entropy, linear_logprobs

pytestmark = pytest.mark.usefixtures("poison")

CONFIGS = {
    "chunked": Config("chunked", chunk=32),
    "full": Config("full"),
    "recompute": Config("recompute", slab=64),
}
N, D, V = 97, 24, 203
with_configs = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
with_reductions = pytest.mark.parametrize("reduction", ["mean", "none"])
with_dtypes = pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str
)


def leaves(case):
    return [t.detach().clone().requires_grad_() for t in (case.x, case.weight, case.bias)]


def loss_of(tensors, case, **keywords):
    x, weight, bias = tensors
    return linear_cross_entropy(x, weight, case.target, bias=bias, **case.options, **keywords)


@with_configs
@with_dtypes
@pytest.mark.parametrize("upstream", [3.7, 0.0, -1.0, 1024.0])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_bug_012_any_upstream_value(config, dtype, upstream, reduction):
    case = make(N, D, V, dtype, ("bias", "ignored"))
    compare(case, dtype, upstream=upstream, config=config, reduction=reduction)


@with_configs
def test_bug_012_small_fp16_gradients_survive_a_loss_scale(config):
    case = make(4096, 8, 64, torch.float16)
    got = run(linear_cross_entropy, case, upstream=65536.0, config=config)
    truth = run(reference.linear_cross_entropy, case.to(torch.float64), upstream=65536.0)
    for name in ("x", "weight"):
        error = (got[name].double() - truth[name]).norm() / truth[name].norm()
        assert float(error) < 2.0**-9, name


@with_configs
def test_bug_012_an_upstream_of_another_dtype(config):
    case = make(N, D, V, torch.bfloat16, ("bias",))
    tensors = leaves(case)
    loss = loss_of(tensors, case, config=config)
    (loss.double() * 4).backward()
    expected = run(linear_cross_entropy, case, upstream=4.0, config=config)
    assert torch.equal(tensors[0].grad, expected["x"])
    assert torch.equal(tensors[1].grad, expected["weight"])


@with_configs
@with_dtypes
def test_bug_001_one_upstream_value_per_token(config, dtype):
    case = make((2, 200), 10, 150, dtype, ("bias",))
    case.target[0, 0] = -100
    case.target[1, 5:9] = -100
    upstream = torch.randn(2, 200, generator=torch.Generator().manual_seed(1)).bfloat16()
    compare(case, dtype, upstream=upstream, config=config, reduction="none")
    upstream[0, 0] = 0
    upstream[0, 1] = 0
    compare(case, dtype, upstream=upstream, config=config, reduction="none")


@with_configs
@pytest.mark.parametrize("shape", [(N,), (48, 2)], ids=str)
def test_bug_008_an_expanded_upstream(config, shape):
    case = make(shape, D, V, torch.float32, ("bias",))
    expected = {
        kind: run(linear_cross_entropy, case, reduction=kind, config=config)
        for kind in ("sum", "mean")
    }
    for kind, wanted in expected.items():
        tensors = leaves(case)
        loss = loss_of(tensors, case, reduction="none", config=config)
        getattr(loss, kind)().backward()
        for tensor, name in zip(tensors, ("x", "weight", "bias"), strict=True):
            torch.testing.assert_close(tensor.grad, wanted[name], rtol=1e-4, atol=1e-6)


@with_configs
def test_bug_042_a_strided_upstream(config):
    case = make((8, 12), D, V, torch.float32, ("bias",))
    wide = torch.randn(12, 16, generator=torch.Generator().manual_seed(1))
    strided = wide[:, ::2].t()
    assert not strided.is_contiguous()
    compare(case, torch.float32, upstream=strided, config=config, reduction="none")
    flat = make(96, D, V, torch.float32, ("bias",))
    every_other = torch.randn(192, generator=torch.Generator().manual_seed(1))[::2]
    compare(flat, torch.float32, upstream=every_other, config=config, reduction="none")


@with_configs
@with_reductions
@with_dtypes
def test_bug_031_a_second_backward_with_another_upstream(config, reduction, dtype):
    case = make(N, D, V, dtype, ("bias", "ignored"))
    tensors = leaves(case)
    loss = loss_of(tensors, case, reduction=reduction, config=config)
    kept = []
    for factor, keep in ((2.0, True), (5.0, True), (1.0, False)):
        up = torch.full_like(loss, factor)
        got = torch.autograd.grad(loss, tensors, up, retain_graph=keep)
        kept.append((factor, got, [g.clone() for g in got]))
    for factor, got, copies in kept:
        expected = run(
            linear_cross_entropy, case, upstream=factor, reduction=reduction, config=config
        )
        for gradient, copied, name in zip(got, copies, ("x", "weight", "bias"), strict=True):
            assert torch.equal(gradient, copied), f"{name} changed after it was returned"
            assert torch.equal(gradient, expected[name]), name


@with_reductions
def test_bug_031_a_second_derivative_is_refused(reduction):
    case = make(N, D, V, torch.float32, ("bias",))
    tensors = leaves(case)
    loss = loss_of(tensors, case, reduction=reduction).sum()
    grads = torch.autograd.grad(loss, tensors, create_graph=True)
    assert grads[0].requires_grad, "a gradient without a graph would count as a constant"
    with pytest.raises(RuntimeError):
        grads[0].square().sum().backward()


@with_reductions
def test_only_some_gradients_now_and_the_rest_later(reduction):
    case = make(N, D, V, torch.float32, ("bias",))
    tensors = leaves(case)
    loss = loss_of(tensors, case, reduction=reduction).sum()
    (dx,) = torch.autograd.grad(loss, tensors[:1], retain_graph=True)
    dw, db = torch.autograd.grad(loss, tensors[1:])
    expected = run(linear_cross_entropy, case, reduction=reduction)
    for got, name in ((dx, "x"), (dw, "weight"), (db, "bias")):
        assert torch.equal(got, expected[name]), name


@with_configs
@with_reductions
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_bug_017_inputs_are_never_written(config, reduction, dtype):
    case = make(N, D, V, dtype, ("bias", "class_weight", "token_weight", "ignored"))
    p = case.x.float().requires_grad_()
    x = torch.tanh(p).to(dtype)
    given = [x, case.weight, case.target, case.bias, *case.options.values()]
    before = [(t.detach().clone(), t._version) for t in given]
    loss = linear_cross_entropy(
        x, case.weight, case.target, bias=case.bias, reduction=reduction, config=config,
        **case.options,
    )  # fmt: skip
    (loss.sum() + x.float().square().sum()).backward()
    for tensor, (copied, version) in zip(given, before, strict=True):
        assert torch.equal(tensor.detach(), copied)
        assert tensor._version == version
    q = case.x.float().requires_grad_()
    y = torch.tanh(q).to(dtype)
    plain = run(linear_cross_entropy, type(case)(y, *given[1:4], case.options),
                ("x",), reduction=reduction, config=config)["x"]  # fmt: skip
    y.backward(plain + 2 * y.detach())
    torch.testing.assert_close(p.grad, q.grad, rtol=2.0**-7, atol=2.0**-9)


@with_configs
@with_reductions
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(config, reduction, reentrant):
    case = make(N, D, V, torch.float32, ("bias", "ignored"))
    tensors = leaves(case)
    loss = checkpoint(
        lambda *t: loss_of(t, case, reduction=reduction, config=config).sum() * 3,
        *tensors, use_reentrant=reentrant,
    )  # fmt: skip
    loss.backward()
    expected = run(linear_cross_entropy, case, upstream=3.0, reduction=reduction, config=config)
    for tensor, name in zip(tensors, ("x", "weight", "bias"), strict=True):
        assert torch.equal(tensor.grad, expected[name]), name


@with_reductions
def test_gradient_accumulation_adds_up(reduction):
    case = make(N, D, V, torch.float32, ("bias",))
    tensors = leaves(case)
    for _ in range(3):
        loss_of(tensors, case, reduction=reduction).sum().backward()
    expected = run(linear_cross_entropy, case, reduction=reduction)
    for tensor, name in zip(tensors, ("x", "weight", "bias"), strict=True):
        torch.testing.assert_close(tensor.grad, 3 * expected[name])


def test_micro_batches_with_one_divisor_equal_the_whole_batch():
    case = make(96, D, V, torch.float32, ("bias", "ignored"))
    whole = run(linear_cross_entropy, case)
    counted = (case.target != -100).sum()
    tensors = leaves(case)
    total = 0.0
    for part in (slice(0, 10), slice(10, 50), slice(50, 96)):
        x, weight, bias = tensors
        loss = linear_cross_entropy(x[part], weight, case.target[part], bias=bias, divisor=counted)
        loss.backward()
        total += float(loss)
    assert total == pytest.approx(float(whole["loss"]), rel=1e-6)
    for tensor, name in zip(tensors, ("x", "weight", "bias"), strict=True):
        torch.testing.assert_close(tensor.grad, whole[name], rtol=1e-5, atol=1e-7)


def test_bug_026_mixed_dtypes_are_promoted():
    case = make(N, D, V, torch.float32, ("bias", "ignored"))
    expected = run(linear_cross_entropy, case)
    for x, weight, bias in (
        (torch.bfloat16, torch.float32, torch.float16),
        (torch.float32, torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.float16, torch.float32),
    ):
        mixed = type(case)(case.x.to(x), case.weight.to(weight), case.target, case.bias.to(bias))
        got = run(linear_cross_entropy, mixed)
        assert torch.equal(got["loss"], expected["loss"])
        for name, dtype in (("x", x), ("weight", weight), ("bias", bias)):
            assert got[name].dtype == dtype
            assert torch.equal(got[name], expected[name].to(dtype))


@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("x", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("weight", [torch.float32, torch.bfloat16], ids=str)
@with_reductions
def test_bug_026_autocast(autocast, x, weight, reduction):
    case = make(N, D, V, torch.float32, ("bias", "ignored"))
    mixed = type(case)(case.x.to(x), case.weight.to(weight), case.target, case.bias)
    with torch.autocast("cpu", autocast):
        got = run(linear_cross_entropy, mixed, reduction=reduction)
    low = run(linear_cross_entropy, case.to(autocast), reduction=reduction)
    assert got["loss"].dtype == torch.float32
    assert torch.equal(got["loss"], low["loss"])
    for name, dtype in (("x", x), ("weight", weight), ("bias", torch.float32)):
        assert got[name].dtype == dtype
        assert torch.equal(got[name], low[name].to(dtype)), name


def test_autocast_leaves_float64_alone():
    case = make(N, D, V, torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        got = run(linear_cross_entropy, case)
    assert torch.equal(got["loss"], run(linear_cross_entropy, case)["loss"])


@with_configs
@with_reductions
def test_bug_013_the_loss_does_not_depend_on_who_needs_a_gradient(config, reduction):
    case = make(4, 3, 5, torch.float32, ("bias",))
    expected = F.cross_entropy(
        F.linear(case.x, case.weight, case.bias), case.target, reduction=reduction
    )
    for needs in ((), ("x",), ("weight",), ("bias",)):
        tensors = [t.detach().clone() for t in (case.x, case.weight, case.bias)]
        for tensor, name in zip(tensors, ("x", "weight", "bias"), strict=True):
            tensor.requires_grad_(name in needs)
        loss = loss_of(tensors, case, reduction=reduction, config=config)
        assert loss.requires_grad == bool(needs)
        torch.testing.assert_close(loss, expected)
        if needs:
            loss.sum().backward()
        assert [t.grad is not None for t in tensors] == [
            n in needs for n in ("x", "weight", "bias")
        ]
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            tensors = [t.clone() for t in (case.x, case.weight, case.bias)]
            loss = loss_of(tensors, case, reduction=reduction, config=config)
            torch.testing.assert_close(loss, expected)
            assert not loss.requires_grad


@with_configs
@pytest.mark.parametrize(
    "features", [("bias", "softcap", "logit_scale"), ("label_smoothing", "class_weight"),
                 ("z_loss", "token_weight", "ignored")], ids=str,
)  # fmt: skip
@with_reductions
def test_gradcheck_in_float64(config, features, reduction):
    case = make(5, 3, 7, torch.float64, features)
    inputs = [t.requires_grad_() for t in (case.x, case.weight, case.bias) if t is not None]

    def loss(x, weight, bias=None):
        return loss_of((x, weight, bias), case, reduction=reduction, config=config)

    assert torch.autograd.gradcheck(loss, inputs)


@with_configs
def test_gradcheck_of_logprobs_and_of_the_lse(config):
    case = make(5, 3, 7, torch.float64, ("bias", "ignored"))
    inputs = [t.requires_grad_() for t in (case.x, case.weight, case.bias)]

    def logprobs(x, weight, bias):
        return linear_logprobs(
            x, weight, case.target, bias=bias, temperature=0.7, softcap=2.0, config=config
        )

    def with_lse(x, weight, bias):
        return loss_of((x, weight, bias), case, return_lse=True, config=config)

    assert torch.autograd.gradcheck(logprobs, inputs)
    assert torch.autograd.gradcheck(with_lse, inputs)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_gradcheck_of_token_weights(reduction):
    case = make(5, 3, 7, torch.float64, ("ignored", "class_weight"))
    weights = torch.tensor([1.0, 2.0, 0.5, 3.0, 1.5], dtype=torch.float64, requires_grad=True)

    def loss(token_weight):
        return linear_cross_entropy(
            case.x, case.weight, case.target, token_weight=token_weight, reduction=reduction,
            **case.options,
        )  # fmt: skip

    assert torch.autograd.gradcheck(loss, weights)


def test_the_module_is_the_function_with_its_options_held():
    class_weight = torch.rand(V) + 0.5
    options = {"softcap": 3.0, "label_smoothing": 0.1, "reduction": "sum", "ignore_index": 3}
    module = LinearCrossEntropy(class_weight=class_weight, **options)
    case = make(N, D, V, torch.float32, ("bias", "token_weight"))
    for twin in (module, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        got = run(twin, case)
        expected = run(linear_cross_entropy, case, class_weight=class_weight, **options)
        for name, value in got.items():
            assert torch.equal(value, expected[name]), name
    assert list(module.parameters()) == []
    assert module.state_dict() == {}
    assert "softcap=3.0" in repr(module)
    assert module.double().class_weight.dtype == torch.float64


@with_reductions
def test_saved_tensor_hooks_see_what_is_saved(reduction):
    case = make(N, D, V, torch.float32, ("bias",))
    tensors = leaves(case)
    with torch.autograd.graph.save_on_cpu():
        loss = loss_of(tensors, case, reduction=reduction).sum()
    loss.backward()
    expected = run(linear_cross_entropy, case, reduction=reduction)
    for tensor, name in zip(tensors, ("x", "weight", "bias"), strict=True):
        assert torch.equal(tensor.grad, expected[name]), name
