"""``grad_weight_out``: weight's gradient added to a buffer in backward."""

import pytest
import torch
from exactness import assert_as_exact
from loss_cases import make, run
from torch.utils.checkpoint import checkpoint

from flce_tune.kernels import reference
from flce_tune.kernels.config import Config
from flce_tune.kernels.module import LinearCrossEntropy
from flce_tune.kernels.op import linear_cross_entropy

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
    "dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str
)


def leaves(case):
    return [t.detach().clone().requires_grad_() for t in (case.x, case.weight, case.bias)]


def loss_of(tensors, case, **keywords):
    x, weight, bias = tensors
    loss = linear_cross_entropy(x, weight, case.target, bias=bias, **case.options, **keywords)
    return loss.sum()


def prior(dtype=torch.float32):
    values = torch.randn(V, D, generator=torch.Generator().manual_seed(3))
    return values.to(torch.bfloat16).to(dtype)


@with_configs
@with_reductions
@with_dtypes
@pytest.mark.parametrize("upstream", [1.0, -3.7])
def test_the_gradient_is_added_as_exactly_as_plain_torch_adds(config, reduction, dtype, upstream):
    case = make(N, D, V, dtype, ("bias", "ignored", "label_smoothing"))
    tensors, buffer = leaves(case), prior()
    loss = loss_of(tensors, case, reduction=reduction, config=config, grad_weight_out=buffer)
    assert torch.equal(buffer, prior()), "written before backward"
    (loss * upstream).backward()
    assert tensors[1].grad is None
    sums = []
    for kind in (dtype, torch.float64):
        got = run(reference.linear_cross_entropy, case.to(kind), upstream=upstream,
                  reduction=reduction)  # fmt: skip
        sums.append(prior(torch.float64) + got["weight"].double())
    assert_as_exact("buffer", buffer, *sums, torch.float32 if dtype == torch.float64 else dtype)
    ours = run(linear_cross_entropy, case, upstream=upstream, reduction=reduction, config=config)
    assert torch.equal(tensors[0].grad, ours["x"])
    assert torch.equal(tensors[2].grad, ours["bias"])


@with_configs
@with_dtypes
def test_an_upstream_factor_costs_no_second_rounding(config, dtype):
    case = make(N, D, V, dtype, ("bias",))
    tensors, buffer = leaves(case), torch.zeros(V, D)
    (loss_of(tensors, case, config=config, grad_weight_out=buffer) * 3).backward()
    once = run(linear_cross_entropy, case, config=config)["weight"]
    if dtype == torch.float16:  # whose gradient waits for the factor in float32
        torch.testing.assert_close(buffer, 3 * once.float(), rtol=2.0**-10, atol=2.0**-22)
    else:
        torch.testing.assert_close(buffer, 3 * once.float(), rtol=1e-6, atol=0)


@with_reductions
def test_a_buffer_of_the_weights_dtype(reduction):
    case = make(N, D, V, torch.bfloat16, ("bias",))
    tensors, buffer = leaves(case), prior(torch.bfloat16)
    (loss_of(tensors, case, reduction=reduction, grad_weight_out=buffer) * 4).backward()
    own = run(linear_cross_entropy, case, upstream=4.0, reduction=reduction)["weight"]
    assert buffer.dtype == torch.bfloat16
    assert torch.equal(buffer, (prior() + own.float()).to(torch.bfloat16))


@with_reductions
def test_every_backward_adds(reduction):
    case = make(N, D, V, torch.float64, ("bias",))
    own = run(linear_cross_entropy, case, reduction=reduction)["weight"]
    tensors, buffer = leaves(case), torch.zeros(V, D, dtype=torch.float64)
    loss = loss_of(tensors, case, reduction=reduction, grad_weight_out=buffer)
    (loss * 2).backward(retain_graph=True)
    (loss * -5).backward(retain_graph=True)
    torch.autograd.grad(loss, tensors[0])
    torch.testing.assert_close(buffer, -2 * own)
    losses = [loss_of(tensors, case, reduction=reduction, grad_weight_out=buffer) for _ in range(2)]
    losses[1].backward()
    losses[0].backward()
    torch.testing.assert_close(buffer, 0 * own)
    assert tensors[1].grad is None


def test_micro_batches_add_up_to_the_whole_batch():
    case = make(96, D, V, torch.float32, ("bias", "ignored"))
    whole = run(linear_cross_entropy, case)["weight"]
    counted = (case.target != -100).sum()
    (x, weight, bias), buffer = leaves(case), torch.zeros(V, D)
    for part in (slice(0, 10), slice(10, 50), slice(50, 96)):
        linear_cross_entropy(
            x[part], weight, case.target[part], bias=bias, divisor=counted, grad_weight_out=buffer
        ).backward()
    torch.testing.assert_close(buffer, whole, rtol=1e-5, atol=1e-7)


@with_reductions
def test_other_uses_of_the_weight_keep_their_gradient(reduction):
    case = make(N, D, V, torch.float32, ("bias",))
    tensors, buffer = leaves(case), torch.zeros(V, D)
    runs = []
    tensors[1].register_post_accumulate_grad_hook(lambda p: runs.append(p.grad.clone()))
    loss = loss_of(tensors, case, reduction=reduction, grad_weight_out=buffer)
    (loss + 2 * tensors[1].sum()).backward()
    assert torch.equal(tensors[1].grad, torch.full((V, D), 2.0))
    assert len(runs) == 1
    assert torch.equal(buffer, run(linear_cross_entropy, case, reduction=reduction)["weight"])


