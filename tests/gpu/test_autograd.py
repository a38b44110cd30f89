"""Streams, graphs, compiler, devices and memory: what only a GPU can show."""

import warnings

import pytest
import torch
from gpu import ATOMIC, LARGE, cuts, needs_gpu, skip_unless_it_runs
from loss_cases import compare, make, run

from flce_tune.kernels import strategies
from flce_tune.kernels.config import Config
from flce_tune.kernels.op import linear_cross_entropy, linear_logprobs
from flce_tune.kernels.problem import Problem, describe_device

pytestmark = needs_gpu

BF16 = torch.bfloat16
N, D, V = 700, 128, 5001
CONFIGS = {f"{name}, library": config for name, config in cuts({}, 256, 2048).items()}
CONFIGS |= {f"{name}, tiles": config for name, config in cuts(LARGE, 256, 2048).items()}
with_configs = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
with_reductions = pytest.mark.parametrize("reduction", ["mean", "none"])
NAMES = ("x", "weight", "bias")


def leaves(case):
    return [t.detach().clone().requires_grad_() for t in (case.x, case.weight, case.bias)]


@with_configs
@with_reductions
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_host_never_waits(config, reduction, dtype):
    skip_unless_it_runs(config, N, D, V, dtype)
    case = make(N, D, V, dtype, ("bias", "ignored"), device="cuda")
    divisor = torch.tensor(float(N), device="cuda")
    tensors = leaves(case)

    def step():
        loss = linear_cross_entropy(
            tensors[0], tensors[1], case.target, bias=tensors[2], reduction=reduction,
            divisor=divisor if reduction == "mean" else None, config=config,
        )  # fmt: skip
        (loss.sum() * 2).backward()
        got = linear_cross_entropy(
            *tensors[:2], case.target, outputs=("entropy", "accuracy"), config=config
        )
        logprob, _ = linear_logprobs(*tensors[:2], case.target, config=config)
        (got.loss + logprob.mean()).backward()
        with torch.no_grad():
            linear_cross_entropy(*tensors[:2], case.target, divisor=7, config=config)

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    step()
    torch.cuda.set_sync_debug_mode("default")


@with_configs
@with_reductions
def test_a_cuda_graph_of_forward_and_backward(config, reduction):
    skip_unless_it_runs(config, N, D, V, BF16)
    case = make(N, D, V, BF16, ("bias", "ignored"), device="cuda")
    other = make(N, D, V, BF16, ("bias", "ignored"), seed=1, device="cuda")
    tensors, target = leaves(case), case.target.clone()

    def step():
        for tensor in tensors:
            tensor.grad = None
        loss = linear_cross_entropy(
            tensors[0], tensors[1], target, bias=tensors[2], reduction=reduction, config=config
        ).mean()
        loss.backward()
        return loss.detach()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
    for given in (other, case):
        with torch.no_grad():
            for tensor, value in zip(tensors, (given.x, given.weight, given.bias), strict=True):
                tensor.copy_(value)
            target.copy_(given.target)
        graph.replay()
        scale = 1.0 if reduction == "mean" else 1.0 / N
        expected = run(
            linear_cross_entropy, given, upstream=scale, reduction=reduction, config=config
        )
        torch.testing.assert_close(loss, expected["loss"].mean(), rtol=1e-6, atol=0.0)
        for tensor, name in zip(tensors, NAMES, strict=True):
            assert torch.equal(tensor.grad, expected[name]), name


@with_configs
def test_graphed_by_torch_the_op_gives_what_it_gives_by_itself(config):
    skip_unless_it_runs(config, N, D, V, BF16)
    case, other = (make(N, D, V, BF16, ("bias", "ignored"), seed=i, device="cuda") for i in (0, 1))

    def loss_of(x, weight, target):
        return linear_cross_entropy(x, weight, target, config=config)

    tensors = *leaves(case)[:2], case.target.clone()
    graphed = torch.cuda.make_graphed_callables(loss_of, tensors)
    for given in (other, case):
        tensors = *leaves(given)[:2], given.target
        results = []
        for function in (graphed, loss_of):
            value = function(*tensors)
            results.append((value, *torch.autograd.grad(value, tensors[:2])))
        for ours, expected in zip(*results, strict=True):
            assert torch.equal(ours, expected)


