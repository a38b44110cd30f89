"""Which stored config serves which problem."""

from dataclasses import replace

import pytest

from flce_tune.dispatch.rules import MAX_RATIO
from flce_tune.kernels import strategies
from flce_tune.kernels.config import Config, Tile
from flce_tune.kernels.problem import Device, Problem


def chunked(chunk: int) -> Config:
    return Config("chunked", chunk=chunk)


def test_without_measurements_the_default_is_chosen(make_dispatcher, problem, h200):
    choice = make_dispatcher().choose(problem, h200)
    assert choice.rule == "default"
    assert choice.config == strategies.default(problem, h200)
    assert choice.winner is None


def test_the_exact_winner_goes_before_everything_else(make_dispatcher, make_winner, problem, h200):
    exact = make_winner(chunked(256), 9.0)
    choice = make_dispatcher(
        exact,
        make_winner(chunked(512), 1.0, tokens=8192),
        make_winner(chunked(1024), 1.0, vocab=128000),
        shipped=(make_winner(chunked(2048), 1.0),),
    ).choose(problem, h200)
    assert (choice.rule, choice.config, choice.winner) == ("exact", chunked(256), exact)


def test_every_rule_is_followed_by_the_next(make_dispatcher, make_winner, problem, h200):
    h100 = replace(h200, name="NVIDIA H100")
    exact = make_winner(chunked(1))
    tokens = make_winner(chunked(2), tokens=8192)
    shape = make_winner(chunked(3), vocab=128000)
    shipped = make_winner(chunked(4))
    architecture = make_winner(chunked(5), device=h100)

    def rule(*winners, **arguments) -> tuple[str, int | None]:
        choice = make_dispatcher(*winners, **arguments).choose(problem, h200)
        return choice.rule, choice.config.chunk

    assert rule(exact, tokens, shape, architecture, shipped=(shipped,)) == ("exact", 1)
    assert rule(tokens, shape, architecture, shipped=(shipped,)) == ("nearest tokens", 2)
    assert rule(shape, architecture, shipped=(shipped,)) == ("nearest shape", 3)
    assert rule(architecture, shipped=(shipped,)) == ("pretuned", 4)
    assert rule(architecture) == ("same architecture", 5)


def test_nearest_tokens_is_nearest_in_the_logarithm(make_dispatcher, make_winner, problem, h200):
    dispatcher = make_dispatcher(
        make_winner(chunked(1), tokens=1024), make_winner(chunked(2), tokens=12288)
    )
    for tokens, chunk in ((512, 1), (2048, 1), (3072, 1), (4096, 2), (8192, 2), (65536, 2)):
        choice = dispatcher.choose(replace(problem, tokens=tokens), h200)
        assert (choice.rule, choice.config.chunk) == ("nearest tokens", chunk), tokens


def test_nearest_shape_counts_hidden_vocabulary_and_tokens(
    make_dispatcher, make_winner, problem, h200
):
    far = make_winner(chunked(1), vocab=32000)
    near = make_winner(chunked(2), hidden=5120)
    same_but_few_tokens = make_winner(chunked(3), hidden=5120, tokens=1024)
    choice = make_dispatcher(far, same_but_few_tokens, near).choose(problem, h200)
    assert (choice.rule, choice.config.chunk) == ("nearest shape", 2)


