"""``tile_skip``: exact where nothing is left out, within its tolerance where something is."""

from dataclasses import replace

import pytest
import torch
from kept_tiles import share, watch
from loss_cases import compare, make, run, trained

from flce_tune.errors import InvalidConfigError, UnknownStrategyError
from flce_tune.kernels import reference, skipping, strategies
from flce_tune.kernels.config import Config, Tile
from flce_tune.kernels.module import LinearCrossEntropy
from flce_tune.kernels.op import linear_cross_entropy
from flce_tune.kernels.problem import Device, Problem
from flce_tune.kernels.skipping import Layout, Lists, kernels_of

pytestmark = pytest.mark.usefixtures("poison")

NOTHING_LEFT_OUT = Config("tile_skip", slab=4096, tolerance=1e-30)
OPTIONS = {
    "nothing": (),
    "all it knows": (
        "ignored", "bias", "logit_scale", "z_loss", "class_weight", "token_weight", "divisor",
    ),
}  # fmt: skip
SHAPES = {"ragged": (300, 96, 1003), "one tile": (97, 24, 40), "round": (256, 64, 512)}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("features", OPTIONS.values(), ids=OPTIONS)
def test_as_exact_as_plain_torch_where_nothing_is_left_out(features, shape, dtype):
    case = make(*shape, dtype, features)
    if "token_weight" in case.options:  # of one sign, so that the loss does not cancel
        case.options["token_weight"].abs_()
    compare(case, dtype, config=NOTHING_LEFT_OUT)


@pytest.mark.parametrize("needs", [("x",), ("weight",), ("bias",), ("x", "bias")], ids=str)
def test_frozen_inputs(needs):
    case = make(300, 32, 1003, torch.float32, ("bias", "ignored"))
    compare(case, torch.float32, needs, config=NOTHING_LEFT_OUT)


def relative(a, b):
    return float((a.double() - b).norm() / b.norm())