@pytest.mark.usefixtures("poison")
@with_configs
@pytest.mark.parametrize("upstream", [1.0, 3.7, 0.0, -1.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_bug_012_any_upstream_value(config, upstream, dtype):
    skip_unless_it_runs(config, N, D, V, dtype)
    case = make(N, D, V, dtype, ("bias", "ignored"), device="cuda")
    if dtype == BF16 and upstream == 3.7:  # not a power of two: the saved gradients round again
        plain = run(linear_cross_entropy, case, upstream=1.0, config=config)
        scaled = run(linear_cross_entropy, case, upstream=upstream, config=config)
        for name in ("x", "weight", "bias"):
            assert torch.equal(scaled[name], (plain[name].float() * upstream).to(dtype))
        return
    compare(case, dtype, upstream=upstream, config=config)


@with_configs
@with_reductions
def test_bug_031_a_second_backward_with_another_upstream(config, reduction):
    skip_unless_it_runs(config, N, D, V, BF16)
    case = make(N, D, V, BF16, ("bias", "ignored"), device="cuda")
    tensors = leaves(case)
    loss = linear_cross_entropy(
        tensors[0], tensors[1], case.target, bias=tensors[2], reduction=reduction, config=config
    )
    kept = []
    for factor, keep in ((2.0, True), (5.0, True), (1.0, False)):
        up = torch.full_like(loss, factor)
        got = torch.autograd.grad(loss, tensors, up, retain_graph=keep)
        kept.append((factor, got, [g.clone() for g in got]))
    for factor, got, copies in kept:
        expected = run(
            linear_cross_entropy, case, upstream=factor, reduction=reduction, config=config
        )
        for gradient, copied, name in zip(got, copies, NAMES, strict=True):
            assert torch.equal(gradient, copied), f"{name} changed after it was returned"
            assert torch.equal(gradient, expected[name]), name


@pytest.mark.parametrize("shape", [(N,), (350, 2)], ids=str)
@pytest.mark.parametrize("kind", ["expanded", "strided"])
def test_bug_008_and_042_upstreams_of_any_strides(shape, kind):
    case = make(shape, D, V, BF16, ("bias",), device="cuda")
    if kind == "expanded":
        upstream = torch.tensor(0.5, device="cuda").expand(shape)
    else:
        upstream = torch.randn(*shape, 2, device="cuda").bfloat16()[..., 0]
        assert not upstream.is_contiguous()
    compare(case, BF16, upstream=upstream, reduction="none")


@with_reductions
@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16], ids=str)
def test_bug_026_autocast(autocast, reduction):
    case = make(N, D, V, torch.float32, ("bias", "ignored"), device="cuda")
    mixed = type(case)(case.x.bfloat16(), case.weight, case.target, case.bias)
    with torch.autocast("cuda", autocast):
        got = run(linear_cross_entropy, mixed, reduction=reduction)
    low = run(linear_cross_entropy, case.to(autocast), reduction=reduction)
    assert torch.equal(got["loss"], low["loss"])
    for name, dtype in (("x", BF16), ("weight", torch.float32), ("bias", torch.float32)):
        assert got[name].dtype == dtype
        assert torch.equal(got[name], low[name].to(dtype)), name


@with_reductions
def test_bug_007_compiled_is_eager_whatever_the_memory_held(reduction):
    torch._dynamo.reset()

    def op(x, weight, bias, target):
        return linear_cross_entropy(torch.tanh(x), weight, target, bias=bias, reduction=reduction)

    compiled = torch.compile(op, fullgraph=True, dynamic=True)
    for n in (256, 300, 1000):
        case = make(n, 32, 4096, torch.float32, ("bias", "ignored"), device="cuda")
        results = []
        for function in (compiled, op):
            filler = [torch.full((1 << k,), float("nan"), device="cuda") for k in range(4, 24)]
            del filler
            tensors = leaves(case)
            loss = function(*tensors, case.target)
            results.append([loss, *torch.autograd.grad(loss.sum() * 3, tensors)])
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b)


