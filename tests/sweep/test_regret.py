from dataclasses import replace

import pytest

from flce_tune.kernels.config import Config
from flce_tune.sweep.regret import regrets
from flce_tune.tuning_db.records import (
    DeviceRecord,
    Measurement,
    ProblemRecord,
    Status,
    ToolchainRecord,
    Winner,
)

CPU = DeviceRecord("cpu", "x86_64", "0.0", 2, 0)
OTHER = replace(CPU, name="aarch64")
TOOLS = ToolchainRecord("2.13.0", "", "", "", "a")
N1 = ProblemRecord("train", "float32", "fp32", 64, 1000, 1024)
N2 = replace(N1, token_bucket=2048)
WIDE = replace(N1, hidden=128)


def chunked(chunk):
    return {"strategy": "chunked", "chunk": chunk}


def measured(problem, config, ms, device=CPU):
    return Measurement(
        device, TOOLS, problem, problem.token_bucket, config, Status.OK, (ms,), ms, 0.0, 1000
    )


def by_rule(found, problem):
    return {one.rule: one for one in found if one.problem == problem and one.device == CPU}


def test_each_rule_is_judged_by_the_problems_own_measurements():
    best1, best2, best3 = (
        measured(N1, chunked(256), 10.0),
        measured(N2, chunked(512), 20.0),
        measured(WIDE, chunked(128), 15.0),
    )
    elsewhere = measured(N1, chunked(384), 30.0, OTHER)
    rows = [best1, best2, best3, elsewhere]
    rows += [measured(N1, chunked(512), 11.0), measured(N1, chunked(128), 10.5)]
    found = regrets(rows, [Winner(m) for m in (best1, best2, best3, elsewhere)])

    one = by_rule(found, N1)
    assert one["nearest tokens"].config == Config("chunked", chunk=512)
    assert one["nearest tokens"].cost == pytest.approx(0.1)
    assert one["nearest shape"].cost == pytest.approx(0.05)
    assert one["same architecture"].config == Config("chunked", chunk=384)
    assert one["same architecture"].cost is None, "its sweep did not measure that"
    assert one["default"].best_ms == 10.0
    assert "nearest tokens" not in by_rule(found, WIDE), "there is no other N of that shape"


def test_winners_count_with_their_final_time():
    trial, final = measured(N1, chunked(256), 8.0), measured(N1, chunked(256), 10.0)
    other = measured(N2, chunked(256), 20.0)
    late = measured(N1, chunked(256), 9.0)
    found = regrets([trial, final, late, other], [Winner(final), Winner(other)])
    assert by_rule(found, N1)["nearest tokens"].cost == 0.0


def test_nothing_stored():
    assert regrets([], []) == []
