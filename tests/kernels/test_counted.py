"""drop_ignored: the same results from the counted rows alone."""

import pytest
import torch
from loss_cases import Case, compare, expect, hold, make, run

from flce_tune.errors import TargetOutOfRangeError
from flce_tune.kernels import counted, fused, per_row
from flce_tune.kernels.counted import ROW_MULTIPLE, CountedRows
from flce_tune.kernels.module import LinearCrossEntropy
from flce_tune.kernels.op import linear_cross_entropy, linear_logprobs

pytestmark = pytest.mark.usefixtures("poison")

N, D, V = 700, 24, 101
EVERYTHING = ("lse", "token_loss", "entropy", "prediction", "accuracy", "z_loss")
OPTIONS = {
    "plain": (),
    "bias": ("bias", "softcap", "z_loss"),
    "weights": ("class_weight", "token_weight", "label_smoothing"),
    "divisor": ("divisor", "token_weight"),
}
MODES = {"counted": {}, "bounded": {"max_counted": 300}}
with_modes = pytest.mark.parametrize("mode", MODES.values(), ids=MODES)


def masked(features=(), dtype=torch.float32, shape=N, share=0.6) -> Case:
    """A case whose first ``share`` of rows, and some more, are ignored: a prompt and padding."""
    case = make(shape, D, V, dtype, features)
    flat = case.target.view(-1)
    flat[: int(share * len(flat))] = -100
    flat[::7] = -100
    return case


@pytest.fixture
def computed(monkeypatch):
    """The numbers of rows the custom ops' computations were given."""
    seen = []
    for module, name in ((fused, "prepare"), (per_row, "prepare")):
        original = getattr(module, name)

        def prepare(x, *rest, original=original):
            seen.append(len(x))
            return original(x, *rest)

        monkeypatch.setattr(module, name, prepare)
    return seen


