"""What a sweep shows while it runs."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from flce_tune.cli.progress import reporting
from flce_tune.kernels.problem import Problem
from flce_tune.sweep.events import SweepEvents
from flce_tune.tuning_db.records import (
    DeviceRecord,
    Measurement,
    ProblemRecord,
    Status,
    ToolchainRecord,
    Winner,
)

PROBLEM = Problem(1024, 256, 8192, "float32")


def measurement(chunk: int, median_ms: float | None) -> Measurement:
    return Measurement(
        device=DeviceRecord("cpu", "x86_64", "0.0", 2, 0),
        toolchain=ToolchainRecord("2.13.0", "", "", "", "a"),
        problem=ProblemRecord("train", "float32", "fp32", 256, 8192, 1024),
        tokens=1024,
        config={"strategy": "chunked", "chunk": chunk},
        status=Status.CRASH if median_ms is None else Status.OK,
        samples_ms=() if median_ms is None else (median_ms,),
        median_ms=median_ms,
        message="it died\nof signal 11" if median_ms is None else "",
    )


def play(events: SweepEvents, count: int) -> None:
    events.on_start(PROBLEM, count)
    events.on_stage("measure", count)
    for done in range(1, count + 1):
        events.on_measurement(measurement(done, None if done == 3 else 10.0 + done), done, count)
    events.on_stage("final", 2)
    events.on_winners([Winner(measurement(1, 11.0))])


@pytest.mark.parametrize("count", [5, 40])
def test_a_log_gets_tenths_and_every_failure(count: int):
    log = io.StringIO()
    with reporting(Console(file=log, width=200), 1) as events:
        play(events, count)
    lines = log.getvalue().splitlines()
    assert lines[0] == f"[1/1] N=1024 D=256 V=8192 float32: {count} configs"
    assert f"3/{count} chunked chunk=3: crash it died of signal 11" in lines
    assert f"{count}/{count} chunked chunk={count}: {10 + count:.2f} ms" in lines
    assert lines[-1] == "winner: chunked chunk=1: 11.00 ms"
    assert sum(line.endswith(" ms") for line in lines) <= 11


def test_a_terminal_gets_a_bar_that_goes_away():
    screen = io.StringIO()
    console = Console(file=screen, width=80, force_terminal=True, color_system=None)
    with reporting(console, 1) as events:
        play(events, 8)
        drawn = screen.getvalue()
    assert "[1/1] N=1024 D=256 V=8192 float32" in drawn
    assert "measuring" in drawn
    assert "crash" not in drawn


def play_two(events: SweepEvents) -> None:
    first, second = events.at("cuda:0"), events.at("cuda:1")
    other = replace(PROBLEM, hidden=512)
    first.on_start(PROBLEM, 4)
    second.on_start(other, 4)
    first.on_stage("measure", 4)
    second.on_stage("measure", 4)
    second.on_measurement(measurement(1, 11.0), 4, 4)
    first.on_place_lost("cuda:0", "it is\ngone", dropped=True)
    second.on_start(PROBLEM, 4)
    events.on_wait(replace(PROBLEM, hidden=1024), "host-7 1 2 3")


def test_a_log_tells_places_apart():
    log = io.StringIO()
    with reporting(Console(file=log, width=200), 3) as events:
        play_two(events)
    assert log.getvalue().splitlines() == [
        "cuda:0: [1/3] N=1024 D=256 V=8192 float32: 4 configs",
        "cuda:1: [2/3] N=1024 D=512 V=8192 float32: 4 configs",
        "cuda:0: measuring: 4",
        "cuda:1: measuring: 4",
        "cuda:1: 4/4 chunked chunk=1: 11.00 ms",
        "cuda:0 failed: it is gone; it is left alone now",
        "cuda:1: [1/3] N=1024 D=256 V=8192 float32: 4 configs",
        "N=1024 D=1024 V=8192 float32 is being swept by a process on host-7; left for later",
    ]


def test_a_terminal_gets_a_bar_for_each_place():
    screen = io.StringIO()
    console = Console(file=screen, width=100, force_terminal=True, color_system=None)
    with reporting(console, 3) as events:
        play_two(events)
        drawn = screen.getvalue()
    assert "cuda:0: measuring" in drawn
    assert "cuda:1: measuring" in drawn
    assert "cuda:0 failed: it is gone; it is left alone now" in drawn
    assert "cuda:0: measuring" not in drawn.rpartition("left alone")[2], "its bar goes with it"
