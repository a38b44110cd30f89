from dataclasses import replace

from flce_tune.sweep.comparison import compare
from flce_tune.tuning_db.records import (
    DeviceRecord,
    Measurement,
    ProblemRecord,
    Status,
    ToolchainRecord,
    Winner,
)

H200 = DeviceRecord("cuda", "NVIDIA H200", "9.0", 132, 232448)
A100 = replace(H200, name="NVIDIA A100", capability="8.0", sm_count=108)
TOOLS = ToolchainRecord("2.13.0", "3.7.1", "13.0", "580.1", "a")
SMALL = ProblemRecord("train", "bfloat16", "fp32", 1024, 32000, 4096)
LARGE = replace(SMALL, vocab=128256)
EVAL = replace(LARGE, mode="eval")


def winner(device, problem, ms, chunk=1024):
    config = {"strategy": "chunked", "chunk": chunk}
    return Winner(Measurement(device, TOOLS, problem, 4096, config, Status.OK, (ms,), ms, 0.0))


def test_two_devices_meet_on_the_problem_with_their_fastest():
    a = [winner(H200, SMALL, 3.0, 64), winner(H200, SMALL, 2.0), winner(H200, LARGE, 9.0)]
    b = [winner(A100, SMALL, 8.0), winner(A100, EVAL, 1.0)]
    both, only_b, only_a = compare(a, b)
    assert (both.problem, both.ratio, both.same_config) == (SMALL, 0.25, True)
    assert both.a is a[1]
    assert (only_a.problem, only_a.a, only_a.b, only_a.ratio) == (LARGE, a[2], None, None)
    assert (only_b.problem, only_b.a, only_b.b) == (EVAL, None, b[1])
    assert not only_a.same_config
    assert {one.device for one in (both, only_a, only_b)} == {None}


def test_exports_of_several_devices_meet_on_the_same_device():
    a = [winner(H200, SMALL, 2.0), winner(A100, SMALL, 4.0)]
    b = [winner(H200, SMALL, 1.0, 64)]
    on_a100, on_h200 = compare(a, b)
    assert (on_h200.device, on_h200.ratio, on_h200.same_config) == (H200, 2.0, False)
    assert (on_a100.device, on_a100.ratio) == (A100, None)


def test_overlapping_intervals_are_within_noise():
    def timed(*samples):
        one = winner(H200, SMALL, 2.0)
        return replace(one, measurement=replace(one.measurement, samples_ms=samples))

    slow, slower, fast = timed(*range(5, 11)), timed(*range(6, 12)), timed(*range(1, 7))
    assert compare([slow], [slower])[0].within_noise
    faster = timed(1, 2, 3, 4, 4, 4)
    assert compare([slow], [faster])[0].within_noise is False
    assert compare([fast], [timed(1.0)])[0].within_noise is None


def test_nothing_against_nothing():
    assert compare([], []) == []
