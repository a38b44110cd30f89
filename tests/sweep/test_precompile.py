import pytest

from flce_tune.kernels import strategies
from flce_tune.kernels.config import Config
from flce_tune.kernels.problem import Device, Problem
from flce_tune.kernels.strategies import recompute
from flce_tune.kernels.strategies.stored import SLABS
from flce_tune.sweep.candidates import Search, covering
from flce_tune.sweep.events import SweepOptions
from flce_tune.sweep.places import LocalPlace
from flce_tune.sweep.precompile import LARGEST_SLAB, precompile, shrunk, shrunk_config
from flce_tune.sweep.ragged import ragged_neighbour
from flce_tune.sweep.worker import StoppedError
from flce_tune.tuning_db.records import Status


def test_what_cannot_be_compiled_is_told(planted, problem, cpu):
    strategy = planted.Planted()
    bad = [strategy.config("compiler"), strategy.config("exits")]
    failures = precompile(
        [*bad, Config("full")],
        problem,
        LocalPlace(cpu),
        planted.PlantedBench,
        timeout_s=60,
        processes=2,
    )
    assert {c: e.status for c, e in failures.items()} == {
        bad[0]: Status.COMPILE_ERROR,
        bad[1]: Status.CRASH,
    }


def test_a_stop_ends_the_compiling(planted, problem, cpu):
    with pytest.raises(StoppedError):
        precompile(
            [planted.Planted().config("hangs")],
            problem,
            LocalPlace(cpu),
            planted.PlantedBench,
            timeout_s=60,
            should_stop=lambda: True,
        )


def test_nothing_to_compile(planted, problem, cpu):
    assert precompile([], problem, LocalPlace(cpu), planted.PlantedBench, timeout_s=1) == {}


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
    cover = covering(search.space, search.valid)
    assert len(cover) < 80
    for config in cover:
        for small in (shrunk(problem), ragged_neighbour(shrunk(problem))):
            assert strategies.reject(shrunk_config(config, problem), small, h200) is None, config
