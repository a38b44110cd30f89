"""Where gradients' tiles scheduled by hand are allowed, proposed and taken."""

import itertools
from dataclasses import replace

import pytest
import torch

from flce_tune.kernels import strategies
from flce_tune.kernels.config import ACCUMULATORS, Config, Tile
from flce_tune.kernels.label_sums import carried_bytes, label_sum_bytes
from flce_tune.kernels.limits import reject_tile, shared_memory
from flce_tune.kernels.numerators import Entries
from flce_tune.kernels.problem import Device, Problem
from flce_tune.kernels.products import Sum
from flce_tune.kernels.splits import split_bytes
from flce_tune.kernels.strategies.common import GEMMS, TILES, accumulators, preferred_tiles

H200 = Device("cuda", "NVIDIA H200", (9, 0), 132, 232448, 150 << 30)
H100_NEXT = replace(H200, capability=(10, 0))
PROBLEM = Problem(8192, 4096, 128256)
DX, DW = (TILES[name][0] for name in ("dx", "dw"))
NARROW_DX = Tile(128, 32, 256, 8, 9, 16, "shared")
NARROW_DW = Tile(32, 128, 256, 8, 9, 16, "shared")


@pytest.fixture(autouse=True)
def _triton(monkeypatch):
    monkeypatch.setattr("flce_tune.kernels.limits._triton", lambda: (3, 6))


@pytest.mark.parametrize(
    ("tile", "contraction"), [(DX, "v"), (NARROW_DX, "v"), (DW, "n"), (NARROW_DW, "n")], ids=str
)
def test_tiles_keep_any_sum_but_float32(tile, contraction):
    for accumulator in ("", "split24", "weight_dtype"):
        assert reject_tile(tile, contraction, PROBLEM, H200, accumulator) is None
    reason = reject_tile(tile, contraction, PROBLEM, H200, "fp32")
    assert reason.startswith("a shared tile keeps no float32 sums")
    assert shared_memory(tile, contraction, 2) < H200.shared_memory_per_block


@pytest.mark.parametrize(
    ("tile", "contraction", "reason"),
    [
        (replace(DX, schedule="ping_pong"), "v", "computes logits only"),
        (replace(DX, n_block=64), "v", "is 128 × 256, got 64 × 256"),
        (replace(DW, d_block=128), "n", "is 128 × 256, got 128 × 128"),
        (replace(DX, v_block=16), "v", "takes 32 or 64 at once, got 16"),
        (replace(DW, n_block=128, num_stages=2), "n", "takes 32 or 64 at once, got 128"),
        (replace(DW, num_warps=4), "n", "has 8 warps, got 4"),
        (replace(DW, num_stages=1), "n", "has at least 2 stages, got 1"),
        (replace(NARROW_DW, num_stages=10), "n", r"num_stages must be in \[1, 9\], got 10"),
        (replace(DX, num_stages=5), "v", "bytes of shared memory"),
    ],
    ids=str,
)
def test_others_are_refused_with_a_reason(tile, contraction, reason):
    with pytest.raises(ValueError, match=reason):
        raise ValueError(reject_tile(tile, contraction, PROBLEM, H200))


def test_they_need_hopper_and_bfloat16():
    assert "compute capability 9.0" in reject_tile(DX, "v", PROBLEM, H100_NEXT)
    assert "bfloat16 only" in reject_tile(DX, "v", replace(PROBLEM, dtype="float16"), H200)


PROBLEMS = [
    Problem(tokens, hidden, vocab, dtype, accumulate=accumulate, mode=mode, features=features)
    for tokens, hidden, vocab in ((8192, 4096, 128256), (300, 72, 1000), (1, 8, 17))
    for dtype, accumulate in (
        ("bfloat16", "fp32"), ("bfloat16", "weight_dtype"), ("float16", "fp32"),
    )
    for mode in ("train", "train_frozen_weight", "eval")
    for features in ((), ("per_token",), ("softcap",))
]  # fmt: skip


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_no_default_is_refused(problem):
    assert strategies.reject(strategies.default(problem, H200), problem, H200) is None
    for name in strategies.names():
        chosen = strategies.get(name).default(problem, H200)
        reason = strategies.reject(chosen, problem, H200)
        assert reason is None or "shared tile" not in reason
    tiles = preferred_tiles(problem, H200)
    for name in ("dx", "dw"):
        tile = getattr(tiles, name)
        for kept in ("", accumulators(problem, name)[-1]):
            assert tile is None or reject_tile(tile, GEMMS[name], problem, H200, kept) is None


