"""``cross_entropy`` on given logits: autograd, gradients in place, torch.library, torch.compile."""

import pytest
import torch
from given_cases import LogitsCase, make_logits, run_given
from loss_cases import make, run
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from flce_tune.kernels.given_logits import cross_entropy
from flce_tune.kernels.given_rows import given_row_loss, given_row_loss_backward
from flce_tune.kernels.op import linear_cross_entropy

pytestmark = pytest.mark.usefixtures("poison")

N, V = 12, 37
OUTPUTS = ("lse", "token_loss", "entropy", "prediction", "accuracy", "z_loss")
FEATURES = ("softcap", "logit_scale", "label_smoothing", "z_loss", "class_weight", "ignored")
with_reductions = pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
with_dtypes = pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str
)


@pytest.fixture
def _fresh_compiler():
    """Nothing compiled before."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def leaf_of(case):
    return case.logits.detach().clone().requires_grad_()


def loss_of(logits, case, **keywords):
    return cross_entropy(logits, case.target, **case.options, **keywords)


@with_reductions
@pytest.mark.parametrize("features", [FEATURES, ("token_weight",)], ids=str)
@pytest.mark.parametrize("in_place", [False, True])
def test_gradcheck_in_float64(features, reduction, in_place):
    case = make_logits(5, 7, torch.float64, features)

    def loss(leaf):
        return loss_of(leaf.clone(), case, reduction=reduction, in_place=in_place)

    assert torch.autograd.gradcheck(loss, leaf_of(case))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_gradcheck_of_the_lse_and_of_token_weights(reduction):
    case = make_logits(5, 7, torch.float64, ("softcap", "ignored", "label_smoothing"))
    weights = torch.tensor([1.0, 2.0, 0.5, 3.0, 1.5], dtype=torch.float64, requires_grad=True)

    def loss(leaf, weights):
        return loss_of(leaf, case, reduction=reduction, return_lse=True, token_weight=weights)

    assert torch.autograd.gradcheck(loss, (leaf_of(case), weights))


def test_an_lse_alone_can_be_differentiated():
    case = make_logits(N, V, torch.float32, ("ignored",))
    leaf = leaf_of(case)
    loss_of(leaf, case, return_lse=True)[1].sum().backward()
    torch.testing.assert_close(leaf.grad, torch.softmax(case.logits, -1))


@with_reductions
@with_dtypes
@pytest.mark.parametrize("in_place", [False, True])
def test_a_second_backward_with_another_upstream(reduction, dtype, in_place):
    case = make_logits(N, V, dtype, ("ignored",))
    leaf = leaf_of(case)
    loss = loss_of(leaf.clone(), case, reduction=reduction, in_place=in_place)
    kept = []
    for factor, keep in ((2.0, True), (5.0, True), (1.0, False)):
        upstream = torch.full_like(loss, factor)
        (got,) = torch.autograd.grad(loss, leaf, upstream, retain_graph=keep)
        kept.append((factor, got, got.clone()))
    for factor, got, copied in kept:
        assert torch.equal(got, copied), "it changed after it was returned"
        assert torch.equal(
            got, run_given(cross_entropy, case, factor, reduction=reduction)["logits"]
        )


def test_expanded_and_strided_upstreams():
    case = make_logits((4, 6), V, torch.float32, ("ignored",))
    leaf = leaf_of(case)
    loss_of(leaf, case, reduction="none").sum().backward()
    expected = run_given(cross_entropy, case, reduction="sum")["logits"]
    torch.testing.assert_close(leaf.grad, expected)
    wide = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
    strided = run_given(cross_entropy, case, wide[:, ::2].t(), reduction="none")
    plain = run_given(cross_entropy, case, wide[:, ::2].t().contiguous(), reduction="none")
    assert torch.equal(strided["logits"], plain["logits"])


@pytest.mark.parametrize("in_place", [False, True])
def test_a_second_derivative_is_refused(in_place):
    case = make_logits(N, V)
    leaf = leaf_of(case)
    loss = loss_of(leaf.clone(), case, in_place=in_place)
    (gradient,) = torch.autograd.grad(loss, leaf, create_graph=True)
    assert gradient.requires_grad, "a gradient without a graph would count as a constant"
    with pytest.raises(RuntimeError):
        gradient.square().sum().backward()


@with_dtypes
def test_in_place_is_the_logits_storage_and_nothing_else_is(dtype):
    case = make_logits((3, 5), V, dtype, ("ignored",))
    expected = run_given(cross_entropy, case, reduction="sum")["logits"]
    for in_place in (False, True):
        leaf = leaf_of(case)
        logits = leaf * 1
        seen = []
        logits.register_hook(lambda gradient, seen=seen: seen.append(gradient.data_ptr()))
        loss = loss_of(logits, case, reduction="sum", in_place=in_place)
        assert torch.equal(logits, case.logits), "written before backward"
        loss.backward()
        assert (seen == [logits.data_ptr()]) == in_place
        assert torch.equal(logits.detach(), expected if in_place else case.logits)
        assert torch.equal(leaf.grad, expected)


def test_in_place_writes_no_more_than_the_rows():
    case = make_logits(N, V)
    leaf = leaf_of(case)
    wide = torch.nn.functional.pad(leaf, (3, 6), value=7.0)
    loss_of(wide[:, 3:-6], case, in_place=True).backward()
    assert bool((wide[:, :3] == 7).all())
    assert bool((wide[:, -6:] == 7).all())
    assert torch.equal(leaf.grad, run_given(cross_entropy, case)["logits"])


def test_in_place_logits_used_twice_are_noticed():
    case = make_logits(N, V)
    leaf = leaf_of(case)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss_of(torch.tanh(leaf), case, in_place=True).backward()
    logits = leaf * 1
    losses = [loss_of(logits, case, in_place=True) for _ in range(2)]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        sum(losses).backward()


def test_in_place_keeps_out_of_saved_tensor_hooks():
    case = make_logits(N, V)
    expected = run_given(cross_entropy, case)["logits"]
    leaf = leaf_of(case)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        logits = torch.tanh(leaf)  # whose saved result no version guards here
        loss_of(logits, case, in_place=True).backward()
    squashed = LogitsCase(torch.tanh(case.logits), case.target)
    derivative = 1 - squashed.logits.square()
    torch.testing.assert_close(leaf.grad, run_given(cross_entropy, squashed)["logits"] * derivative)
    leaf = leaf_of(case)
    loss = checkpoint(
        lambda leaf: loss_of(leaf * 1, case, in_place=True), leaf, use_reentrant=False
    )
    loss.backward()
    assert torch.equal(leaf.grad, expected)


def refused_in_place(logits, case, *words, **keywords):
    with pytest.raises(ValueError, match="in_place") as caught:
        loss_of(logits, case, in_place=True, **keywords)
    for word in words:
        assert word in str(caught.value), str(caught.value)


def test_in_place_refuses_what_it_must_not_write():
    case = make_logits((3, 5), V)
    leaf = leaf_of(case)
    refused_in_place(leaf, case, "leaf")
    refused_in_place(leaf.view(15, V).view(3, 5, V), case, "view")
    ragged = LogitsCase(case.logits[:, :-1], case.target[:, :-1])
    refused_in_place((leaf * 1)[:, :-1], ragged, "shift=True")
    refused_in_place((leaf * 1)[:, :1].expand(3, 5, V), case, "strides")
    refused_in_place((leaf * 1).repeat_interleave(2, -1)[..., ::2], case, "strides")


def test_the_linear_op_and_the_given_one_agree():
    case = make(N, 6, V, torch.float64, ("bias", *FEATURES))
    logits = torch.nn.functional.linear(case.x, case.weight, case.bias)
    ours = run_given(cross_entropy, LogitsCase(logits, case.target, case.options))
    linear = run(linear_cross_entropy, case)
    torch.testing.assert_close(ours["loss"], linear["loss"])
    torch.testing.assert_close(ours["logits"].sum(0), linear["bias"])


@with_dtypes
@pytest.mark.parametrize("extras", [False, True])
@pytest.mark.parametrize("tokens", [N, 0])
def test_opcheck_of_the_given_row_loss(dtype, extras, tokens):
    case = make_logits(tokens, V, dtype, FEATURES)
    arguments = (
        leaf_of(case), case.target, case.options["class_weight"], -100, 0.125, 4.0, 0.75, 0.03125,
        extras, extras, False,
    )  # fmt: skip
    torch.library.opcheck(given_row_loss, arguments)


@with_dtypes
@pytest.mark.parametrize("tokens", [N, 0])
def test_opcheck_of_its_backward(dtype, tokens):
    case = make_logits(tokens, V, dtype, FEATURES)
    rows = torch.rand(4, tokens)
    arguments = (
        rows[0], rows[1], case.logits, case.target, case.options["class_weight"], rows[2] + 3,
        rows[2] / 2**24, rows[3], -100, 0.125, 4.0, 0.75, 0.03125,
    )  # fmt: skip
    torch.library.opcheck(given_row_loss_backward, arguments)


@pytest.mark.parametrize("tokens", [(3, 4), (3, 0)], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_fake_tensors_have_the_shapes_and_dtypes_of_real_ones(reduction, tokens):
    case = make_logits(tokens, V, torch.bfloat16)

    def call(leaf, target):
        got = cross_entropy(leaf, target, reduction=reduction, outputs=OUTPUTS)
        (gradient,) = torch.autograd.grad(got.loss.sum(), leaf)
        return [*(getattr(got, name) for name in ("loss", *OUTPUTS)), gradient]

    leaf = leaf_of(case)
    real = call(leaf, case.target)
    with FakeTensorMode() as mode:
        fake = call(mode.from_tensor(leaf), mode.from_tensor(case.target))
    for a, b in zip(real, fake, strict=True):
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())


def compiled_run(function, case, **keywords):
    leaf = leaf_of(case)
    loss = function(leaf, case.target, case.options, **keywords)
    return loss.detach(), *torch.autograd.grad(loss, leaf, torch.full_like(loss, 2.0))


def op(leaf, target, options, **keywords):
    return cross_entropy(leaf * 1.5, target, **options, **keywords)


@pytest.mark.usefixtures("_fresh_compiler")
@with_reductions
@pytest.mark.parametrize("in_place", [False, True])
def test_one_graph_gives_what_eager_gives_and_recompiles_once(reduction, in_place):
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(op, backend=counter, fullgraph=True)
    for tokens in (10, 23, 31, 64):
        case = make_logits(tokens, V, torch.float32, FEATURES)
        keywords = {"reduction": reduction, "in_place": in_place}
        for a, b in zip(
            compiled_run(compiled, case, **keywords), compiled_run(op, case, **keywords),
            strict=True,
        ):  # fmt: skip
            torch.testing.assert_close(a, b)
        if tokens == 23:
            dynamic = counter.frame_count
    assert counter.frame_count == dynamic <= 2


@pytest.mark.usefixtures("_fresh_compiler")
def test_one_graph_with_all_outputs_a_shift_and_an_lse():
    case = make_logits((3, 8), V)

    def everything(leaf, target):
        got = cross_entropy(leaf, target, shift=True, outputs=OUTPUTS)
        loss, lse = cross_entropy(leaf, target, return_lse=True)
        return got.loss + loss, lse, got.entropy, got.prediction, got.accuracy

    results = []
    for function in (torch.compile(everything, backend="aot_eager", fullgraph=True), everything):
        leaf = leaf_of(case)
        outputs = function(leaf, case.target)
        results.append(
            [*outputs, *torch.autograd.grad(outputs[0] + outputs[1].square().sum(), leaf)]
        )
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.usefixtures("_fresh_compiler")
def test_generated_code_gives_what_eager_gives():
    case = make_logits(64, V, torch.float32, ("ignored",))
    compiled = torch.compile(op, fullgraph=True)
    for a, b in zip(
        compiled_run(compiled, case, in_place=True), compiled_run(op, case), strict=True
    ):
        torch.testing.assert_close(a, b)
