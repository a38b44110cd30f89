"""What is compiled without a GPU is what a launch on the GPU looks for."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flce_tune.kernels import strategies
from flce_tune.kernels.config import Config, Tile
from flce_tune.kernels.problem import Problem
from flce_tune.kernels.strategies.common import TILES as TILES_PROPOSED
from flce_tune.sweep.failures import CandidateError
from flce_tune.sweep.measure import OpBench
from flce_tune.sweep.precompile import Precompiler
from flce_tune.tuning_db.records import Status

pytest.importorskip("triton")

PROGRAM = Path(__file__).parents[1] / "support" / "posed_launches.py"
PROBLEM = Problem(tokens=768, hidden=256, vocab=3200)
TILE = Tile(64, 64, 64)
TILES = {"logits": TILE, "dx": TILE, "dw": TILE}
CONFIGS = {
    "chunked": Config("chunked", chunk=256, logits=TILE),
    "full": Config("full", **TILES),
    "recompute": Config("recompute", slab=1024, accumulator="split24", **TILES),
    "factored": Config("factored", chunk=256, slab=512, accumulator="split24", **TILES),
    "overlay": Config("overlay", slab=512, **TILES),
    "atomic": Config("atomic", logits=Tile(1, 64, 64, num_stages=2, group=1)),
}


def compile_ahead(place, problem, configs):
    runner = place.compiler(OpBench, problem)
    try:
        for config in configs:
            for ragged in (False, True):
                runner.call("compile", config, ragged, timeout_s=200)
    finally:
        runner.close()


@pytest.fixture(scope="module")
def launcher(tmp_path_factory):
    """Asked for launches, it says which kernels they looked for; see its program."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    errors = tmp_path_factory.mktemp("launcher") / "stderr"
    with (
        errors.open("w") as stderr,
        subprocess.Popen(
            [sys.executable, str(PROGRAM)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        ) as process,
    ):

        def ask(question):
            print(json.dumps(question), file=process.stdin, flush=True)
            answers = []
            for line in process.stdout:
                answers.append(json.loads(line))
                if "status" in answers[-1]:
                    break
            assert answers, errors.read_text()[-2000:]
            assert answers.pop() == {"status": 0}, errors.read_text()[-2000:]
            return answers

        yield ask
        process.stdin.close()


@pytest.fixture
def require_found(launcher, absent_gpu, tmp_path):
    """Compile configs ahead; launching them in another order must compile nothing."""

    def require(problem, configs):
        assert not any(strategies.reject(config, problem, absent_gpu.device) for config in configs)
        compile_ahead(absent_gpu, problem, configs)
        ahead = set(tmp_path.rglob("*"))
        rows = launcher(
            {
                "cache": str(tmp_path),
                "problem": dataclasses.asdict(problem),
                "configs": [config.to_dict() for config in configs[::-1]],
            }
        )
        assert not [row["kernel"] for row in rows if not row["found"]]
        assert set(tmp_path.rglob("*")) == ahead
        return {row["kernel"] for row in rows}

    return require


def test_a_launch_finds_what_was_compiled_ahead(require_found):
    kernels = require_found(PROBLEM, [CONFIGS["chunked"], CONFIGS["factored"]])
    assert {"logits_kernel", "numerators_kernel", "product_kernel"} < kernels
    assert {"row_weights_kernel", "total_loss_kernel", "scale_in_place_kernel"} < kernels


@pytest.mark.slow
def test_a_launch_of_any_other_strategy_finds_it_too(require_found):
    others = [CONFIGS[name] for name in strategies.names() if name not in ("chunked", "factored")]
    assert {"atomic_kernel", "slab_gradient_kernel"} < require_found(PROBLEM, others)


@pytest.mark.slow
def test_a_launch_of_tiles_scheduled_by_hand_finds_them(require_found):
    by_hand = {name: tiles[0] for name, tiles in TILES_PROPOSED.items()}
    configs = [
        Config("factored", chunk=256, slab=512, accumulator="split24", **by_hand),
        Config("factored", chunk=PROBLEM.tokens, slab=512, **by_hand),
        Config("recompute", slab=1024, accumulator="split24", **by_hand),
    ]
    kernels = require_found(PROBLEM, configs)
    assert {"numerators_kernel", "product_kernel", "entries_kernel"} < kernels
    assert {"partial_sums_kernel", "label_sums_kernel"} < kernels


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"features": ("bias", "class_weight", "label_smoothing", "softcap")},
        {"features": ("bias", "per_token", "softcap")},
        {"mode": "train_frozen_weight", "accumulate": "weight_dtype", "vocab": 3201},
        {"mode": "eval", "dtype": "float16", "tokens": 1},
        {"dtype": "float32", "hidden": 250},
    ],
    ids=lambda changes: " ".join(map(str, changes)),
)
def test_so_does_a_launch_of_any_kind_of_problem(require_found, changes):
    problem = dataclasses.replace(PROBLEM, **changes)
    accumulator = "weight_dtype" if problem.accumulate == "weight_dtype" else "fp32"
    sizes = ("chunked", {"chunk": 256}), ("recompute", {"slab": 1024})
    configs = [Config(name, accumulator=accumulator, **size) for name, size in sizes]
    require_found(problem, configs)


@pytest.mark.slow
def test_a_hopeless_kernel_is_refused_before_it_touches_a_gpu(absent_gpu):
    spilling = Config("atomic", logits=Tile(1, 128, 128, num_warps=1, num_stages=2, group=1))
    with pytest.raises(CandidateError, match=r"spills \d{3} registers a thread") as caught:
        compile_ahead(absent_gpu, PROBLEM, [spilling])
    assert caught.value.status is Status.OUT_OF_RESOURCES


def test_a_compiler_sees_no_gpu(planted, absent_gpu):
    runner = absent_gpu.compiler(planted.Puppet, PROBLEM)
    try:
        seen = runner.call("time", "environment", "CUDA_VISIBLE_DEVICES", timeout_s=60)
        gpus = runner.call("time", "gpus", timeout_s=60)
    finally:
        runner.close()
    assert seen == "-1"
    assert not gpus


def compiled_with(make_bench, place, config):
    compiler = Precompiler([config], PROBLEM, place, make_bench, timeout_s=60, processes=2)
    compiler.join()
    compiler.close()
    return compiler


def test_where_nothing_can_be_compiled_ahead_no_config_is_blamed(planted, absent_gpu):
    with pytest.warns(UserWarning, match=r"cannot compile ahead.*nothing of that name"):
        compiler = compiled_with(planted.Failing, absent_gpu, CONFIGS["full"])
    assert not compiler.failures()
    assert not compiler.waiting(CONFIGS["full"])