def test_another_stream():
    case = make(N, D, V, BF16, ("bias",), device="cuda")
    expected = run(linear_cross_entropy, case)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        got = run(linear_cross_entropy, case)
    stream.synchronize()
    for name, value in got.items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_bug_023_tensors_on_another_than_the_current_device(reduction):
    torch.cuda.set_device(0)
    first = make(N, D, V, BF16, ("bias",), device="cuda:0")
    second = make(N, D, V, BF16, ("bias",), device="cuda:1")
    for config in (*CONFIGS.values(), ATOMIC, None):
        expected = run(linear_cross_entropy, first, reduction=reduction, config=config)
        got = run(linear_cross_entropy, second, upstream=1.0, reduction=reduction, config=config)
        assert torch.cuda.current_device() == 0
        for name, value in got.items():
            assert value.device.index == 1
            torch.testing.assert_close(value.to(0), expected[name])


def peak_of(work):
    """Bytes allocated at the peak beyond what was there before; the result is kept meanwhile."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = work()
    torch.cuda.synchronize()
    del result
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.usefixtures("empty_gpu")
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("needs", [("x",), ("weight",), ("x", "weight")], ids=str)
def test_bug_048_no_gradient_buffer_nobody_asked_for(needs, reduction):
    n, hidden, vocab = 1024, 4096, 128256
    x = torch.zeros(n, hidden, device="cuda", dtype=BF16, requires_grad="x" in needs)
    weight = torch.zeros(vocab, hidden, device="cuda", dtype=BF16, requires_grad="weight" in needs)
    target = torch.zeros(n, device="cuda", dtype=torch.int64)

    def step():
        loss = linear_cross_entropy(x, weight, target, reduction=reduction)
        return torch.autograd.grad(loss.sum(), [t for t in (x, weight) if t.requires_grad])

    step()
    per_token = ("per_token",) if reduction == "none" else ()
    mode = "train" if "weight" in needs else "train_frozen_weight"
    problem = Problem(n, hidden, vocab, "bfloat16", mode, features=per_token)
    config = strategies.default(problem, describe_device(torch.device("cuda", 0)))
    returned = sum(t.numel() * 2 for t in (x, weight) if t.requires_grad)
    allowed = strategies.workspace(config, problem) + returned + (32 << 20)
    assert peak_of(step) <= allowed
    if "weight" not in needs:
        assert allowed < vocab * hidden * 2


@pytest.mark.usefixtures("empty_gpu")
@pytest.mark.parametrize("logits", [None, LARGE["logits"]], ids=["library", "tile"])
def test_bug_048_evaluation_takes_no_memory_that_grows_with_the_logits(logits):
    n, hidden, vocab = 16384, 512, 128256
    x = torch.zeros(n, hidden, device="cuda", dtype=BF16)
    weight = torch.zeros(vocab, hidden, device="cuda", dtype=BF16, requires_grad=True)
    target = torch.zeros(n, device="cuda", dtype=torch.int64)
    config = Config("recompute", slab=4096, logits=logits)
    skip_unless_it_runs(config, n, hidden, vocab, BF16)

    def evaluation():
        with torch.no_grad():
            return linear_cross_entropy(x, weight, target, config=config)

    evaluation()
    assert peak_of(evaluation) < 64 << 20


@pytest.mark.usefixtures("empty_gpu")
@with_configs
def test_the_workspace_estimate_is_an_upper_bound(config):
    n, hidden, vocab = 2048, 1024, 50257
    skip_unless_it_runs(config, n, hidden, vocab, BF16)
    case = make(n, hidden, vocab, BF16, device="cuda")
    x, weight = case.x.requires_grad_(), case.weight.requires_grad_()

    def step():
        loss = linear_cross_entropy(x, weight, case.target, config=config)
        return torch.autograd.grad(loss, (x, weight))

    step()
    estimate = strategies.workspace(config, Problem(n, hidden, vocab))
    returned = (n + vocab) * hidden * 2
    assert peak_of(step) <= 1.05 * estimate + returned + (8 << 20)


def test_a_config_that_does_not_fit_the_device_is_named():
    case = make(64, 64, 300, BF16, device="cuda")
    huge = Config("full", logits=LARGE["logits"].__class__(256, 256, 256, 8, 8, 8))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ValueError, match="cannot run here"):
            run(linear_cross_entropy, case, config=huge)
