"""torch.library and torch.compile: schemas, fake tensors, one graph, no recompilation."""

import json

import pytest
import torch
import torch._inductor.config
from loss_cases import make, run
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

from flce_tune.kernels.config import Config, Tile
from flce_tune.kernels.fused import fused_loss
from flce_tune.kernels.module import LinearCrossEntropy
from flce_tune.kernels.op import linear_cross_entropy, linear_logprobs
from flce_tune.kernels.per_row import row_loss, row_loss_backward

N, D, V = 12, 6, 17
EVERYTHING = ("bias", "class_weight", "token_weight", "ignored")
with_dtypes = pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str
)


@pytest.fixture(autouse=True)
def _fresh_compiler():
    """Nothing compiled before, in this process or on disk."""
    torch._dynamo.reset()
    with torch._inductor.config.patch(force_disable_caches=True):
        yield
    torch._dynamo.reset()


def leaf(tensor):
    return tensor.detach().clone().requires_grad_()


@with_dtypes
@pytest.mark.parametrize("needs", [(True, True, True), (True, False, False), (False,) * 3], ids=str)
@pytest.mark.parametrize("extras", [False, True])
def test_opcheck_of_the_fused_loss(dtype, needs, extras):
    case = make(N, D, V, dtype, EVERYTHING)
    tensors = [
        t.detach().clone().requires_grad_(need)
        for t, need in zip((case.x, case.weight, case.bias), needs, strict=True)
    ]
    options = case.options
    arguments = (
        tensors[0], tensors[1], case.target, tensors[2], options["class_weight"],
        options["token_weight"], torch.tensor(3.0) if extras else None, -100, 0.125, 4.0, 0.75,
        0.03125, "mean", *needs, extras, extras, False, "fp32", None, "",
    )  # fmt: skip
    torch.library.opcheck(fused_loss, arguments)


@with_dtypes
@pytest.mark.parametrize("extras", [False, True])
@pytest.mark.parametrize("tokens", [N, 0])
def test_opcheck_of_the_row_loss(dtype, extras, tokens):
    case = make(tokens, D, V, dtype, EVERYTHING)
    arguments = (
        leaf(case.x), leaf(case.weight), case.target, leaf(case.bias),
        case.options["class_weight"], -100, 0.125, 4.0, 0.75, 0.03125, extras, extras, False,
        "fp32", None, "",
    )  # fmt: skip
    torch.library.opcheck(row_loss, arguments)


@with_dtypes
@pytest.mark.parametrize("needs", [(True, True, True), (False, True, False)], ids=str)
def test_opcheck_of_the_row_losss_backward(dtype, needs):
    case = make(N, D, V, dtype, EVERYTHING)
    rows = torch.rand(4, N)
    values = {
        "grad_loss": rows[0], "grad_lse": rows[1], "grad_entropy": None, "x": case.x,
        "weight": case.weight, "target": case.target, "bias": case.bias,
        "class_weight": case.options["class_weight"], "lse": rows[2] + 3,
        "entropy": torch.empty(0), "lse_low": rows[2] / 2**24, "target_logit": rows[3],
        "ignore_index": -100, "label_smoothing": 0.125, "softcap": 4.0, "logit_scale": 0.75,
        "z_loss": 0.03125,
        "need_dx": needs[0], "need_dw": needs[1], "need_db": needs[2], "accumulate": "fp32",
        "workspace_limit": None, "config": "",
    }  # fmt: skip
    names = [argument.name for argument in row_loss_backward._opoverload._schema.arguments]
    arguments = tuple(values[name] for name in names)
    torch.library.opcheck(row_loss_backward, arguments)


@with_dtypes
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("tokens", [N, 0])
def test_fake_tensors_have_the_shapes_and_dtypes_of_real_ones(dtype, reduction, tokens):
    case = make(tokens, D, V, dtype, ("bias",))

    def call(x, weight, bias, target):
        got = linear_cross_entropy(
            x, weight, target, bias=bias, reduction=reduction,
            outputs=("lse", "token_loss", "entropy", "prediction", "accuracy", "z_loss"),
        )  # fmt: skip
        grads = torch.autograd.grad(got.loss.sum(), (x, weight, bias))
        return [
            got.loss, got.lse, got.token_loss, got.entropy, got.prediction, got.accuracy,
            got.z_loss, *grads,
        ]  # fmt: skip

    tensors = [leaf(t) for t in (case.x, case.weight, case.bias)]
    real = call(*tensors, case.target)
    with FakeTensorMode() as mode:
        fake = call(*(mode.from_tensor(t) for t in tensors), mode.from_tensor(case.target))
    for a, b in zip(real, fake, strict=True):
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())