@with_reductions
def test_under_autocast_and_checkpointing(reduction):
    case = make(N, D, V, torch.float32, ("bias",))
    tensors, buffer = leaves(case), torch.zeros(V, D)
    with torch.autocast("cpu", torch.bfloat16):
        loss_of(tensors, case, reduction=reduction, grad_weight_out=buffer).backward()
        own = run(linear_cross_entropy, case, reduction=reduction)["weight"]
    assert torch.equal(buffer, own)
    own = run(linear_cross_entropy, case, reduction=reduction)["weight"]
    for reentrant in (False, True):
        buffer.zero_()
        loss = checkpoint(
            lambda *t: loss_of(t, case, reduction=reduction, grad_weight_out=buffer),
            *tensors, use_reentrant=reentrant,
        )  # fmt: skip
        assert not buffer.any()
        loss.backward()
        assert torch.equal(buffer, own)


@with_reductions
@pytest.mark.parametrize("tokens", ["none", "ignored"])
def test_no_tokens_add_nothing(reduction, tokens):
    case = make(0 if tokens == "none" else N, D, V, torch.float32, ("bias",))
    case.target.fill_(-100)
    tensors, buffer = leaves(case), prior()
    loss_of(tensors, case, reduction=reduction, grad_weight_out=buffer).backward()
    assert torch.equal(buffer, prior())


def test_without_gradients_nothing_is_added():
    case = make(N, D, V, torch.float32, ("bias",))
    tensors, buffer = leaves(case), prior()
    with torch.no_grad():
        loss = loss_of(tensors, case, grad_weight_out=buffer)
    assert not loss.requires_grad
    assert torch.equal(buffer, prior())


def test_the_module_takes_it_per_call():
    case = make(N, D, V, torch.float32, ("bias",))
    (x, weight, bias), buffer = leaves(case), torch.zeros(V, D)
    LinearCrossEntropy()(x, weight, case.target, bias=bias, grad_weight_out=buffer).backward()
    assert torch.equal(buffer, run(linear_cross_entropy, case)["weight"])


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@with_reductions
def test_in_one_compiled_graph(backend, reduction):
    torch._dynamo.reset()
    case = make(N, D, V, torch.float32, ("bias",))
    own = run(linear_cross_entropy, case, reduction=reduction)["weight"]
    tensors, buffer = leaves(case), torch.zeros(V, D)

    def step(x, weight, bias, buffer):
        return loss_of((x * 1, weight, bias), case, reduction=reduction, grad_weight_out=buffer)

    compiled = torch.compile(step, backend=backend, fullgraph=True)
    for _ in range(2):
        (compiled(*tensors, buffer) * 3).backward()
    torch.testing.assert_close(buffer, 6 * own)
    assert tensors[1].grad is None
    losses = [compiled(*tensors, buffer) for _ in range(2)]
    losses[1].backward()
    added = 8
    try:
        losses[0].backward()
    except RuntimeError:  # a compiled graph saves the buffer, and may say that it has changed
        added = 7
    torch.testing.assert_close(buffer, added * own)


@pytest.mark.parametrize(
    ("error", "words", "changes"),
    [
        (TypeError, ["grad_weight_out", "bool"], {"grad_weight_out": True}),
        (ValueError, ["grad_weight_out", "(7, 4)", "(4, 7)"],
         {"grad_weight_out": torch.zeros(4, 7)}),
        (ValueError, ["grad_weight_out", "float32", "bfloat16", "float64"],
         {"grad_weight_out": torch.zeros(7, 4, dtype=torch.float64)}),
        (ValueError, ["grad_weight_out", "meta", "cpu"],
         {"grad_weight_out": torch.zeros(7, 4, device="meta")}),
        (ValueError, ["grad_weight_out", "contiguous", "(1, 7)"],
         {"grad_weight_out": torch.zeros(4, 7).t()}),
        (ValueError, ["grad_weight_out", "requires_grad=True"],
         {"grad_weight_out": torch.zeros(7, 4, requires_grad=True)}),
        (ValueError, ["grad_weight_out", "requires_grad=False"],
         {"weight": torch.zeros(7, 4, dtype=torch.bfloat16)}),
        (ValueError, ["grad_weight_out", "is_leaf=False"],
         {"weight": torch.zeros(7, 4, dtype=torch.bfloat16, requires_grad=True) * 2}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)  # fmt: skip
def test_what_does_not_fit_is_named(error, words, changes):
    good = {
        "x": torch.zeros(6, 4),
        "weight": torch.zeros(7, 4, dtype=torch.bfloat16, requires_grad=True),
        "target": torch.zeros(6, dtype=torch.int64),
        "grad_weight_out": torch.zeros(7, 4),
    }
    with pytest.raises(error) as caught:
        linear_cross_entropy(**(good | changes))
    for word in words:
        assert word in str(caught.value), str(caught.value)