@with_modes
@pytest.mark.parametrize("features", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_it_is_as_exact_as_plain_torch(mode, features, reduction, dtype, computed):
    if reduction != "mean":
        features = tuple(name for name in features if name != "divisor")
    case = masked(features, dtype)
    upstream = torch.randn(N).bfloat16() if reduction == "none" else 0.5
    ours = compare(
        case, dtype, upstream=upstream, reduction=reduction, more={"drop_ignored": True, **mode}
    )
    ignored = case.target == -100
    kept = mode.get("max_counted", int((~ignored).sum()))
    assert set(computed) == {-(-kept // ROW_MULTIPLE) * ROW_MULTIPLE}
    assert torch.equal(ours["x"][ignored], torch.zeros_like(ours["x"][ignored]))
    if reduction == "none":
        assert torch.equal(ours["loss"][ignored], torch.zeros(int(ignored.sum())))


@with_modes
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_outputs_are_the_dense_ones_where_rows_count_and_zero_elsewhere(mode, reduction):
    case = masked(("z_loss", "token_weight"), torch.float64, shape=(7, 100))
    calls = [
        linear_cross_entropy(
            case.x, case.weight, case.target, reduction=reduction, outputs=EVERYTHING,
            shift=True, **case.options, **keywords,
        )
        for keywords in ({}, {"drop_ignored": True, **mode})
    ]  # fmt: skip
    dense, dropped = calls
    ignored = case.target[:, 1:] == -100
    for name in ("loss", *EVERYTHING):
        ours, theirs = getattr(dropped, name), getattr(dense, name)
        if theirs.dim():
            theirs = theirs.masked_fill(ignored, 0)
        torch.testing.assert_close(ours, theirs, msg=lambda text, name=name: f"{name}: {text}")


@with_modes
def test_a_differentiable_lse_and_token_weight(mode):
    case = masked(("token_weight",), torch.float64)
    counts = case.target != -100
    results = []
    for keywords in ({}, {"drop_ignored": True, **mode}):
        leaves = [t.detach().clone().requires_grad_() for t in (case.x, case.weight)]
        leaves.append(case.options["token_weight"].clone().requires_grad_())
        loss, lse = linear_cross_entropy(
            leaves[0], leaves[1], case.target, token_weight=leaves[2], return_lse=True, **keywords
        )
        lse = torch.where(counts, lse, 0.0)
        results.append((loss, lse, *torch.autograd.grad(loss + lse.square().sum(), leaves)))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)


@with_modes
def test_logprobs(mode):
    case = masked(dtype=torch.float64, shape=(7, 100))
    counts = case.target != -100
    results = []
    for keywords in ({}, {"drop_ignored": True, **mode}):
        x = case.x.detach().clone().requires_grad_()
        logprobs, entropy = linear_logprobs(x, case.weight, case.target, **keywords)
        entropy = torch.where(counts, entropy, 0.0)
        (dx,) = torch.autograd.grad(logprobs.sum() + entropy.square().sum(), x)
        results.append((logprobs, entropy, dx))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("share", [0.0, 1.0], ids=["none ignored", "all ignored"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_ends(share, reduction):
    case = make(N, D, V)
    case.target[: int(share * N)] = -100
    ours = run(linear_cross_entropy, case, reduction=reduction, drop_ignored=True)
    hold(ours, *expect(case, torch.float32, reduction=reduction), torch.float32)


def test_no_tokens_and_fewer_than_a_tile(computed):
    for n in (0, 1, 100, ROW_MULTIPLE):
        case = make(n, D, V, features=("ignored",))
        loss = linear_cross_entropy(case.x, case.weight, case.target, reduction="sum",
                                    drop_ignored=True)  # fmt: skip
        assert torch.equal(
            loss, linear_cross_entropy(case.x, case.weight, case.target, reduction="sum")
        )
    assert max(computed) == ROW_MULTIPLE


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("extra", [0, 1])
def test_a_bound_that_is_too_small_gives_nan_and_never_a_wrong_value(reduction, extra):
    case = make(N, D, V)
    case.target[ROW_MULTIPLE + extra :] = -100
    got = run(linear_cross_entropy, case, reduction=reduction, drop_ignored=True, max_counted=5)
    if extra == 0:  # rounded up, they still all fit
        hold(got, *expect(case, torch.float32, reduction=reduction), torch.float32)
    else:
        assert got["loss"].isnan().any()
        assert got["weight"].isnan().all()
        assert not got["x"][case.target == -100].any()


def test_every_row_is_taken_once_the_counted_first():
    target = torch.full((N,), -100)
    places = [3, 600, 77, 699]
    target[places] = 1
    rows = CountedRows.of(target, -100, None)
    assert len(rows.order) == ROW_MULTIPLE == len(set(rows.order.tolist()))
    assert rows.order[:4].tolist() == sorted(places)
    assert rows.counted.tolist() == [True] * 4 + [False] * (ROW_MULTIPLE - 4)


def test_what_stands_in_dropped_rows_is_never_used():
    case = masked()
    spoiled = case.x.clone()
    spoiled[: N // 2] = float("nan")
    rows = CountedRows.of(case.target, -100, None)
    spoiled[rows.order] = case.x[rows.order]
    clean, ours = (
        run(linear_cross_entropy, Case(x, case.weight, case.target), drop_ignored=True)
        for x in (case.x, spoiled)
    )
    for name, value in clean.items():
        assert torch.equal(value, ours[name]), name


def test_the_buffer_for_weights_gradient():
    case = masked()
    weight = case.weight.clone().requires_grad_()
    out = torch.zeros_like(weight, requires_grad=False)
    linear_cross_entropy(
        case.x, weight, case.target, drop_ignored=True, grad_weight_out=out.detach()
    ).backward()
    (dense,) = torch.autograd.grad(linear_cross_entropy(case.x, weight, case.target), weight)
    torch.testing.assert_close(out, dense)


def test_the_module_holds_the_option_and_takes_the_bound_per_batch(computed):
    case = masked()
    module = LinearCrossEntropy(drop_ignored=True)
    dense = linear_cross_entropy(case.x, case.weight, case.target)
    del computed[:]
    torch.testing.assert_close(module(case.x, case.weight, case.target), dense)
    torch.testing.assert_close(module(case.x, case.weight, case.target, max_counted=400), dense)
    assert computed == [256, 512]
    assert "drop_ignored=True" in repr(module)


def test_a_label_out_of_range_is_named_with_its_place_among_all_rows():
    case = masked()
    case.target[N - 5] = V
    with pytest.raises(TargetOutOfRangeError, match=f"target {V} at position {N - 5}"):
        linear_cross_entropy(case.x, case.weight, case.target, drop_ignored=True)


@pytest.mark.parametrize("bound", [-1, 2.5, True, "8"])
def test_a_bound_that_is_no_count_is_refused(bound):
    case = masked()
    with pytest.raises(ValueError, match="max_counted must be an int of at least 0"):
        linear_cross_entropy(case.x, case.weight, case.target, drop_ignored=True, max_counted=bound)


def test_a_bound_without_dropping_is_refused():
    case = masked()
    with pytest.raises(ValueError, match="max_counted goes with drop_ignored=True"):
        linear_cross_entropy(case.x, case.weight, case.target, max_counted=8)


def test_capture_of_a_graph_is_refused_before_it_waits(monkeypatch):
    class OnGpu:
        is_cuda = True

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="cannot be captured in a CUDA graph"):
        counted._count(OnGpu())


def test_few_shapes_for_many_counts(computed):
    case = make(N, D, V)
    for count in range(1, N, 60):
        target = case.target.clone()
        target[count:] = -100
        linear_cross_entropy(case.x, case.weight, target, drop_ignored=True)
    assert len(set(computed)) <= -(-N // ROW_MULTIPLE)