@pytest.mark.parametrize("name", ["chunked", "recompute", "factored", "overlay", "full"])
def test_spaces_hold_them_beside_tiles_for_float32_sums(name):
    space = strategies.space(PROBLEM, H200, strategy=name)
    assert {DX, DW} <= {tile for config in space for tile in (config.dx, config.dw)}
    summed = {"chunked": "dw", "factored": "dw", "recompute": "dx", "overlay": "dx"}
    if name in summed:
        tiles = [getattr(c, summed[name]) for c in space if c.accumulator == "fp32"]
        assert any(tile is not None and tile.schedule == "compiler" for tile in tiles)
        assert not {DX, DW} & set(tiles)


@pytest.mark.parametrize(
    ("config", "rows"),
    [
        (Config("full", dx=DX), 8192),
        (Config("chunked", chunk=512, dx=DX), 512),
        (Config("recompute", slab=4096, dx=DX), 8192),
    ],
    ids=str,
)
def test_partial_sums_are_part_of_the_workspace(config, rows):
    by_hand, compiled = (
        strategies.workspace(replace(config, dx=tile), PROBLEM) for tile in (DX, DX.compiled)
    )
    assert by_hand - compiled == split_bytes(rows, PROBLEM.hidden, PROBLEM.vocab)


def test_tile_skip_takes_none():
    problem = replace(PROBLEM, tokens=1024)
    default = strategies.get("tile_skip").default(problem, H200)
    assert default.dx == default.dx.compiled
    assert default.dw == default.dw.compiled
    by_hand = replace(default, dw=DW)
    assert "no products scheduled by hand" in strategies.get("tile_skip").reject(
        by_hand, problem, H200
    )


@pytest.fixture
def taken(monkeypatch):
    """Who is asked for a product."""
    pytest.importorskip("triton")
    launch = pytest.importorskip("flce_tune.kernels.triton.launch")
    products = pytest.importorskip("flce_tune.kernels.hopper.products")
    asked = []

    class Kernel:
        def __init__(self, name):
            self.name = name

        def __getitem__(self, grid):
            return lambda *args, **kwargs: asked.append((self.name, kwargs))

    monkeypatch.setattr(launch, "product_kernel", Kernel("compiler"))
    monkeypatch.setattr(products, "product_kernel", Kernel("hand"))
    monkeypatch.setattr(products, "launch_entries", lambda *_: asked.append(("entries", {})))
    label_sums = products.launch_label_sums

    def summed(entries, m, first):
        monkeypatch.setattr(entries_module, "label_sums_kernel", Kernel("sums"))
        sums = label_sums(entries, m, first)
        asked[-1] = ("sums", {"rows": slice(first, first + m), "kept": len(sums.rows)})
        return sums

    entries_module = pytest.importorskip("flce_tune.kernels.triton.entries")
    monkeypatch.setattr(products, "launch_label_sums", summed)
    return asked


