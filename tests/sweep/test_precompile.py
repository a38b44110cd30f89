import contextlib
import dataclasses
import itertools
import queue

import pytest
import torch

from flce_tune.errors import SweepError
from flce_tune.kernels.config import Config, Tile
from flce_tune.kernels.problem import Device, Problem
from flce_tune.sweep.candidates import Search
from flce_tune.sweep.events import SweepOptions
from flce_tune.sweep.measure import OpBench
from flce_tune.sweep.places import LocalPlace
from flce_tune.sweep.precompile import Precompiler
from flce_tune.sweep.worker import StoppedError
from flce_tune.tuning_db.records import Status

H200 = Device("cuda", "NVIDIA H200", (9, 0), 132, 232448, 150 << 30)
TILES = [Tile(64, 64, 64), Tile(128, 64, 64), Tile(128, 128, 64), Tile(128, 256, 64)]
SMALL = [Config("full", logits=tile) for tile in TILES]


class Compilers(LocalPlace):
    """A place whose runners compile when they are told to, in this process."""

    def __init__(self, processes=1):
        super().__init__(torch.device("cpu"))
        self.started = queue.SimpleQueue()
        self.go_on = queue.SimpleQueue()
        self.closed = 0
        self._processes = processes

    def compilers(self):
        return self._processes

    def compiler(self, make_bench, problem, should_stop=None):
        return _Compiler(self, should_stop)

    def let_one_end(self, error=None):
        self.go_on.put(error)


class _Compiler:
    def __init__(self, place, should_stop):
        self.place, self.should_stop = place, should_stop

    def call(self, method, config, ragged, *, timeout_s):
        assert method == "compile"
        self.place.started.put((config, ragged))
        while not self.should_stop():
            with contextlib.suppress(queue.Empty):
                if error := self.place.go_on.get(timeout=0.01):
                    raise error
                return
        raise StoppedError

    def close(self):
        self.place.closed += 1


@pytest.fixture
def place():
    return Compilers()


@pytest.fixture
def start(place, problem):
    """Starts compilers, and closes them after the test."""
    started = []

    def start(configs, on=place):
        started.append(Precompiler(configs, problem, on, OpBench, timeout_s=60))
        return started[-1]

    yield start
    for one in started:
        one.close()


def compile_all(compiler, configs):
    compiler.prefer(configs, ragged=False)
    compiler.join()


def test_what_cannot_be_compiled_is_told(planted, problem, absent_gpu):
    strategy = planted.Planted()
    faults = (*TILES[:2], "compiler", Status.COMPILE_ERROR), (*TILES[2:], "exits", Status.CRASH)
    bad = {
        dataclasses.replace(strategy.config(fault), logits=logits, dx=dx): status
        for logits, dx, fault, status in faults
    }
    compiler = Precompiler(
        [*bad, Config(strategy.name, dw=TILES[0])],
        problem,
        absent_gpu,
        planted.PlantedBench,
        timeout_s=60,
        processes=2,
    )
    compiler.join()
    compiler.close()
    assert {c: e.status for c, e in compiler.failures().items()} == bad
    assert not any(compiler.waiting(config) for config in bad)


def test_the_first_configs_are_compiled_first_and_all_neighbours_last(place, start):
    compiler = start(SMALL)
    assert compiler.count == 2 * len(SMALL)
    for ragged, config in itertools.product((False, True), SMALL):
        assert place.started.get(timeout=60) == (config, ragged)
        assert compiler.waiting(config, ragged=ragged)
        place.let_one_end()
    compiler.join()
    assert not any(compiler.waiting(c, ragged=r) for c in SMALL for r in (False, True))


def test_a_config_waits_for_its_own_kernels_alone(place, start):
    first, second = SMALL[:2]
    compiler = start([first, second])
    place.started.get(timeout=60)
    place.let_one_end()
    assert place.started.get(timeout=60) == (second, False)
    assert not compiler.waiting(first)
    assert compiler.waiting(second)
    assert compiler.waiting(first, ragged=True)
    assert not compiler.waiting(SMALL[2]), "nobody compiles that"


def test_what_nobody_foresaw_is_compiled_when_it_is_needed(place, start):
    compiler = start([])
    compiler.wait()
    compiler.prefer(SMALL[:2], ragged=False)
    for config in SMALL[:2]:
        assert place.started.get(timeout=60) == (config, False)
        assert compiler.waiting(config)
        place.let_one_end()
    compiler.join()
    compiler.prefer(SMALL[:2], ragged=False)
    assert not compiler.waiting(SMALL[0]), "once is enough"


def test_kernels_that_are_needed_now_come_next(place, start):
    compiler = start(SMALL)
    place.started.get(timeout=60)
    compiler.prefer([SMALL[3]], ragged=True)
    place.let_one_end()
    assert place.started.get(timeout=60) == (SMALL[3], True)


def test_of_those_needed_now_what_has_no_tiles_comes_first(place, start):
    compiler = start([])
    plain = Config("full")
    compiler.prefer([*SMALL[:2], plain], ragged=False)
    for config in (plain, *SMALL[:2]):
        assert place.started.get(timeout=60) == (config, False)
        place.let_one_end()


def test_once_neighbours_are_needed_nothing_else_is_compiled(place, start):
    compiler = start(SMALL)
    place.started.get(timeout=60)
    compiler.prefer([SMALL[1], SMALL[3]], ragged=True)
    for config in (SMALL[1], SMALL[3]):
        place.let_one_end()
        assert place.started.get(timeout=60) == (config, True)
    place.let_one_end()
    compiler.join()
    assert place.started.empty()


def test_equal_configs_are_compiled_once(place, start):
    assert start([SMALL[0], SMALL[0]]).count == 2


def test_closing_ends_the_compiling_at_once(place, start):
    compiler = start(SMALL)
    place.started.get(timeout=60)
    compiler.close()
    assert place.closed == 1
    assert not any(compiler.waiting(config) for config in SMALL), "nobody would ever compile it"
    compiler.wait()


def test_without_workers_nobody_waits(place, start, monkeypatch):
    def fail(*arguments, timeout_s):
        raise SweepError("another Triton")

    monkeypatch.setattr(_Compiler, "call", fail)
    compiler = start([])
    with pytest.warns(UserWarning, match="cannot compile ahead: another Triton"):
        compile_all(compiler, SMALL)
    assert not any(compiler.waiting(config) for config in SMALL)


def test_nothing_to_compile(start):
    compiler = start([])
    assert compiler.count == 0
    compiler.join()


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_few_configs_hold_every_tile(mode, quick):
    problem = Problem(tokens=16384, hidden=4096, vocab=128256, mode=mode)
    search = Search(problem, H200, SweepOptions(quick=quick), [])
    assert len(search.tiled()) < 90
