"""The profile of a split step: what is hidden, what is idle, what is listed."""

import importlib
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.autograd import DeviceType

SCRIPTS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture
def trace(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("parallel_trace")


def kernel(start, end, name, device=DeviceType.CUDA):
    span = SimpleNamespace(start=start, end=end)
    return SimpleNamespace(time_range=span, name=name, device_type=device)


def test_times_of_a_profile(trace, monkeypatch):
    events = [
        event
        for step in (0.0, 1000.0, 2000.0)
        for event in (
            kernel(step, step + 400, "logits"),
            kernel(step + 300, step + 500, "ncclAllReduce"),  # 100 of them beside the logits
            kernel(step + 600, step + 610, "small"),
            kernel(step + 610, step + 1000, "dw"),
            kernel(step, step + 999, "the host's", DeviceType.CPU),
        )
    ]

    class Profile:
        def __init__(self, **_):
            pass

        def __enter__(self):
            return SimpleNamespace(events=lambda: events)

        def __exit__(self, *_):
            pass

    monkeypatch.setattr(trace, "profile", Profile)
    monkeypatch.setattr(trace.torch.cuda, "synchronize", lambda device: None)
    found = trace.collective_times(lambda: None, "cuda")
    assert found["collective_ms"] == pytest.approx(0.2)
    assert found["exposed_ms"] == pytest.approx(0.1)
    assert found["idle_ms"] == pytest.approx(0.1)
    assert found["last_step"] == ["0 + 400 logits", "300 + 200 ncclAllReduce", "610 + 390 dw"]