@pytest.mark.parametrize(
    "axis", [{"tokens": 4096 // MAX_RATIO}, {"hidden": 4096 // MAX_RATIO}, {"vocab": 16032}]
)
def test_a_winner_too_far_away_says_nothing(make_dispatcher, make_winner, problem, h200, axis):
    (name, size) = next(iter(axis.items()))
    at_the_edge = make_dispatcher(make_winner(chunked(64), **axis))
    beyond = make_dispatcher(make_winner(chunked(64), **{name: size // 2}))
    assert at_the_edge.choose(problem, h200).config == chunked(64)
    assert beyond.choose(problem, h200).rule == "default"


@pytest.mark.parametrize(
    "other",
    [
        {"dtype": "float32"},
        {"dtype": "float16"},
        {"mode": "eval"},
        {"mode": "train_frozen_weight"},
        {"accumulate": "weight_dtype"},
        {"features": ("per_token",)},
        {"features": ("bias", "per_token")},
    ],
)
def test_nothing_crosses_dtype_mode_accumulate_and_per_token(
    make_dispatcher, make_winner, problem, h200, other
):
    stored = make_winner(chunked(64))
    dispatcher = make_dispatcher(stored, shipped=(stored,))
    assert dispatcher.choose(problem, h200).rule == "exact"
    assert dispatcher.choose(replace(problem, **other), h200).rule == "default"


def test_missing_features_may_be_lent_from_the_problem_without_them(
    make_dispatcher, make_winner, problem, h200
):
    plain, with_bias = make_winner(chunked(1)), make_winner(chunked(2), features=("bias",))
    wanted = replace(problem, features=("bias", "softcap"))
    assert make_dispatcher(plain).choose(wanted, h200).config == chunked(1)
    both = make_dispatcher(plain, with_bias)
    assert both.choose(wanted, h200).config == chunked(2)
    assert both.choose(replace(problem, features=("softcap",)), h200).config == chunked(1)
    assert make_dispatcher(with_bias).choose(problem, h200).rule == "default"


def test_a_missing_feature_weighs_as_much_as_half_the_tokens(
    make_dispatcher, make_winner, problem, h200
):
    wanted = replace(problem, features=("bias",))
    plain = make_winner(chunked(1))
    near = make_winner(chunked(2), tokens=6144, features=("bias",))
    far = make_winner(chunked(3), tokens=16384, features=("bias",))
    assert make_dispatcher(plain, near).choose(wanted, h200).config == chunked(2)
    assert make_dispatcher(plain, far).choose(wanted, h200).config == chunked(1)


@pytest.mark.parametrize(
    "other", [{"sm_count": 66}, {"shared_memory_per_block": 101376}, {"name": "NVIDIA GH200"}]
)
def test_another_device_of_the_architecture_is_no_exact_match(
    make_dispatcher, make_winner, problem, h200, other
):
    dispatcher = make_dispatcher(make_winner(chunked(64), device=replace(h200, **other)))
    assert dispatcher.choose(problem, h200).rule == "same architecture"


@pytest.mark.parametrize("other", [{"capability": (10, 0)}, {"capability": (8, 9)}])
def test_nothing_crosses_the_architecture(make_dispatcher, make_winner, problem, h200, other):
    stored = make_winner(chunked(64), device=replace(h200, **other))
    assert make_dispatcher(stored, shipped=(stored,)).choose(problem, h200).rule == "default"


def test_memory_driver_and_host_are_no_part_of_the_identity(
    make_dispatcher, make_winner, problem, h200
):
    stored = make_winner(chunked(64), device=replace(h200, memory_bytes=1))
    driver = replace(stored.measurement.toolchain, driver="1.0", torch="2.8.0", cuda="12.4")
    stored = replace(stored, measurement=replace(stored.measurement, toolchain=driver))
    assert make_dispatcher(stored).choose(problem, h200).rule == "exact"


def test_one_chip_under_two_names_goes_before_a_smaller_chip(
    make_dispatcher, make_winner, problem, h200
):
    slice_of_it = make_winner(chunked(1), device=replace(h200, sm_count=66))
    relabelled = make_winner(chunked(2), tokens=8192, device=replace(h200, name="NVIDIA GH200"))
    choice = make_dispatcher(slice_of_it, relabelled).choose(problem, h200)
    assert choice.config == chunked(2)


def test_the_limit_picks_from_the_front(make_dispatcher, make_winner, h200):
    problem = Problem(16384, 4096, 128256)
    configs = [Config("full"), chunked(1024), Config("recompute", slab=1024)]
    needed = [strategies.workspace(config, problem) for config in configs]
    assert needed == sorted(needed, reverse=True)
    dispatcher = make_dispatcher(
        *(make_winner(c, i + 1.0, tokens=16384) for i, c in enumerate(configs))
    )

    def chosen(limit: int | None) -> Config:
        choice = dispatcher.choose(problem, h200, workspace_limit=limit)
        assert choice.rule == "exact"
        return choice.config

    assert chosen(None) == configs[0]
    for config, workspace in zip(configs, needed, strict=True):
        assert chosen(workspace) == config
    assert chosen(needed[0] - 1) == configs[1]
    assert chosen(needed[1] - 1) == configs[2]


def test_the_limit_holds_for_every_n_of_the_bucket(make_dispatcher, make_winner, problem, h200):
    dispatcher = make_dispatcher(make_winner(Config("full"), tokens=4096))
    fewest = replace(problem, tokens=3073)
    limit = strategies.workspace(Config("full"), fewest)
    assert limit < strategies.workspace(Config("full"), problem)
    for first in (fewest, problem):
        choice = dispatcher.choose(first, h200, workspace_limit=limit)
        assert strategies.workspace(choice.config, problem) <= limit


def test_under_a_limit_a_fitting_neighbour_goes_before_the_default(
    make_dispatcher, make_winner, problem, h200
):
    small = Config("recompute", slab=1024)
    dispatcher = make_dispatcher(make_winner(Config("full")), make_winner(small, tokens=8192))
    limit = strategies.workspace(small, problem)
    choice = dispatcher.choose(problem, h200, workspace_limit=limit)
    assert (choice.rule, choice.config) == ("nearest tokens", small)


def test_without_a_limit_memory_is_not_paid_for_three_percent(
    make_dispatcher, make_winner, problem, h200
):
    full, long, short = Config("full"), chunked(256), chunked(128)

    def winner(config, ms, workspace):
        made = make_winner(config, ms)
        return replace(made, measurement=replace(made.measurement, workspace_bytes=workspace))

    dispatcher = make_dispatcher(
        winner(full, 1.0, 400), winner(long, 1.02, 100), winner(short, 1.04, 50)
    )
    assert dispatcher.choose(problem, h200).config == long
    assert dispatcher.choose(problem, h200, workspace_limit=1 << 50).config == full
    hasty = make_dispatcher(winner(full, 1.0, 400), winner(long, 1.031, 100))
    assert hasty.choose(problem, h200).config == full


def test_a_neighbour_that_would_recompute_more_is_no_bargain(
    make_dispatcher, make_winner, problem, h200
):
    overlay, full = strategies.get("overlay").default(problem, h200), Config("full")
    small = make_winner(overlay, 1.02)
    large = make_winner(full, 1.0)
    large = replace(large, measurement=replace(large.measurement, workspace_bytes=1 << 30))
    dispatcher = make_dispatcher(small, large)
    assert dispatcher.choose(problem, h200).config == overlay
    longer = replace(problem, tokens=6000)  # of which dW's storage holds two thirds
    assert dispatcher.choose(longer, h200).config == full
    narrower = replace(problem, hidden=3584)
    assert dispatcher.choose(narrower, h200).config == full
    shorter = replace(problem, tokens=3000)
    assert dispatcher.choose(shorter, h200).config == overlay


def test_if_nothing_fits_the_smallest_is_chosen_and_says_so(
    make_dispatcher, make_winner, problem, h200
):
    dx = Tile(128, 64, 128, num_warps=4)
    smaller_than_default = Config("recompute", slab=8, dx=dx, accumulator="split24")
    default = strategies.default(problem, h200, 1)
    assert strategies.workspace(smaller_than_default, problem) < strategies.workspace(
        default, problem
    )
    without = make_dispatcher(make_winner(Config("full"))).choose(problem, h200, workspace_limit=1)
    assert without.config == default
    with_it = make_dispatcher(make_winner(smaller_than_default)).choose(
        problem, h200, workspace_limit=1
    )
    assert with_it.config == smaller_than_default
    for choice in (without, with_it):
        assert choice.rule == "default"
        assert "nothing fits in 1 bytes" in choice.detail


def test_a_neighbour_whose_tile_does_not_fit_is_passed_over(
    make_dispatcher, make_winner, problem, h200, recwarn
):
    large = Config("chunked", chunk=512, logits=Tile(256, 128, 64, num_warps=8, num_stages=3))
    small_gpu = replace(h200, name="small", shared_memory_per_block=101376)
    assert strategies.reject(large, problem, h200) is None
    assert strategies.reject(large, problem, small_gpu) is not None
    dispatcher = make_dispatcher(
        make_winner(large, device=h200), make_winner(chunked(64), tokens=8192, device=h200)
    )
    assert dispatcher.choose(problem, small_gpu).config == chunked(64)
    assert not recwarn.list


def test_validity_depends_on_the_bucket_alone(h200: Device):
    """What ``choose`` relies on when it answers for all N of a bucket at once."""
    cpu = Device("cpu", "x86_64", (0, 0), 2, 0, 0)
    for device in (h200, cpu):
        for mode in ("train", "train_frozen_weight", "eval"):
            bucket = Problem(512, 1024, 32000, mode=mode)
            for config in strategies.space(bucket, device):
                for tokens in (385, 400, 511):
                    fewer = replace(bucket, tokens=tokens)
                    assert strategies.reject(config, fewer, device) is None, config


def test_the_account_is_complete(make_dispatcher, make_winner, h200, recwarn):
    problem = Problem(16384, 4096, 128256)
    dispatcher = make_dispatcher(
        make_winner({"strategy": "chunked", "BLOCK": 8}, 0.5, tokens=16384),
        make_winner(Config("full"), 0.6, tokens=16384),
        make_winner(chunked(512), tokens=8192),
    )
    limit = strategies.workspace(chunked(512), problem)
    told = dispatcher.explain(problem, h200, workspace_limit=limit)
    assert [step.rule for step in told.steps] == [
        "exact",
        "nearest tokens",
        "nearest shape",
        "pretuned",
        "same architecture",
        "default",
    ]
    assert [step.outcome for step in told.steps] == ["nothing usable", "chosen"] + [
        "not needed"
    ] * 4
    damaged, too_large = told.steps[0].skipped
    assert damaged.broken
    assert "BLOCK" in damaged.reason
    assert not too_large.broken
    assert f"exceeds {limit:,}" in too_large.reason
    assert not recwarn.list, "explaining warns of nothing"
    assert told.choice == dispatcher.choose(problem, h200, workspace_limit=limit)

    as_dict = told.to_dict()
    assert as_dict["config"] == {"strategy": "chunked", "chunk": 512}
    assert as_dict["rule"] == "nearest tokens"
    assert as_dict["steps"][0]["skipped"][0]["broken"] is True
    text = told.to_text()
    for expected in ("NVIDIA H200", "V=128256", "chunked chunk=512", "BLOCK", "2. nearest tokens"):
        assert expected in text
