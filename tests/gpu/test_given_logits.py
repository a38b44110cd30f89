"""``cross_entropy`` on given logits with compiled kernels: exactness, edges, memory, no waiting."""

import pytest
import torch
from given_cases import LogitsCase, compare_given, make_logits, run_given
from gpu import needs_gpu

from flce_tune.errors import TargetOutOfRangeError
from flce_tune.kernels.given_logits import cross_entropy

pytestmark = needs_gpu

BF16 = torch.bfloat16
INF = float("inf")
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
OPTIONS = {
    "plain": (),
    "softcap": ("ignored", "softcap", "logit_scale"),
    "smoothing": ("ignored", "label_smoothing", "class_weight", "z_loss"),
    "weights": ("ignored", "token_weight"),
}
with_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
with_places = pytest.mark.parametrize("in_place", [False, True])


@pytest.mark.usefixtures("poison")
@with_dtypes
@with_places
@pytest.mark.parametrize("features", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_loss_and_gradient_are_as_exact_as_plain_torch(features, reduction, dtype, in_place):
    case = make_logits(300, 1025, dtype, features, device="cuda")
    upstream = torch.randn(300, device="cuda").bfloat16() if reduction == "none" else -3.7
    compare_given(case, dtype, upstream, reduction=reduction, more={"in_place": in_place})


@pytest.mark.usefixtures("poison")
@with_dtypes
@pytest.mark.parametrize("vocab", [1, 2, 7, 1000, 1024, 4097, 32777, 128256])
def test_any_row_length(vocab, dtype):
    case = make_logits(65, vocab, dtype, ("ignored", "label_smoothing"), device="cuda")
    compare_given(case, dtype)


@with_places
@pytest.mark.parametrize("first", [0, 1, 8])
def test_rows_of_any_stride_and_alignment(first, in_place):
    case = make_logits(77, 1025, BF16, ("ignored",), device="cuda")
    expected = run_given(cross_entropy, case)
    leaf = case.logits.detach().requires_grad_()
    wide = torch.nn.functional.pad(leaf, (first, 5), value=7.0)
    loss = cross_entropy(wide[:, first:-5], case.target, in_place=in_place)
    loss.backward()
    assert torch.equal(loss, expected["loss"])
    assert torch.equal(leaf.grad, expected["logits"])
    assert bool((wide[:, :first] == 7).all() & (wide[:, -5:] == 7).all())
    written = expected["logits"] if in_place else case.logits
    assert torch.equal(wide[:, first:-5].detach(), written)


@with_dtypes
def test_rows_with_minus_infinities(dtype):
    logits = torch.full((3, 5000), -INF, device="cuda", dtype=dtype)
    logits[0, 4999] = logits[1, 3] = 0.5
    case = LogitsCase(logits, torch.tensor([4999, 4, 0], device="cuda"))
    got = run_given(cross_entropy, case, reduction="none")
    assert got["loss"][:2].tolist() == [0.0, INF]
    assert got["loss"][2].isnan()
    assert not got["logits"][0].any()
    expected = torch.zeros(5000, device="cuda", dtype=dtype)
    expected[3], expected[4] = 1, -1
    assert torch.equal(got["logits"][1], expected)


@pytest.mark.parametrize("label", [1000, -1, -101, 2**31, -(2**40)])
def test_a_label_out_of_range_poisons_its_row_alone(label):
    case = make_logits(200, 1000, BF16, ("ignored",), device="cuda")
    clean = run_given(cross_entropy, case, reduction="none")
    case.target[77] = label
    others = torch.arange(200) != 77
    got = run_given(cross_entropy, case, reduction="none")
    for name, value in got.items():
        assert value[77].isnan().all()
        assert torch.equal(value[others], clean[name][others])
    with pytest.raises(TargetOutOfRangeError, match=str(label)):
        cross_entropy(case.logits, case.target, check_targets=True)


@with_places
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_every_label_ignored(reduction, in_place):
    case = make_logits(200, 1000, torch.float16, ("z_loss",), device="cuda")
    case.target.fill_(-100)
    got = run_given(cross_entropy, case, reduction=reduction, in_place=in_place)
    assert got["loss"].isnan() if reduction == "mean" else not got["loss"].any()
    assert torch.equal(got["logits"], torch.zeros_like(case.logits))


def test_in_place_writes_are_noticed_by_whoever_saved_the_logits():
    case = make_logits(64, 1000, BF16, device="cuda")
    leaf = case.logits.detach().requires_grad_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        cross_entropy(torch.tanh(leaf), case.target, in_place=True).backward()


@with_places
def test_the_host_never_waits(in_place):
    case = make_logits(300, 5001, BF16, ("ignored", "label_smoothing"), device="cuda")
    leaf = case.logits.detach().requires_grad_()
    divisor = torch.tensor(7.0, device="cuda")

    def step():
        got = cross_entropy(
            leaf * 1, case.target, divisor=divisor, in_place=in_place, outputs=("entropy",),
            **case.options,
        )  # fmt: skip
        (got.loss * 3).backward()

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    step()


@with_places
def test_a_cuda_graph_of_forward_and_backward(in_place):
    case, other = (make_logits(300, 5001, BF16, ("ignored",), seed, "cuda") for seed in (0, 1))
    leaf, target = case.logits.detach().clone().requires_grad_(), case.target.clone()

    def step():
        leaf.grad = None
        loss = cross_entropy(leaf * 1, target, in_place=in_place)
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
            leaf.copy_(given.logits)
            target.copy_(given.target)
        graph.replay()
        expected = run_given(cross_entropy, given)
        torch.testing.assert_close(loss, expected["loss"], rtol=1e-6, atol=0.0)
        assert torch.equal(leaf.grad, expected["logits"])


@pytest.mark.usefixtures("empty_gpu")
@with_places
def test_memory_is_one_gradient_or_none_at_all(in_place):
    n, vocab = 4096, 50257
    size = n * vocab * 2
    leaf = torch.zeros((), device="cuda", dtype=BF16, requires_grad=True)
    target = torch.zeros(n, device="cuda", dtype=torch.int64)
    logits = leaf.expand(n, vocab).contiguous()  # whose backward frees what it sums
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    seen = []
    logits.register_hook(lambda g: seen.append(torch.cuda.max_memory_allocated() - before))
    cross_entropy(logits, target, in_place=in_place).backward()
    extra = (0 if in_place else size) + (8 << 20)
    assert seen[0] <= extra


@pytest.mark.usefixtures("empty_gpu")
@with_places
def test_more_logits_than_32_bits_count(in_place):
    n, vocab = 43 * 1024, 50001
    assert n * vocab > 2**31
    if torch.cuda.mem_get_info()[0] < 20 << 30:
        pytest.skip("needs 20 GiB of GPU memory")
    generator = torch.Generator("cuda").manual_seed(0)
    leaf = torch.randn(n, vocab, device="cuda", dtype=BF16, generator=generator).requires_grad_()
    target = torch.randint(0, vocab, (n,), device="cuda", generator=generator)
    logits = leaf * 1
    got = cross_entropy(logits, target, reduction="sum", outputs=("token_loss",), in_place=in_place)
    (gradient,) = torch.autograd.grad(got.loss, leaf)
    boundary = 2**31 // vocab
    for start in (0, boundary - 50, n - 100):
        rows = slice(start, start + 100)
        part = run_given(cross_entropy, LogitsCase(leaf.detach()[rows], target[rows]),
                         reduction="none")  # fmt: skip
        # Which lane adds which logit depends on where a row begins, here and in the part.
        torch.testing.assert_close(got.token_loss[rows], part["loss"], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(gradient[rows], part["logits"], rtol=2**-7, atol=1e-12)
