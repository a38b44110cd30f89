from dataclasses import replace

from flce_tune.sweep.results import TileTime, gather, tile_times
from flce_tune.tuning_db.records import (
    DeviceRecord,
    Measurement,
    ProblemRecord,
    Status,
    ToolchainRecord,
    Winner,
)

H200 = DeviceRecord("cuda", "NVIDIA H200", "9.0", 132, 232448)
TOOLS = ToolchainRecord("2.13.0", "3.7.1", "13.0", "580.1", "new")
OLD = replace(TOOLS, kernel_hash="old")
PROBLEM = ProblemRecord("train", "bfloat16", "fp32", 1024, 32000, 4096)


def tile(v, d):
    return {"n_block": 128, "v_block": v, "d_block": d, "num_warps": 8}


def measured(ms, config, toolchain=TOOLS, status=Status.OK, problem=PROBLEM):
    ok = status is Status.OK
    return Measurement(
        H200, toolchain, problem, 4096, config, status, (ms,) if ok else (), ms if ok else None,
        0.0 if ok else None,
    )  # fmt: skip


FULL = {"strategy": "full"}


def test_the_last_outcome_of_each_config_counts():
    again = measured(2.0, FULL)
    failed = measured(None, {"strategy": "atomic"}, status=Status.TIMEOUT)
    (one,) = gather([measured(3.0, FULL), failed, again], [])
    assert one.measurements == (again, failed)
    assert one.timed == [again]
    assert one.failures == {("atomic", "timeout"): 1}


def test_times_of_other_toolchains_are_left_out():
    old, new = measured(3.0, {"strategy": "full", "slab": 1}, OLD), measured(2.0, FULL)
    (last,) = gather([old, new], [])
    assert last.measurements == (new,)
    (winning,) = gather([old, new], [Winner(old)])
    assert winning.measurements == (old,)
    assert winning.winners == (Winner(old),)


def test_problems_are_apart_and_in_order():
    large = replace(PROBLEM, vocab=128256)
    found = gather([measured(1.0, FULL, problem=large), measured(1.0, FULL)], [])
    assert [one.problem for one in found] == [PROBLEM, large]


def test_tiles_keep_their_best_time_gemm_by_gemm():
    timed = [
        measured(5.0, {"strategy": "chunked", "logits": tile(128, 64), "dw": tile(64, 256)}),
        measured(4.0, {"strategy": "full", "logits": tile(128, 64)}),
        measured(9.0, {"strategy": "atomic", "logits": tile(32, 32)}),
        measured(1.0, FULL),
    ]
    assert tile_times(timed) == [
        TileTime("atomic", 32, 32, 9.0),
        TileTime("dw", 64, 256, 5.0),
        TileTime("logits", 128, 64, 4.0),
    ]
