"""Which errors of a chosen config mean that it cannot run here, and lead to another."""

import pytest
import torch

from flce_tune.errors import InvalidConfigError
from flce_tune.kernels import selection
from flce_tune.kernels.config import Config
from flce_tune.kernels.problem import Problem, describe_device

CHOSEN, OTHER = Config("full"), Config("chunked", chunk=128)
DEVICE = describe_device(torch.device("cpu"))
PROBLEM = Problem(300, 64, 1000, "bfloat16")


class Chooser:
    """Chooses one config, and another if that fails."""

    def __init__(self, replacement):
        self.replacement, self.reasons = replacement, []

    def choose(self, problem, device, workspace_limit):
        return CHOSEN

    def replace(self, failed, problem, device, workspace_limit, reason):
        self.reasons.append(reason)
        return self.replacement


def run(error, monkeypatch, replacement=OTHER, explicit=""):
    """The config that ran in the end, where the chosen one raises; and the reasons reported."""
    chooser = Chooser(replacement)
    monkeypatch.setattr(selection, "_chooser", chooser)

    def work(config):
        if config == CHOSEN:
            raise error
        return config

    return selection.run(PROBLEM, DEVICE, None, explicit, work), chooser.reasons


def launch_errors():
    errors = pytest.importorskip("triton.runtime.errors")
    compiler = pytest.importorskip("triton.compiler.errors")
    return [
        errors.OutOfResources(300_000, 232_448, "shared memory"),
        errors.PTXASError("ptxas failed"),
        compiler.CompilationError(None, None, "no such layout"),
        RuntimeError("PassManager::run failed"),
    ]


@pytest.mark.parametrize("index", range(4))
def test_a_config_that_cannot_be_compiled_or_launched_is_replaced(index, monkeypatch):
    error = launch_errors()[index]
    ran, reasons = run(error, monkeypatch)
    assert ran == OTHER
    assert reasons == [f"{type(error).__name__}: {error}"]
    with pytest.raises(InvalidConfigError, match="does not run here"):
        run(error, monkeypatch, replacement=CHOSEN)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("a user's hook said: PassManager::run failed"),
        torch.OutOfMemoryError("PassManager::run failed"),
        ValueError("PassManager::run failed"),
    ],
    ids=repr,
)
def test_any_other_error_is_the_callers(error, monkeypatch):
    with pytest.raises(type(error)) as raised:
        run(error, monkeypatch)
    assert raised.value is error


def test_an_explicit_config_is_never_replaced(monkeypatch):
    pytest.importorskip("triton")
    with pytest.raises(RuntimeError, match="PassManager"):
        run(RuntimeError("PassManager::run failed"), monkeypatch, explicit='{"strategy": "full"}')
