"""Tiles scheduled by hand: what they are, where they are valid, and that others stand in."""

import json
from dataclasses import replace

import pytest

from flce_tune.errors import InvalidConfigError
from flce_tune.kernels import limits, strategies
from flce_tune.kernels.config import SCHEDULES, Config, Tile
from flce_tune.kernels.problem import Device, Problem

PING_PONG = Tile(128, 128, 64, 8, 5, 16, "ping_pong")
SHARED = Tile(128, 256, 64, 8, 4, 16, "shared")
PROBLEM = Problem(4096, 1024, 32000)
HOPPER = Device("cuda", "a Hopper GPU", (9, 0), 132, 232448, 1 << 36)

with_tiles = pytest.mark.parametrize("tile", [PING_PONG, SHARED], ids=lambda t: t.schedule)


@pytest.fixture(autouse=True)
def _triton_of_today(monkeypatch):
    monkeypatch.setattr(limits, "_triton", lambda: (3, 6))


def rejected(tile, problem=PROBLEM, device=HOPPER):
    return limits.reject_tile(tile, "d", problem, device)


@with_tiles
def test_a_schedule_survives_json_and_is_left_out_where_it_is_the_compilers(tile):
    config = Config("full", logits=tile)
    assert Config.from_dict(json.loads(config.to_json())) == config
    assert json.loads(config.to_json()) == config.to_dict()
    plain = replace(config, logits=tile.compiled)
    assert "schedule" not in plain.to_dict()["logits"]
    assert "schedule" not in plain.to_json()
    assert str(plain) != str(config)


def test_an_unknown_schedule_is_refused_with_those_that_are_known():
    data = Config("full", logits=PING_PONG).to_dict()
    data["logits"]["schedule"] = "chaos"
    with pytest.raises(InvalidConfigError, match=r"logits\.schedule.*ping_pong.*'chaos'"):
        Config.from_dict(data)


@with_tiles
def test_a_tile_of_the_compiler_stands_in(tile):
    assert tile.compiled.schedule == "compiler"
    assert (tile.compiled.n_block, tile.compiled.v_block) == (tile.n_block, tile.v_block)
    assert tile.compiled.compiled == tile.compiled
    assert rejected(tile.compiled) is None


@with_tiles
def test_they_are_valid_where_they_were_measured(tile):
    assert rejected(tile) is None
    assert rejected(tile, replace(PROBLEM, features=("bias", "class_weight", "per_token"))) is None


@pytest.mark.parametrize(
    ("change", "device", "why"),
    [
        ({}, {"capability": (8, 0)}, "compute capability 9.0, this is"),
        ({}, {"capability": (10, 0)}, "compute capability 9.0, this is"),
        ({}, {"shared_memory_per_block": 101376}, "shared memory"),
        ({"dtype": "float16"}, {}, "bfloat16 only"),
        ({"features": ("softcap",)}, {}, "knows no softcap"),
        ({"features": ("label_smoothing", "statistics")}, {}, "label_smoothing, statistics"),
    ],
)
@with_tiles
def test_they_say_what_they_cannot_do(tile, change, device, why):
    assert why in rejected(tile, replace(PROBLEM, **change), replace(HOPPER, **device))


@pytest.mark.parametrize(
    ("tile", "why"),
    [
        (replace(PING_PONG, num_warps=4), "8 warps"),
        (replace(PING_PONG, v_block=256), "64 rows"),
        (replace(PING_PONG, n_block=256), "64 rows"),
        (replace(SHARED, v_block=64), "64 rows"),
        (replace(SHARED, d_block=128, num_stages=2), "d_block of 32 or 64"),
        (replace(SHARED, num_stages=1), "2 stages"),
        (replace(SHARED, num_stages=5), "shared memory"),
    ],
    ids=str,
)
def test_tiles_that_no_kernel_was_written_for_are_refused(tile, why):
    assert why in rejected(tile)


def test_they_need_a_triton_that_has_what_they_use(monkeypatch):
    monkeypatch.setattr(limits, "_triton", lambda: (3, 5))
    assert "Triton 3.6" in rejected(PING_PONG)


def test_the_installed_triton_is_read_and_none_is_no_error(monkeypatch):
    monkeypatch.undo()
    assert limits._triton() == (0,) or limits._triton() >= (3, 4)
    limits._triton.cache_clear()

    def missing(name):
        raise limits.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(limits.importlib.metadata, "version", missing)
    assert limits._triton() == (0,)
    limits._triton.cache_clear()


@pytest.mark.parametrize(
    ("capability", "found"),
    [((9, 0), set(SCHEDULES)), ((8, 0), {"compiler"}), ((10, 0), {"compiler"})],
)
def test_a_sweep_tries_them_on_hopper_alone(capability, found):
    device = replace(HOPPER, capability=capability)
    configs = strategies.space(PROBLEM, device)
    assert {c.logits.schedule for c in configs if c.logits} == found


@pytest.mark.parametrize("features", [(), ("softcap",), ("statistics",), ("bias",)])
@pytest.mark.parametrize("accumulate", ["fp32", "weight_dtype"])
@pytest.mark.parametrize("mode", ["train", "eval", "train_frozen_weight"])
def test_no_default_is_rejected(mode, accumulate, features):
    problem = replace(PROBLEM, mode=mode, accumulate=accumulate, features=features)
    for device in (HOPPER, replace(HOPPER, capability=(10, 0))):
        config = strategies.default(problem, device)
        assert strategies.reject(config, problem, device) is None


def test_a_large_problem_is_chunked_by_hand_and_a_small_one_by_the_library():
    chunked = strategies.get("chunked")
    large = chunked.default(replace(PROBLEM, tokens=16384, vocab=128256), HOPPER)
    assert large.logits.schedule == "ping_pong"
    assert large.dw.schedule == "shared"
    assert large.accumulator == "split24"
    assert large.dx is None
    small = chunked.default(replace(PROBLEM, tokens=256), HOPPER)
    assert (small.logits, small.dx, small.dw, small.accumulator) == (None, None, None, "fp32")
    old = chunked.default(replace(PROBLEM, tokens=16384), replace(HOPPER, capability=(8, 0)))
    assert (old.logits, old.dx, old.dw, old.accumulator) == (None, None, None, "fp32")


def test_an_evaluation_which_stores_no_logits_shares_its_tiles():
    problem = replace(PROBLEM, mode="eval")
    assert strategies.default(problem, HOPPER).logits.schedule == "shared"
    assert strategies.default(replace(problem, features=("softcap",)), HOPPER).logits.schedule == (
        "compiler"
    )
