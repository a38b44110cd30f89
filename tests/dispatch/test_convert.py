import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flce_tune.dispatch.convert import (
    config_of,
    device_of,
    device_record,
    device_slug,
    hash_sources,
    kernel_hash,
    problem_of,
    problem_record,
    toolchain_record,
)
from flce_tune.errors import InvalidConfigError
from flce_tune.kernels.config import Config, Tile
from flce_tune.kernels.problem import Device, Problem


def test_device_survives_the_way_to_its_record_and_back(h200: Device):
    blackwell = replace(h200, name="NVIDIA GeForce RTX 5090", capability=(12, 0))
    for device in (h200, blackwell, Device("cpu", "x86_64", (0, 0), 8, 0, 0)):
        assert device_of(device_record(device)) == device
        assert device_record(device).architecture == device.architecture


@pytest.mark.parametrize("wrong", [{"kind": "rocm"}, {"capability": "9"}, {"capability": "9.x"}])
def test_an_impossible_device_record_is_refused(h200: Device, wrong: dict[str, str]):
    with pytest.raises(ValueError, match=next(iter(wrong.values()))):
        device_of(replace(device_record(h200), **wrong))


def test_slug_tells_apart_what_the_identity_tells_apart(h200: Device):
    record = device_record(h200)
    others = [
        replace(record, kind="cpu"),
        replace(record, name="NVIDIA H100"),
        replace(record, capability="10.0"),
        replace(record, sm_count=66),
        replace(record, shared_memory_per_block=101376),
    ]
    assert device_slug(record) == "cuda-nvidia-h200-9.0-132-232448"
    assert len({device_slug(device) for device in [record, *others]}) == 1 + len(others)
    assert device_slug(replace(record, memory_bytes=1)) == device_slug(record)


def test_problem_survives_the_way_to_its_record_and_back():
    problem = Problem(5000, 2304, 256000, "float16", "eval", "weight_dtype", ("bias", "softcap"))
    record = problem_record(problem)
    assert record.token_bucket == 6144
    assert problem_of(record, 5000) == problem
    assert problem_of(record) == replace(problem, tokens=6144)


def test_config_is_read_from_a_measurement(make_winner):
    config = Config("chunked", chunk=2048, logits=Tile(128, 256, 64), accumulator="split24")
    assert config_of(make_winner(config).measurement) == config


@pytest.mark.parametrize(
    "stored",
    [
        {"strategy": "chunked", "chunk": 0},
        {"strategy": "chunked", "BLOCK": 8},
        {"chunk": 8},
        {"strategy": "chunked", "logits": {"n_block": 64, "v_block": 0, "d_block": 64}},
    ],
)
def test_a_damaged_config_is_refused(make_winner, stored: dict[str, object]):
    with pytest.raises(InvalidConfigError):
        config_of(make_winner(stored).measurement)


def test_toolchain_of_a_cpu_has_no_gpu_versions():
    record = toolchain_record(torch.device("cpu"))
    assert (record.cuda, record.driver) == ("", "")
    assert record.torch == torch.__version__
    assert record.kernel_hash == kernel_hash()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
def test_toolchain_of_a_gpu_has_its_driver():
    record = toolchain_record(torch.device("cuda", 0))
    assert record.cuda == torch.version.cuda
    assert re.fullmatch(r"\d+\.\d+(\.\d+)?", record.driver)


def test_hash_depends_on_names_and_contents_of_sources_alone(tmp_path: Path):
    def hash_of(files: dict[str, str], folder: str) -> str:
        for name, text in files.items():
            path = tmp_path / folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return hash_sources(tmp_path / folder)

    base = {"a.py": "1", "triton/b.py": "2"}
    first = hash_of(base, "first")
    assert hash_of({**base, "note.txt": "x"}, "same") == first
    assert hash_of({**base, "triton/b.py": "3"}, "edited") != first
    assert hash_of({"a.py": "1", "triton/c.py": "2"}, "renamed") != first
    assert hash_of({"a.py": "12", "triton/b.py": ""}, "moved") != first
