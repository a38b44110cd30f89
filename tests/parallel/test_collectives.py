"""One small collective a call; one for each part of a chunk where there are chunks."""

import counted_collectives
import pytest
import torch
from loss_cases import make

from flce_tune.kernels.config import Config

N, D, V = 512, 16, 96
BOUNDS = [0, 40, 96]
EMPTY = [0, 96, 96]  # the second rank has no class
HEADER = ("gather", 5, 40)
DX = ("sum", N * D, N * D * 4)


def statistics(tokens, columns=4):
    return ("gather", tokens * columns, tokens * columns * 4)


@pytest.mark.parametrize("bounds", [BOUNDS, EMPTY], ids=["two shards", "one of them empty"])
@pytest.mark.parametrize(
    "config",
    [Config("full"), Config("factored", chunk=N, slab=32), Config("overlay", slab=32),
     Config("recompute", slab=32)],
    ids=lambda c: c.strategy,
)  # fmt: skip
def test_one_collective_of_statistics_and_one_of_dx(ranks, config, bounds):
    case = make(N, D, V, torch.float32)
    for sent in ranks.run(2, counted_collectives.linear, case, bounds, config=config):
        assert sent == [HEADER, statistics(N), DX]


@pytest.mark.parametrize("bounds", [BOUNDS, EMPTY], ids=["two shards", "one of them empty"])
def test_chunks_in_two_parts_so_that_each_exchange_has_work_beside_it(ranks, bounds):
    case = make(N, D, V, torch.float32)
    config = Config("chunked", chunk=256)
    dx = ("sum", N * D // 2, N * D * 4 // 2)
    for sent in ranks.run(2, counted_collectives.linear, case, bounds, config=config):
        assert sent == [HEADER, *[statistics(128), statistics(128), dx] * 2]


@pytest.mark.parametrize("bounds", [BOUNDS, EMPTY], ids=["two shards", "one of them empty"])
def test_chunks_of_numerators_are_cut_alike_on_shards_of_any_width(ranks, bounds):
    case = make(N, D, V, torch.float32)
    config = Config("factored", chunk=256, slab=32)
    one, other = ranks.run(2, counted_collectives.linear, case, bounds, config=config)
    assert one == other
    assert sum(elements for kind, elements, _ in one if kind == "gather") == 5 + 4 * N


def test_label_smoothing_travels_with_the_rest(ranks):
    case = make(N, D, V, torch.float32, ["label_smoothing"])
    for sent in ranks.run(2, counted_collectives.linear, case, BOUNDS, config=Config("full")):
        assert sent == [HEADER, statistics(N, 5), DX]


def test_less_is_sent_where_less_is_asked(ranks):
    case = make(N, D, V, torch.bfloat16)
    half = ("sum", N * D, N * D * 2)
    for sent in ranks.run(
        2, counted_collectives.linear, case, BOUNDS, config=Config("full"),
        accumulate="weight_dtype",
    ):  # fmt: skip
        assert sent == [HEADER, statistics(N), half]
    for sent in ranks.run(2, counted_collectives.linear, case, BOUNDS, reduction="none"):
        assert sent == [HEADER, statistics(N), half]


def test_given_logits(ranks):
    case = make(N, D, V, torch.float32)
    logits = case.x @ case.weight.t()
    for sent in ranks.run(2, counted_collectives.given, logits, case.target, BOUNDS):
        assert sent == [HEADER, statistics(N, 5)]