def compiled_run(function, case, **keywords):
    tensors = [leaf(t) for t in (case.x, case.weight, case.bias)]
    loss = function(*tensors, case.target, case.options, **keywords)
    return loss.detach(), *torch.autograd.grad(loss, tensors, torch.full_like(loss, 2.0))


def op(x, weight, bias, target, options, **keywords):
    return linear_cross_entropy(x * 1.5, weight, target, bias=bias, **options, **keywords)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(
    "features", [(), ("ignored", "softcap", "z_loss"), ("class_weight", "token_weight"),
                 ("label_smoothing", "divisor")], ids=str,
)  # fmt: skip
def test_bug_007_one_graph_gives_what_eager_gives(reduction, features):
    if reduction != "mean":
        features = tuple(name for name in features if name != "divisor")
    case = make(40, D, V, torch.float32, ("bias", *features))
    compiled = torch.compile(op, backend="aot_eager", fullgraph=True)
    for a, b in zip(
        compiled_run(compiled, case, reduction=reduction),
        compiled_run(op, case, reduction=reduction), strict=True,
    ):  # fmt: skip
        torch.testing.assert_close(a, b)


def test_one_graph_with_all_outputs_a_shift_and_an_lse():
    def everything(x, weight, target, bias):
        got = linear_cross_entropy(
            x, weight, target, bias=bias, shift=True,
            outputs=("lse", "token_loss", "entropy", "prediction", "accuracy", "z_loss"),
        )  # fmt: skip
        loss, lse = linear_cross_entropy(x, weight, target, bias=bias, return_lse=True)
        logprob, entropy = linear_logprobs(x, weight, target, bias=bias, temperature=2.0)
        return got.loss + loss, got.accuracy, got.prediction, lse.sum() + logprob.sum(), entropy

    case = make((3, 8), D, V, torch.float32, ("bias",))
    compiled = torch.compile(everything, backend="aot_eager", fullgraph=True)
    results = []
    for function in (compiled, everything):
        tensors = [leaf(t) for t in (case.x, case.weight, case.bias)]
        outputs = function(tensors[0], tensors[1], case.target, tensors[2])
        total = outputs[0] + outputs[3] + outputs[4].sum()
        results.append([*outputs, *torch.autograd.grad(total, tensors)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_new_token_count_recompiles_once_then_never(reduction):
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(op, backend=counter, fullgraph=True)
    for tokens in (10, 23, 31, 64, 129, 200):
        case = make(tokens, D, V, torch.float32, ("bias", "ignored"))
        for a, b in zip(
            compiled_run(compiled, case, reduction=reduction),
            compiled_run(op, case, reduction=reduction), strict=True,
        ):  # fmt: skip
            torch.testing.assert_close(a, b)
        if tokens == 23:
            dynamic = counter.frame_count
    assert dynamic <= 2
    assert counter.frame_count == dynamic


def test_a_module_with_a_head_compiles_under_autocast():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.body = torch.nn.Linear(D, D)
            self.head = torch.nn.Linear(D, V)
            self.loss = LinearCrossEntropy(softcap=5.0, z_loss=1e-3)

        def forward(self, x, target):
            return self.loss(self.body(x), self.head.weight, target, bias=self.head.bias)

    torch.manual_seed(0)
    model = Model()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    case = make((2, 9), D, V, torch.float32, ("ignored",))
    results = []
    for function in (model, compiled):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = function(case.x, case.target)
        loss.backward()
        results.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=2.0**-6, atol=2.0**-8)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_bug_007_generated_code_gives_what_eager_gives(reduction):
    case = make(64, D, V, torch.float32, ("bias", "ignored"))
    compiled = torch.compile(op, fullgraph=True, dynamic=True)
    for a, b in zip(
        compiled_run(compiled, case, reduction=reduction),
        compiled_run(op, case, reduction=reduction), strict=True,
    ):  # fmt: skip
        torch.testing.assert_close(a, b)


def test_meta_tensors_are_traced_not_computed():
    case = make(N, D, V, torch.bfloat16)
    with torch.device("meta"):
        x, weight = torch.empty(N, D), torch.empty(V, D)
        target = torch.empty(N, dtype=torch.int64)
    loss = linear_cross_entropy(x.requires_grad_(), weight, target)
    assert (loss.device.type, loss.shape) == ("meta", ())
    loss.backward()
    assert x.grad.shape == case.x.shape


def test_a_compiled_backward_can_run_twice():
    case = make(N, D, V, torch.float32, ("bias",))
    compiled = torch.compile(op, backend="aot_eager", fullgraph=True)
    tensors = [leaf(t) for t in (case.x, case.weight, case.bias)]
    with torch._functorch.config.patch(donated_buffer=False):
        loss = compiled(*tensors, case.target, {})
        first = torch.autograd.grad(loss, tensors, torch.tensor(2.0), retain_graph=True)
        copies = [g.clone() for g in first]
        second = torch.autograd.grad(loss, tensors, torch.tensor(5.0))
    scaled = type(case)(case.x * 1.5, case.weight, case.target, case.bias)
    expected = run(linear_cross_entropy, scaled)
    for gradient, copied, other, name in zip(
        first, copies, second, ("x", "weight", "bias"), strict=True
    ):
        assert torch.equal(gradient, copied)
        factor = 1.5 if name == "x" else 1.0
        torch.testing.assert_close(gradient, 2 * factor * expected[name])
        torch.testing.assert_close(other, 5 * factor * expected[name])


def prompts_dropped(x, weight, target, **keywords):
    return linear_cross_entropy(x * 1.5, weight, target, drop_ignored=True, **keywords)


def with_gradients(function, case, **keywords):
    tensors = [leaf(t) for t in (case.x, case.weight)]
    loss = function(*tensors, case.target, **keywords)
    return loss.detach(), *torch.autograd.grad(loss, tensors)


def test_a_bound_on_counted_rows_makes_one_graph_for_every_count():
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(prompts_dropped, backend=counter, fullgraph=True)
    case = make(300, D, V)
    for first in (200, 250, 300):
        case.target[:first] = -100
        for ours, plain in zip(
            with_gradients(compiled, case, max_counted=128),
            with_gradients(prompts_dropped, case, max_counted=128), strict=True,
        ):  # fmt: skip
            torch.testing.assert_close(ours, plain, equal_nan=True)
    assert counter.frame_count == 1


def test_counting_rows_breaks_the_graph_and_names_the_remedy_where_it_may_not():
    case = make(300, D, V)
    case.target[:200] = -100
    with pytest.raises(torch._dynamo.exc.Unsupported, match="give max_counted"):
        with_gradients(torch.compile(prompts_dropped, backend="eager", fullgraph=True), case)
    torch._dynamo.reset()
    broken = torch.compile(prompts_dropped, backend="eager")
    for ours, plain in zip(
        with_gradients(broken, case), with_gradients(prompts_dropped, case), strict=True
    ):
        torch.testing.assert_close(ours, plain)


CONFIGS = (
    Config("chunked", chunk=8),
    Config("recompute", slab=256, logits=Tile(128, 256, 64), accumulator="split24"),
    Config(
        "tile_skip", slab=256, dx=Tile(128, 64, 256), dw=Tile(64, 128, 256, 8, 4), tolerance=1e-5
    ),
)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_a_config_is_written_as_json(config):
    assert json.loads(config.to_json()) == config.to_dict()
    assert Config.from_dict(json.loads(config.to_json())) == config


@pytest.mark.parametrize("made", ["outside", "inside"])
def test_a_config_of_the_callers_in_one_graph(made):
    case, given = make(N, D, V), CONFIGS[0]

    def loss(x, weight):
        config = given if made == "outside" else Config("chunked", chunk=8)
        return linear_cross_entropy(x, weight, case.target, config=config)

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(case.x, case.weight), loss(case.x, case.weight))
