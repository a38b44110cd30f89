"""``cross_entropy`` on given logits: options, dtypes, layouts, edges, refusals, memory."""

import pytest
import torch
from exactness import assert_as_exact
from given_cases import LogitsCase, compare_given, make_logits, run_given
from loss_cases import FEATURES

from flce_tune.errors import TargetOutOfRangeError
from flce_tune.kernels import given_rows, reference
from flce_tune.kernels.given_logits import cross_entropy

pytestmark = pytest.mark.usefixtures("poison")

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
OPTIONS = {name: (name,) for name in FEATURES if name != "bias"}
OPTIONS |= {"nothing": (), "everything": tuple(OPTIONS)}
OUTPUTS = ("lse", "token_loss", "entropy", "prediction", "accuracy", "z_loss")
N, V = 41, 203
INF = float("inf")
with_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
with_reductions = pytest.mark.parametrize("reduction", ["mean", "sum", "none"])


def random_upstream(shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)


@pytest.fixture(params=[None, 4 * V * 8], ids=["one step", "steps of rows"])
def steps(request, monkeypatch):
    """Rows plain torch works on at a time."""
    if request.param:
        monkeypatch.setattr(given_rows, "PLAIN_BYTES", request.param)


@pytest.mark.usefixtures("steps")
@with_dtypes
@with_reductions
@pytest.mark.parametrize("features", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("in_place", [False, True])
def test_loss_and_gradient_are_as_exact_as_plain_torch(features, reduction, dtype, in_place):
    if reduction != "mean":
        features = tuple(name for name in features if name != "divisor")
    case = make_logits(N, V, dtype, features)
    upstream = random_upstream(N) if reduction == "none" else -3.7
    compare_given(case, dtype, upstream, reduction=reduction, more={"in_place": in_place})


@with_dtypes
@pytest.mark.parametrize("vocab", [1, 2, 7, 1000, 1024, 1025])
def test_any_row_length(vocab, dtype):
    compare_given(make_logits(65, vocab, dtype, ("ignored", "label_smoothing")), dtype)


@pytest.mark.parametrize("shape", [(), (1,), (5,), (2, 7), (2, 3, 4)], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_any_number_of_leading_dimensions(shape, reduction):
    case = make_logits(shape, V)
    got = compare_given(case, torch.float32, reduction=reduction)
    assert got["logits"].shape == (*shape, V)
    assert got["loss"].shape == (shape if reduction == "none" else ())


def laid_out(logits, layout):
    """The same logits [4, 9, V] in other strides."""
    if layout == "padded rows":
        return torch.nn.functional.pad(logits, (3, 6))[..., 3:-6]
    if layout == "every other":
        return logits.repeat_interleave(2, -1)[..., ::2]
    if layout == "transposed":
        return logits.transpose(0, 2).contiguous().transpose(0, 2)
    if layout == "positions swapped":
        return logits.transpose(0, 1).contiguous().transpose(0, 1)
    assert layout == "ragged"
    return torch.nn.functional.pad(logits, (0, 0, 0, 5))[:, :9]


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize(
    "layout", ["padded rows", "every other", "transposed", "positions swapped", "ragged"]
)
def test_any_strides(layout, reduction):
    case = make_logits((4, 9), V, torch.float32, ("ignored",))
    expected = run_given(cross_entropy, case, reduction=reduction)
    leaf = laid_out(case.logits, layout).detach().requires_grad_()
    loss = cross_entropy(leaf, case.target, reduction=reduction)
    loss.sum().backward()
    torch.testing.assert_close(loss, expected["loss"])
    torch.testing.assert_close(leaf.grad, expected["logits"])


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("in_place", [False, True])
def test_shift_predicts_the_next_token(reduction, in_place):
    case = make_logits((3, 11), V, torch.float32, ("token_weight", "ignored", "z_loss"))
    got = run_given(cross_entropy, case, reduction=reduction, shift=True, in_place=in_place)
    weights = case.options["token_weight"][:, 1:]

    def written_out(logits, target, **options):
        options |= {"token_weight": weights.to(logits.dtype), "reduction": reduction}
        return reference.cross_entropy(logits[:, :-1], target[:, 1:], **options)

    plain, truth = run_given(written_out, case), run_given(written_out, case.to(torch.float64))
    for name, value in got.items():
        assert_as_exact(name, value, plain[name], truth[name], torch.float32)


@pytest.mark.usefixtures("steps")
@with_dtypes
def test_rows_with_minus_infinities(dtype):
    case = make_logits(5, 1025, dtype)
    case.logits[0] = -INF  # one finite logit, the label's
    case.logits[0, 1024] = 0.5
    case.logits[1] = -INF  # one finite logit, not the label's
    case.logits[1, 3] = 0.5
    case.logits[2] = -INF
    case.logits[3, ::2] = -INF
    target = torch.tensor([1024, 4, 0, 7, 9])
    case = LogitsCase(case.logits, target)
    got = run_given(cross_entropy, case, reduction="none")
    assert got["loss"][:2].tolist() == [0.0, INF]
    assert got["loss"][2].isnan()
    assert got["logits"][2].isnan().all()
    assert not got["logits"][0].any()
    expected = torch.zeros(1025, dtype=dtype)
    expected[3], expected[4] = 1, -1
    assert torch.equal(got["logits"][1], expected)
    compare_given(LogitsCase(case.logits[3:], target[3:]), dtype, reduction="none")


@with_dtypes
@with_reductions
@pytest.mark.parametrize("in_place", [False, True])
def test_every_label_ignored(dtype, reduction, in_place):
    case = make_logits(N, V, dtype, ("z_loss", "label_smoothing"))
    case.target.fill_(-100)
    got = run_given(cross_entropy, case, reduction=reduction, in_place=in_place)
    assert got["loss"].isnan() if reduction == "mean" else not got["loss"].any()
    assert torch.equal(got["logits"], torch.zeros_like(case.logits))


@pytest.mark.usefixtures("steps")
@with_dtypes
@pytest.mark.parametrize("in_place", [False, True])
def test_no_tokens(dtype, in_place):
    case = make_logits((2, 0), V, dtype)
    for reduction in ("mean", "sum", "none"):
        got = run_given(cross_entropy, case, reduction=reduction, in_place=in_place)
        assert got["logits"].shape == (2, 0, V)
        assert got["loss"].shape == ((2, 0) if reduction == "none" else ())
        assert got["loss"].isnan() if reduction == "mean" else not got["loss"].any()


@pytest.mark.parametrize("label", [V, -1, -101, 2**40])
def test_a_label_out_of_range_is_named(label):
    case = make_logits(N, V)
    case.target[7] = label
    with pytest.raises(TargetOutOfRangeError, match=rf"{label} at position 7 .*\[0, {V}\)"):
        cross_entropy(case.logits, case.target)


@pytest.mark.usefixtures("steps")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_outputs(dtype, reduction):
    case = make_logits((4, 9), V, dtype, ("softcap", "z_loss", "ignored", "token_weight"))
    got = cross_entropy(
        case.logits, case.target, reduction=reduction, outputs=OUTPUTS, **case.options
    )
    stats = {
        kind: reference.row_statistics(
            reference.scaled(case.logits.to(kind), case.options["softcap"]).flatten(0, 1),
            case.target.flatten(),
        )
        for kind in (dtype, torch.float64)
    }
    for name in ("lse", "entropy"):
        value = getattr(got, name).flatten()
        assert_as_exact(name, value, stats[dtype][name], stats[torch.float64][name], dtype)
    chosen = case.logits.gather(2, got.prediction[..., None])[..., 0]
    assert torch.equal(chosen, case.logits.max(-1).values)
    counted = case.target != -100
    hits = (got.prediction == case.target)[counted].double().mean()
    assert float(got.accuracy) == pytest.approx(float(hits))
    assert torch.equal(got.z_loss, (0.03125 * got.lse.square()).masked_fill(~counted, 0))
    assert not got.token_loss[~counted].any()
    weighted = got.token_loss * case.options["token_weight"]
    total = weighted if reduction == "none" else weighted.sum() / (
        case.options["token_weight"].to(weighted.dtype)[counted].sum()
    )  # fmt: skip
    torch.testing.assert_close(got.loss, total.to(got.loss.dtype))
    assert cross_entropy(case.logits, case.target, outputs=("lse",)).entropy is None


def test_logits_without_a_gradient_need_no_graph():
    case = make_logits(N, V)
    assert not cross_entropy(case.logits, case.target, in_place=True).requires_grad
    case.logits.requires_grad_()
    with torch.no_grad():
        assert not cross_entropy(case.logits, case.target, in_place=True).requires_grad


@pytest.mark.parametrize(
    ("error", "words", "changes"),
    [
        (TypeError, ["logits must be", "list"], {"logits": [1.0]}),
        (TypeError, ["logits must be", "bfloat16", "int64"], {"logits": torch.zeros(6, 7).long()}),
        (TypeError, ["target", "int64", "float32"], {"target": torch.zeros(6)}),
        (ValueError, ["logits", "V > 0", "(6, 0)"], {"logits": torch.zeros(6, 0)}),
        (ValueError, ["target", "(6,)", "(5,)"], {"target": torch.zeros(5, dtype=torch.int64)}),
        (ValueError, ["target", "meta", "logits", "cpu"],
         {"target": torch.zeros(6, dtype=torch.int64, device="meta")}),
        (ValueError, ["class_weight", "(7,)", "(6,)"], {"class_weight": torch.ones(6)}),
        (ValueError, ["token_weight", "(6,)", "(7,)"], {"token_weight": torch.ones(7)}),
        (ValueError, ["reduction", "'avg'"], {"reduction": "avg"}),
        (ValueError, ["softcap", "-1"], {"softcap": -1.0}),
        (ValueError, ["return_lse", "outputs"], {"return_lse": True, "outputs": ("lse",)}),
        (ValueError, ["divisor", "mean", "sum"], {"divisor": 3.0, "reduction": "sum"}),
        (ValueError, ["shift", "(7,)"],
         {"logits": torch.zeros(7), "target": torch.tensor(0), "shift": True}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)  # fmt: skip
def test_what_is_wrong_is_named(error, words, changes):
    good = {"logits": torch.zeros(6, 7), "target": torch.zeros(6, dtype=torch.int64)}
    with pytest.raises(error) as caught:
        cross_entropy(**(good | changes))
    for word in words:
        assert word in str(caught.value), str(caught.value)
