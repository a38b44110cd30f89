import pytest

from flce_tune.kernels.config import Config
from flce_tune.sweep.places import LocalPlace
from flce_tune.sweep.precompile import precompile
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
