"""``overlay`` and ``factored``: numerators in dW's storage, against plain torch."""

import itertools
import math

import pytest
import torch
from loss_cases import compare, make

from flce_tune.errors import InvalidConfigError
from flce_tune.kernels import strategies
from flce_tune.kernels.config import Config, Tile
from flce_tune.kernels.limits import ALIGNMENT
from flce_tune.kernels.numerators import padded
from flce_tune.kernels.op import linear_cross_entropy
from flce_tune.kernels.problem import Device, Problem
from flce_tune.kernels.strategies import overlay, stored

pytestmark = pytest.mark.usefixtures("poison")

CONFIGS = {
    "overlay": Config("overlay", slab=64),
    "overlay, long slabs": Config("overlay", slab=256),
    "factored, one chunk": Config("factored", chunk=1024, slab=64),
    "factored, chunks": Config("factored", chunk=256, slab=64),
}
SHAPES = {
    "dW holds some": (700, 96, 1003),
    "dW holds nearly all": (300, 512, 777),
    "dW holds nothing": (700, 24, 203),
    "fewer columns than a block": (97, 24, 40),
}
OPTIONS = {
    "nothing": (),
    "all they know": (
        "ignored", "bias", "logit_scale", "z_loss", "class_weight", "token_weight", "divisor",
    ),
}  # fmt: skip
with_configs = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("features", OPTIONS.values(), ids=OPTIONS)
@with_configs
def test_loss_and_gradients_are_as_exact_as_plain_torch(config, features, shape, dtype):
    case = make(*shape, dtype, features)
    if "token_weight" in case.options:  # of one sign, so that the loss does not cancel
        case.options["token_weight"].abs_()
    compare(case, dtype, config=config)


@with_configs
def test_labels_far_below_the_largest_logit(config):
    """Tiles take their own reference there, and are brought to the row's."""
    case = make(300, 96, 1003, torch.bfloat16, ("ignored",))
    case.x[::2] *= 50
    compare(case, torch.bfloat16, config=config)


@with_configs
def test_a_frozen_input(config):
    compare(
        make(300, 96, 1003, torch.float32, ("bias",)), torch.float32, ("weight",), config=config
    )


@with_configs
def test_rows_of_nothing_but_minus_infinity_are_as_in_plain_torch(config):
    case = make(8, 24, 40, torch.float64)
    case.x[3] = float("inf")
    case.weight[:] = -1.0
    ours = linear_cross_entropy(case.x, case.weight, case.target, config=config)
    assert ours.isnan()


@pytest.mark.parametrize(
    ("features", "mode", "dtype", "reason"),
    [
        (("softcap",), "train", "bfloat16", "softcap"),
        (("label_smoothing",), "train", "bfloat16", "label_smoothing"),
        ((), "train", "float16", "float16"),
        ((), "train_frozen_weight", "bfloat16", "frozen weight"),
    ],
)
@with_configs
def test_what_they_cannot_do_is_refused(config, features, mode, dtype, reason):
    cpu = Device("cpu", "a CPU", (0, 0), 2, 0, 0)
    problem = Problem(300, 96, 1003, dtype, mode, features=features)
    assert reason in (strategies.reject(config, problem, cpu) or "")


def test_a_refused_option_says_so():
    case = make(8, 24, 40, features=("softcap",))
    with pytest.raises(InvalidConfigError, match="overlay knows no softcap"):
        linear_cross_entropy(
            case.x.requires_grad_(), case.weight.requires_grad_(), case.target,
            config=Config("overlay", slab=64), **case.options,
        )  # fmt: skip


@pytest.mark.parametrize("first", [0, 3])
@pytest.mark.parametrize("per_column", [12, 16, 64, 300])
def test_no_group_is_overwritten_before_it_is_read(per_column, first):
    """The layout, element by element: what each group writes and what is still to be read."""
    rows, slab, vocab = 60, 8, 1001
    count = stored.capacity(rows, per_column, vocab, first, slab)
    assert count > 0 or per_column * (vocab - first) < padded(rows) * slab * 2
    home = stored.Home.of(torch.arange(vocab * per_column).view(vocab, -1), torch.arange(0))
    if count == 0:
        return
    blocks = home.blocks(rows, first, slab, count)
    groups = list(home.groups(blocks))
    assert groups[0].columns.start == first
    assert sum(len(group) for group in groups) == count
    for index, group in enumerate(groups):
        written = group.columns.stop * per_column  # the gradient of all columns up to the group's
        unread = min(int(later.data.min()) for later in groups[index:])
        assert written <= unread


