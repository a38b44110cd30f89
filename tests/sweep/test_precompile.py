import contextlib
import dataclasses
import itertools
import queue

import pytest
import torch

from flce_tune.errors import SweepError
from flce_tune.kernels import strategies
from flce_tune.kernels.config import Config, Tile
from flce_tune.kernels.problem import Device, Problem
from flce_tune.kernels.strategies import recompute
from flce_tune.kernels.strategies.stored import SLABS
from flce_tune.sweep.candidates import Search
from flce_tune.sweep.events import SweepOptions
from flce_tune.sweep.measure import OpBench
from flce_tune.sweep.places import LocalPlace
from flce_tune.sweep.precompile import LARGEST_SLAB, Precompiler, shrunk, shrunk_config
from flce_tune.sweep.ragged import ragged_neighbour
from flce_tune.sweep.worker import StoppedError
from flce_tune.tuning_db.records import Status

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

    def processes(self, problem):
        return self._processes

    def runner(self, make_bench, problem, seed, should_stop=None):
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


def test_what_cannot_be_compiled_is_told(planted, problem, cpu):
    strategy = planted.Planted()
    faults = (*TILES[:2], "compiler", Status.COMPILE_ERROR), (*TILES[2:], "exits", Status.CRASH)
    bad = {
        dataclasses.replace(strategy.config(fault), logits=logits, dx=dx): status
        for logits, dx, fault, status in faults
    }
    compiler = Precompiler(
        [*bad, Config(strategy.name, dw=TILES[0])],
        problem,
        LocalPlace(cpu),
        planted.PlantedBench,
        timeout_s=60,
        processes=2,
    )
    compiler.join()
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
    first, second = (
        Config("full", logits=TILES[0], dx=TILES[1]),
        Config("full", logits=TILES[2], dx=TILES[3]),
    )
    compiler = start([first, second])
    place.started.get(timeout=60)
    place.let_one_end()
    assert place.started.get(timeout=60) == (second, False)
    assert not compiler.waiting(first)
    assert not compiler.waiting(Config("full", logits=TILES[0])), "its kernel has been compiled"
    assert not compiler.waiting(Config("full")), "cuBLAS needs no compiler of ours"
    assert compiler.waiting(Config("full", logits=TILES[0], dx=TILES[3]))
    assert not compiler.waiting(Config("chunked", dx=TILES[3])), "nobody compiles that"
    assert compiler.waiting(first, ragged=True)


def test_kernels_that_are_needed_now_come_next(place, start):
    compiler = start(SMALL)
    place.started.get(timeout=60)
    compiler.prefer([SMALL[3]], ragged=True)
    place.let_one_end()
    assert place.started.get(timeout=60) == (SMALL[3], True)


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


def test_equal_kernels_are_compiled_once(place, start):
    assert start([SMALL[0], Config("full", chunk=7, logits=TILES[0])]).count == 2


def test_closing_ends_the_compiling_at_once(place, start):
    compiler = start(SMALL)
    place.started.get(timeout=60)
    compiler.close()
    assert place.closed == 1
    assert not any(compiler.waiting(config) for config in SMALL), "nobody would ever compile it"
    compiler.wait()


def test_without_workers_nobody_waits(problem, start):
    class Broken(Compilers):
        def runner(self, *arguments):
            class Runner(_Compiler):
                def call(self, *arguments, timeout_s):
                    raise SweepError("no memory")

            return Runner(self, None)

    compiler = start(SMALL, Broken(processes=2))
    compiler.join()
    assert not any(compiler.waiting(config) for config in SMALL)


def test_nothing_to_compile(start):
    compiler = start([Config("full")])
    assert compiler.count == 0
    compiler.wait()


def test_the_shrunk_problem_leaves_the_same_remainders_and_cuts_as_many_ways():
    problem = Problem(tokens=16384 + 48, hidden=4096 + 8, vocab=128256 + 1)
    small = shrunk(problem)
    for size in ("tokens", "hidden", "vocab"):
        assert getattr(small, size) % 256 == getattr(problem, size) % 256
        assert getattr(small, size) < getattr(problem, size)
    config = Config("chunked", chunk=4096)
    assert small.tokens / shrunk_config(config, problem).chunk >= 3, "a first, a middle and a last"
    assert small.vocab / LARGEST_SLAB >= 3
    assert max(*SLABS, *recompute.SLABS) == LARGEST_SLAB
    one_chunk = Config("chunked", chunk=32768)
    assert shrunk_config(one_chunk, problem) == one_chunk
    assert shrunk(small) == small


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_what_is_compiled_ahead_can_run_on_the_shrunk_problem_and_its_neighbour(mode, quick):
    h200 = Device("cuda", "NVIDIA H200", (9, 0), 132, 232448, 150 << 30)
    problem = Problem(tokens=16384, hidden=4096, vocab=128256, mode=mode)
    search = Search(problem, h200, SweepOptions(quick=quick), [])
    cover = search.tiled()
    assert len(cover) < 80
    for config in cover:
        for small in (shrunk(problem), ragged_neighbour(shrunk(problem))):
            assert strategies.reject(shrunk_config(config, problem), small, h200) is None, config
