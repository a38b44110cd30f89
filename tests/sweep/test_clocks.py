import dataclasses
import sys
import types

import pytest
import torch

from flce_tune.sweep.clocks import clock_mhz, throttle_reasons
from flce_tune.sweep.events import SweepOptions
from flce_tune.sweep.sweep import sweep

GPU = torch.device("cuda", 0)


@pytest.fixture
def nvml(monkeypatch):
    """Stands in for NVML's bindings; says what its ``bits`` are."""
    bindings = types.SimpleNamespace(
        bits=0,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda handle: bindings.bits,
    )
    properties = types.SimpleNamespace(uuid="1234")
    monkeypatch.setitem(sys.modules, "pynvml", bindings)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    return bindings


@pytest.mark.parametrize(
    ("bits", "reasons"),
    [
        (0x1, ()),
        (0x4, ("power cap",)),
        (0x4 | 0x40 | 0x2, ("power cap", "thermal slowdown by hardware")),
    ],
)
def test_reasons_are_named_and_idleness_is_none(nvml, bits, reasons):
    nvml.bits = bits
    assert throttle_reasons(GPU) == reasons


def test_bindings_that_fail_or_are_missing_cost_nothing(nvml, monkeypatch):
    monkeypatch.delattr(nvml, "nvmlDeviceGetHandleByUUID")
    assert throttle_reasons(GPU) == ()
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert throttle_reasons(GPU) == ()


def test_a_cpu_has_neither():
    assert clock_mhz(torch.device("cpu")) is None
    assert throttle_reasons(torch.device("cpu")) == ()


def test_what_lowered_the_clocks_is_stored(planted, store, problem, cpu):
    class Hot(planted.Impatient):
        def trial(self, config):
            return dataclasses.replace(super().trial(config), throttled=("power cap",))

    sweep([problem], store, cpu, SweepOptions(isolate=False, quick=True), make_bench=Hot)
    assert {m.message for m in store.measurements()} == {"clocks lowered by power cap"}