def test_blocks_begin_where_tiles_can_read_them():
    """24 bytes a row of split24's 8 bits, 1003 rows: not a multiple of 16."""
    home = stored.Home.of(torch.empty(1003, 24, dtype=torch.uint8), torch.empty(0).bfloat16())
    blocks = home.blocks(16, 0, 16, stored.capacity(16, 12, 1003, 0, 16))
    assert blocks.data.data_ptr() % ALIGNMENT == 0


def test_overlay_recomputes_what_the_storage_of_dw_does_not_hold():
    config = Config("overlay", slab=1024)
    held = [strategies.products(config, Problem(n, 4096, 128 * 1024)) for n in (4096, 8192, 65536)]
    assert held == [pytest.approx(4 - share, abs=0.02) for share in (1, 1 / 2, 1 / 16)]
    assert strategies.products(config, Problem(8192, 4096, 128 * 1024, mode="eval")) == 4


def test_nor_that_of_dx():
    config, problem = Config("overlay", slab=2048), Problem(16384, 4096, 32000)
    assert strategies.products(config, problem) == 4 - (4096 + 4 * 2048) / 32000

    block, sum_of_dx = 16384 * 2048 * 2, 16384 * 4096 * 4
    assert strategies.workspace(config, problem) == block + sum_of_dx + overlay.ELEMENTS_AHEAD * 2


@pytest.mark.parametrize(
    ("tokens", "hidden", "vocab", "start"),
    [(16384, 4096, 32000, 4096), (8192, 2304, 256000, 0), (16384, 4096, 128256, 0)],
)
def test_dx_is_left_alone_where_it_would_hold_little(tokens, hidden, vocab, start):
    rounds = overlay._rounds(Problem(tokens, hidden, vocab), Config("overlay", slab=2048))
    assert rounds[0].start == start


TALL = {
    "pieces": (1500, 256, 1100),
    "tokens of whole pieces, a last block in part": (2048, 256, 2000),
    "nothing recomputed": (1100, 512, 1000),
}


@pytest.fixture
def pieces(monkeypatch):
    """Pieces of dX of as few rows as there can be."""
    monkeypatch.setattr(overlay, "ELEMENTS_AHEAD", 1)