def add_chunks(
    parts, accumulator, *, labels=True, dtype=torch.bfloat16, n=40, vocab=256, slab=256, **options
):
    """Let a sum of dW be launched."""
    from flce_tune.kernels.numerators import Blocks, padded

    hidden = 24
    x = torch.zeros(n, hidden, dtype=torch.bfloat16)
    data = torch.empty(-(-vocab // slab) * padded(n), slab, dtype=torch.bfloat16, device="cpu")
    blocks = Blocks(data, n, slice(0, vocab))
    target = torch.zeros(n, dtype=torch.int64)
    entries = Entries.of_dw(torch.zeros(n), target, x, vocab, 128) if labels else None
    out = torch.empty(vocab, hidden, dtype=dtype)
    dw = Sum(out, parts, accumulator, DW, "n", **options)
    for _ in range(parts):
        dw.add_transposed([blocks], x, entries)


@pytest.mark.parametrize("accumulator", ["split24", "weight_dtype"])
def test_entries_join_a_kept_sum_after_the_first_product_and_before_others(taken, accumulator):
    add_chunks(3, accumulator)
    names = [name for name, _ in taken]
    assert names == ["hand", "entries", "entries", "hand", "entries", "hand"]
    flags = [(kwargs["PRIOR"], kwargs["LAST"]) for name, kwargs in taken if name == "hand"]
    rounded = accumulator == "weight_dtype"
    assert flags == [(False, rounded), (True, rounded), (True, True)]


@pytest.mark.parametrize(
    ("accumulator", "options"),
    [
        ("fp32", {"parts": 2}),
        ("split24", {"parts": 1, "yielding": True}),
        ("split24", {"parts": 2, "yielding": True}),
        ("weight_dtype", {"parts": 2, "dtype": torch.float32}),
    ],
    ids=str,
)
def test_what_the_hand_cannot_do_the_compiler_does(taken, accumulator, options):
    add_chunks(accumulator=accumulator, **options)
    assert {name for name, _ in taken} == {"compiler"}
    assert all(kwargs["num_stages"] == 3 for _, kwargs in taken)


@pytest.mark.parametrize("accumulator", ACCUMULATORS)
def test_a_part_written_once_without_entries_needs_no_sum(taken, accumulator):
    add_chunks(1, accumulator, labels=False)
    assert [name for name, _ in taken] == ["hand"]


@pytest.mark.parametrize(
    ("n", "vocab", "slab", "pieces", "kept"),
    [
        (40, 300, 256, [300], 40),
        (8448, 17000, 768, [17000], 8448),
        (8449, 17000, 768, [8448, 8448, 104], 8448),
        (8449, 17000, 4096, [8192, 8192, 616], 8192),
        (9000, 17000, 8960, [8960, 8040], 8960),
    ],
)
def test_a_part_written_once_adds_sums_of_its_entries(taken, n, vocab, slab, pieces, kept):
    add_chunks(1, "split24", n=n, vocab=vocab, slab=slab)
    assert [name for name, _ in taken] == ["sums", "hand"] * len(pieces)
    sums = [kwargs for name, kwargs in taken if name == "sums"]
    ends = list(itertools.accumulate(pieces))
    assert [some["rows"].stop for some in sums] == ends
    assert [some["rows"].start for some in sums] == [0, *ends[:-1]]
    assert max(some["kept"] for some in sums) == kept
    assert label_sum_bytes(n, vocab, 24, slab) == 4 * 24 * kept + 12 * pieces[0]


@pytest.mark.parametrize(("accumulator", "longest"), [("fp32", 7936), ("split24", 5632)])
def test_labels_sums_are_part_of_the_workspace_of_one_chunk_by_hand(accumulator, longest):
    def extra(chunk):
        config = Config("factored", chunk, 8448, dx=DX, dw=DW, accumulator=accumulator)
        by_hand, compiled = (
            strategies.workspace(replace(config, dw=tile), PROBLEM) for tile in (DW, DW.compiled)
        )
        return by_hand - compiled

    sums = label_sum_bytes(8192, PROBLEM.vocab, PROBLEM.hidden, 8448)
    assert sums == 4 * 8192 * 4096 + 12 * PROBLEM.vocab
    assert extra(8192) == sums + carried_bytes(8192, PROBLEM.hidden)
    # dW's storage makes the first chunk longer.
    assert extra(2048) == carried_bytes(longest, PROBLEM.hidden) == 4 * longest // 64 * 4096


def test_few_entries_are_one_stretch():
    assert carried_bytes(1024, 4096) == 0
    assert carried_bytes(1025, 4096) == 4 * 17 * 4096


def test_a_config_with_them_survives_json():
    config = Config("factored", chunk=2048, slab=4096, dx=DX, dw=NARROW_DW, accumulator="split24")
    assert Config.from_dict(config.to_dict()) == config
