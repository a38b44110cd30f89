"""``cross_entropy`` on given logits on the Triton row kernels, through the interpreter.

The interpreter rounds stores to bfloat16 toward zero, so those are left to the GPU.
"""

import pytest
import torch
from given_cases import compare_given, make_logits, run_given

from flce_tune.kernels import given_loss, given_rows, loss, torch_backend
from flce_tune.kernels.given_logits import cross_entropy
from flce_tune.kernels.values import GivenLogits, LossSpec, Wanted

triton_backend = pytest.importorskip("flce_tune.kernels.triton.backend")

pytestmark = [
    pytest.mark.usefixtures("poison"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="compiled kernels run in tests/gpu"),
]
N = 6
FEATURES = ("softcap", "label_smoothing", "z_loss", "class_weight", "token_weight", "ignored")


@pytest.fixture(params=[16, 1024], ids=["small blocks", "one block"])
def kernels(request, monkeypatch):
    """The op computes with Triton kernels."""
    monkeypatch.setattr(triton_backend, "STATISTICS_LANES", request.param)
    monkeypatch.setattr(triton_backend, "GRADIENT", (4 * request.param, 2))
    for module in (given_rows, given_loss):
        monkeypatch.setattr(module, "backend_of", lambda tensor: triton_backend)
    monkeypatch.setattr(given_rows, "has_kernels", lambda tensor: True)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("features", [(), FEATURES], ids=["nothing", "everything"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("vocab", [7, 1025])
def test_loss_and_gradient(dtype, features, reduction, in_place, vocab):
    case = make_logits(N, vocab, dtype, features)
    upstream = -1.5
    if reduction == "none":
        upstream = torch.randn(N, generator=torch.Generator().manual_seed(1)).bfloat16()
    compare_given(case, dtype, upstream, reduction=reduction, more={"in_place": in_place})


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_one_class_has_no_gradient(dtype):
    case = make_logits(65, 1, dtype, ("ignored", "label_smoothing"))  # 1/43 is no float
    assert not compare_given(case, dtype)["logits"].any()


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("first", [0, 3])
def test_rows_of_any_stride_and_alignment(first):
    case = make_logits(N, 150, torch.float32, ("ignored",))
    expected = run_given(cross_entropy, case)
    leaf = case.logits.detach().requires_grad_()
    wide = torch.nn.functional.pad(leaf, (first, 6), value=7.0)
    loss_ = cross_entropy(wide[:, first:-6], case.target, in_place=True)
    loss_.backward()
    # Which lane adds which logit depends on where the row begins.
    assert torch.allclose(loss_, expected["loss"], rtol=1e-6)
    assert torch.allclose(leaf.grad, expected["logits"], rtol=1e-6, atol=1e-9)
    assert bool((wide[:, :first] == 7).all() & (wide[:, -6:] == 7).all())
    assert torch.equal(wide[:, first:-6].detach(), leaf.grad)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_a_gradient_elsewhere_leaves_the_logits_and_its_surroundings(dtype):
    case = make_logits(N, 150, dtype)
    given = GivenLogits(case.logits, case.target)
    stats = torch_backend.statistics(case.logits, given, LossSpec(), Wanted())
    rows = loss.coefficients(given, stats, torch.ones(N), LossSpec())
    around = torch.full((N, 161), 7.0, dtype=dtype)
    before, over = case.logits.clone(), case.logits.clone()
    triton_backend.gradient(given.raw, given, stats, rows, LossSpec(), around[:, 5:155])
    triton_backend.gradient(over, given, stats, rows, LossSpec(), over)
    assert torch.equal(given.raw, before)
    assert torch.equal(around[:, 5:155], over)
    assert bool((around[:, :5] == 7).all() & (around[:, 155:] == 7).all())


@pytest.mark.usefixtures("kernels")
def test_a_label_out_of_range_poisons_its_row_alone(monkeypatch):
    monkeypatch.setattr(given_rows, "check_target_range", lambda *_: None)
    case = make_logits(N, 150)
    clean = run_given(cross_entropy, case, reduction="none")
    for label in (150, -1, 2**40):
        case.target[2] = label
        got = run_given(cross_entropy, case, reduction="none")
        for name, value in got.items():
            assert value[2].isnan().all()
            others = torch.arange(N) != 2
            assert torch.equal(value[others], clean[name][others])


@pytest.mark.usefixtures("kernels")
def test_a_write_in_place_is_noticed_by_whoever_saved_the_logits():
    case = make_logits(N, 150)
    leaf = case.logits.detach().requires_grad_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        cross_entropy(torch.tanh(leaf), case.target, in_place=True).backward()