def in_dx(shape, config):
    """Whether dX's storage holds numerators."""
    return overlay._rounds(Problem(*shape), config)[0].start == shape[1]


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", TALL.values(), ids=TALL)
@pytest.mark.parametrize("features", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("slab", [128, 384])
def test_numerators_in_dx(slab, features, shape, dtype):
    config = Config("overlay", slab=slab)
    assert in_dx(shape, config)
    case = make(*shape, dtype, features)
    if "token_weight" in case.options:
        case.options["token_weight"].abs_()
    compare(case, dtype, config=config)


@pytest.mark.parametrize("needs", [("x", "weight"), ("x", "weight", "bias"), ("weight", "bias")])
def test_numerators_in_dx_for_what_is_wanted(needs):
    case = make(1500, 256, 1100, torch.float32, ("bias",))
    compare(case, torch.float32, needs, config=Config("overlay", slab=128))


@pytest.mark.parametrize("config", [Config("overlay", slab=1024)], ids=str)
@pytest.mark.parametrize(
    ("shape", "why"),
    [((4096, 4096, 32000), "all fits in dW"), ((8192, 4096, 4096), "dX holds more than there are"),
     ((4352, 4096, 32000), "rows of dW kept free for dX's block hold as many")],
    ids=str,
)  # fmt: skip
def test_dx_is_left_alone(config, shape, why):
    assert not in_dx(shape, config), why


def test_dx_holds_whole_tiles():
    tiles = {"logits": Tile(128, 256, 64), "dx": Tile(128, 64, 256), "dw": Tile(64, 128, 256)}
    config = Config("overlay", slab=1024, **tiles)
    assert [in_dx((16384, hidden, 32000), config) for hidden in (4096, 4096 + 64)] == [True, False]


@pytest.mark.parametrize("tokens", [257, 1000, 1024, 5000])
@pytest.mark.parametrize("hidden", [16, 96, 256, 4096])
@pytest.mark.parametrize("ahead", [1, 1 << 16, overlay.ELEMENTS_AHEAD])
def test_dx_overwrites_only_what_it_was_computed_from(tokens, hidden, ahead, monkeypatch):
    """Row by row: numerators hold their token's number until its piece of dX is written."""
    monkeypatch.setattr(overlay, "ELEMENTS_AHEAD", ahead)
    home = overlay.HiddenHome(torch.empty(tokens, hidden, dtype=torch.int32))
    assert (home.blocks.slab, home.blocks.columns) == (hidden, slice(0, hidden))
    assert home.partial.is_contiguous()
    token = torch.arange(tokens, dtype=torch.int32)[:, None]
    ((_, numerators),) = home.blocks.parts()
    numerators[:] = token
    done = 0
    for rows in home.pieces(tokens, hidden):
        assert rows.start == done
        assert torch.equal(numerators[rows], token[rows].expand(-1, hidden))
        home.partial[rows] = -1 - token[rows]
        assert torch.equal(numerators[rows], token[rows].expand(-1, hidden))  # read beside it
        done = rows.stop
    assert torch.equal(home.partial, (-1 - token).expand(-1, hidden))


@pytest.mark.parametrize("slab", [16, 48, 128])
@pytest.mark.parametrize("shape", [(700, 96, 1003), (700, 24, 203), (3000, 256, 5000),
                                   (16384, 64, 777)], ids=str)  # fmt: skip
def test_the_first_rows_of_dw_leave_its_blocks_alone(shape, slab):
    tokens, hidden, vocab = shape
    rounds = overlay._rounds(Problem(*shape), Config("overlay", slab=slab))
    assert in_dx(shape, Config("overlay", slab=slab))
    assert [step.start for step in rounds[1:]] == [step.end for step in rounds[:-1]]
    assert rounds[-1].end >= vocab
    dw = torch.zeros(vocab, hidden, dtype=torch.int32)
    buffer = torch.empty(padded(tokens), rounds[0].slab, dtype=torch.int32)
    held, _ = rounds[0].place(stored.Home.of(dw, dw), buffer, tokens)
    for blocks in held:
        blocks.data.fill_(1)
    dw[: rounds[0].start] = 2
    assert all((blocks.data == 1).all() for blocks in held)


def test_one_more_block_would_be_overwritten():
    rows, slab, vocab = 512, 16, 2000
    for per_column, first in itertools.product((64, 256, 512, 4096), (0, 32)):
        assert vocab * per_column % stored.UNIT == 0
        count = stored.capacity(rows, per_column, vocab, first, slab) + 1
        begin = [vocab * per_column - (count - j) * slab * rows for j in range(count)]
        written = [(first + (j + 1) * slab) * per_column for j in range(count)]
        assert any(w > b for w, b in zip(written, begin, strict=True))


def test_the_first_chunk_is_longer_than_the_workspace_has_room_for():
    from flce_tune.kernels.strategies.factored import _chunks

    tile = Tile(128, 256, 64)
    config = Config("factored", 5888, 3072, tile, Tile(128, 64, 256), Tile(64, 128, 256), "split24")
    problem = Problem(16384, 4096, 128256)
    (first, counts), (second, none) = _chunks(problem, config)
    assert (first, second, none) == (slice(0, 10752), slice(10752, 16384), ())
    held = (-(-128256 // 3072) - sum(counts)) * first.stop
    assert held <= -(-128256 // 3072) * 5888


def test_fitted_slabs_fill_whole_waves_of_dw():
    gpu = Device("cuda", "any", (9, 0), 132, 232448, 1 << 37)
    for hidden, across in ((1024, 4), (2304, 9), (4096, 16)):
        for slab in stored.fitted_slabs(Problem(8192, hidden, 256000), gpu):
            waves = slab // 128 * across / 132
            assert waves == pytest.approx(math.ceil(waves), rel=0.06)
    assert stored.fitted_slabs(Problem(8192, 1 << 20, 256000), gpu) == stored.SLABS
    assert stored.fitted_slabs(Problem(64, 64, 1000), gpu) == (stored.whole_slab(1000),)
    assert (
        stored.fitted_slabs(Problem(64, 64, 256), Device("cpu", "any", (0, 0), 8, 0, 1 << 34))
        == stored.SLABS
    )