@pytest.fixture
def kept(monkeypatch):
    """The tiles each call keeps."""
    return watch(monkeypatch, kernels_of(torch.empty(0)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_what_is_left_out_is_most_of_it_and_changes_little(kept, dtype):
    case = trained(dtype=dtype)
    truth = run(reference.linear_cross_entropy, case.to(torch.float64))
    exact = run(linear_cross_entropy, case, config=NOTHING_LEFT_OUT)
    ours = run(linear_cross_entropy, case, tile_skip=1e-4)
    assert share(kept[1]) < 0.5 < share(kept[0])
    assert torch.equal(ours["loss"], exact["loss"])
    assert torch.equal(ours["bias"], exact["bias"])
    for name in ("x", "weight"):
        rounding = relative(truth[name].to(torch.bfloat16), truth[name])
        added = relative(ours[name], truth[name]) - relative(exact[name], truth[name])
        assert 0 < added < rounding, name


def test_rare_columns_keep_their_gradient():
    """What stands in for a tile has the right size: without it these rows would get nothing."""
    case = trained(dtype=torch.float64)
    truth = run(reference.linear_cross_entropy, case)["weight"]
    ours = run(linear_cross_entropy, case, tile_skip=1e-3)["weight"]
    rare = torch.argsort(case.bias)[:2048]
    rare = rare[~torch.isin(rare, case.target)]
    norms = ours[rare].norm() / truth[rare].norm()
    cosine = torch.nn.functional.cosine_similarity(ours[rare].flatten(), truth[rare].flatten(), 0)
    assert 0.9 < norms < 1.1
    assert cosine > 0.8


def test_a_smaller_tolerance_is_closer(kept):
    case = trained(dtype=torch.float64)
    truth = run(reference.linear_cross_entropy, case)["x"]
    errors = [
        relative(run(linear_cross_entropy, case, tile_skip=tolerance)["x"], truth)
        for tolerance in (1e-2, 1e-4, 1e-6)
    ]
    assert errors == sorted(errors, reverse=True)
    assert errors[2] < errors[0] / 30
    shares = [share(keep) for keep in kept]
    assert shares == sorted(shares)


def test_nothing_is_left_out_of_an_untrained_model(kept):
    case = make(300, 64, 512, torch.float32)
    run(linear_cross_entropy, case, tile_skip=1e-4)
    assert [share(keep) for keep in kept] == [1.0]


def test_twice_the_same():
    case = trained(dtype=torch.bfloat16)
    first, second = (run(linear_cross_entropy, case, tile_skip=1e-4) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_token_that_is_nan_spoils_its_own_gradient_only():
    case = trained(tokens=256, vocab=2048)
    case.x[7] = float("nan")
    ours = run(linear_cross_entropy, case, ("x",), tile_skip=1e-4)["x"]
    spoilt = ours.isnan().any(1).nonzero().flatten()
    assert spoilt.tolist() == [7]


def test_ignored_tokens_ask_for_no_tile(kept):
    case = replace(trained(tokens=256, vocab=2048), bias=None)
    target = case.target.clone()
    case.x[1::2] = 60 * torch.nn.functional.normalize(case.weight[target[1::2]])
    case.x[::2] = 0  # flat: they would ask for every tile
    run(linear_cross_entropy, case, tile_skip=1e-4)
    target[::2] = -100
    ours = run(linear_cross_entropy, replace(case, target=target), tile_skip=1e-4)
    assert share(kept[1]) < share(kept[0]) == 1.0
    assert (ours["x"][::2] == 0).all()


def test_nothing_counts():
    case = trained(tokens=64, vocab=512)
    ours = run(linear_cross_entropy, replace(case, target=torch.full((64,), -100)), tile_skip=1e-4,
               reduction="sum")  # fmt: skip
    assert ours["loss"] == 0
    assert not ours["x"].any()
    assert not ours["weight"].any()


def test_losses_per_token_are_exact():
    case = trained(tokens=64, vocab=512)
    compare(case, torch.float32, reduction="none", upstream=1.0, more={"tile_skip": 0.5})


def test_the_default_goes_with_every_gpu():
    for capability, shared in (((8, 0), 166912), ((8, 6), 101376), ((9, 0), 232448)):
        gpu = Device("cuda", "a GPU", capability, 108, shared, 1 << 36)
        strategy = strategies.get("tile_skip")
        for hidden in (64, 1024, 4096):
            problem = Problem(4096, hidden, 32000)
            assert strategy.reject(strategy.default(problem, gpu), problem, gpu) is None


def test_tiles_must_go_together():
    gpu = Device("cuda", "a GPU", (9, 0), 132, 232448, 1 << 36)
    problem, strategy = Problem(4096, 1024, 32000), strategies.get("tile_skip")
    usual = strategy.default(problem, gpu)
    for changed, reason in (
        (replace(usual, dw=Tile(64, 64, 128)), "the dw tile has 64 columns"),
        (replace(usual, dx=Tile(128, 256, 64, num_stages=2)), "the dx tile takes 256 columns"),
        (replace(usual, dw=Tile(256, 128, 64, num_stages=2)), "the dw tile takes 256 tokens"),
        (replace(usual, logits=None), "cuBLAS"),
        (replace(usual, tolerance=None), "tolerance"),
    ):
        assert reason in (strategy.reject(changed, problem, gpu) or "")


@pytest.mark.parametrize("feature", ["softcap", "label_smoothing"])
def test_what_it_does_not_know_is_refused(feature):
    case = make(8, 24, 40, features=(feature,))
    with pytest.raises(InvalidConfigError, match=f"tile_skip knows no {feature}"):
        run(linear_cross_entropy, case, tile_skip=1e-4)


@pytest.mark.parametrize("tolerance", [0.0, 1.0, -1e-4, float("nan"), "1e-4", True])
def test_a_tolerance_that_is_no_probability_is_refused(tolerance):
    case = make(8, 24, 40)
    with pytest.raises(ValueError, match="tile_skip must be a number between 0 and 1"):
        run(linear_cross_entropy, case, tile_skip=tolerance)


def test_it_chooses_the_config_itself():
    case = make(8, 24, 40)
    for keywords in ({"config": Config("full")}, {"workspace_limit": 1 << 20}):
        with pytest.raises(ValueError, match="neither config nor workspace_limit"):
            run(linear_cross_entropy, case, tile_skip=1e-4, **keywords)


def test_nobody_gets_it_who_has_not_asked():
    cpu = Device("cpu", "a CPU", (0, 0), 2, 0, 0)
    problem = Problem(300, 96, 1003)
    config = Config("tile_skip", slab=4096, tolerance=1e-4)
    assert "tile_skip" not in strategies.names()
    assert "differs from that of" in (strategies.reject(config, problem, cpu) or "")
    strategies.require(config, problem, cpu)
    with pytest.raises(UnknownStrategyError, match="not tuned or chosen"):
        strategies.require_tunable("tile_skip")


@pytest.mark.parametrize(
    ("tokens", "vocab"), [(1, 1), (128, 128), (129, 16384), (16384, 128257), (16512, 16512)]
)
def test_the_layout_has_room_for_what_stands_in(tokens, vocab):
    layout = Layout(tokens, vocab, 128, 128)
    assert layout.row_end >= tokens
    assert layout.column_end >= vocab
    assert layout.height - layout.row_end >= layout.row_tiles
    assert layout.width - layout.column_end >= layout.column_tiles
    assert layout.height % 128 == layout.width % 128 == 0


def test_lists_name_what_is_kept_and_what_stands_in():
    keep = torch.tensor([[True, False, True], [True, True, True], [False, False, False]])
    lists = Lists.of(keep, more=2)
    told = [row[:count].tolist() for row, count in zip(lists.tiles, lists.count, strict=True)]
    assert told == [[0, 2, 3, 4], [0, 1, 2], [3, 4]]


def test_the_sample_looks_at_tokens_that_count():
    case = trained(tokens=1000, vocab=512)
    row_weight = torch.zeros(1000)
    row_weight[700:900] = 1.0
    inputs = reference_inputs(case)
    shares = skipping._sampled_probability(inputs, row_weight, skipping.LossSpec())
    logits = case.x[700:900] @ case.weight.t() + case.bias
    counted = logits.softmax(1).mean(0)  # 256 of 200 tokens: some are taken twice
    assert float((shares - counted).abs().sum()) < 0.1
    assert float((logits_of(case).softmax(1).mean(0) - counted).abs().sum()) > 0.1


def logits_of(case):
    return case.x @ case.weight.t() + case.bias


def reference_inputs(case):
    return skipping.Inputs(case.x, case.weight, case.target, case.bias)


def test_inside_torch_compile():
    case = trained(tokens=64, vocab=512)

    def loss(x, weight):
        return linear_cross_entropy(x, weight, case.target, bias=case.bias, tile_skip=1e-4)

    results = []
    for function in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        x, weight = (t.clone().requires_grad_() for t in (case.x, case.weight))
        function(x, weight).backward()
        results.append((x.grad, weight.grad))
    for eager, compiled in zip(*results, strict=True):
        assert torch.equal(eager, compiled)


def test_it_goes_with_dropping_the_ignored_and_with_the_module():
    case = trained(tokens=256, vocab=1024)
    case.target[::3] = -100
    exact = run(linear_cross_entropy, case, tile_skip=1e-4)
    for function in (
        LinearCrossEntropy(tile_skip=1e-4, drop_ignored=True),
        LinearCrossEntropy(tile_skip=1e-4),
    ):
        ours = run(function, case)
        for name in exact:
            torch.testing.assert_close(ours[name], exact[name], rtol=1e-3, atol=1e-5)


def test_a_split_vocabulary_is_refused():
    case = make(8, 24, 40)
    with pytest.raises(ValueError, match="process_group"):
        linear_cross_entropy(
            case.x, case.weight, case.target, tile_skip=1e-4, process_group=object()
        )
