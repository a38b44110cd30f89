"""Devices, problems and winners to choose from."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from flce_tune.dispatch import Dispatcher, Snapshot
from flce_tune.dispatch.convert import device_record, problem_record
from flce_tune.kernels.config import Config
from flce_tune.kernels.problem import Device, Problem
from flce_tune.tuning_db.records import Measurement, Status, ToolchainRecord, Winner

MakeWinner = Callable[..., Winner]
MakeDispatcher = Callable[..., Dispatcher]

TOOLCHAIN = ToolchainRecord("2.13.0", "3.7.1", "13.0", "580.10", "hash-of-the-kernels")


@pytest.fixture
def h200() -> Device:
    return Device("cuda", "NVIDIA H200", (9, 0), 132, 232448, 150_000_000_000)


@pytest.fixture
def problem() -> Problem:
    return Problem(4096, 4096, 128256)


@pytest.fixture
def make_winner(h200: Device, problem: Problem) -> MakeWinner:
    """A winner, of ``problem`` on ``h200`` where nothing else is said."""

    def make(
        config: Config | Mapping[str, Any],
        ms: float = 1.0,
        *,
        device: Device = h200,
        toolchain: ToolchainRecord = TOOLCHAIN,
        **sizes: Any,
    ) -> Winner:
        measured = replace(problem, **sizes)
        return Winner(
            Measurement(
                device=device_record(device),
                toolchain=toolchain,
                problem=problem_record(measured),
                tokens=measured.tokens,
                config=config.to_dict() if isinstance(config, Config) else config,
                status=Status.OK,
                samples_ms=(ms,),
                median_ms=ms,
                spread_ms=0.0,
                workspace_bytes=0,
            )
        )

    return make


@pytest.fixture
def make_dispatcher() -> MakeDispatcher:
    """A dispatcher over the given winners, on the toolchain they were measured with."""

    def make(*winners: Winner, shipped: tuple[Winner, ...] = (), **arguments: Any) -> Dispatcher:
        return Dispatcher(
            Snapshot.from_winners(winners, "a test"),
            shipped=Snapshot.from_winners(shipped, "shipped with a test"),
            kernel_hash=TOOLCHAIN.kernel_hash,
            triton_version=TOOLCHAIN.triton,
            **arguments,
        )

    return make
