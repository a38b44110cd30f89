"""Every operation of the OpenAPI document, asked in many ways: no 5xx, no undeclared answer."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import schemathesis
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.core.parameters import ParameterLocation
from schemathesis.specs.openapi.checks import positive_data_acceptance

from flce_tune.service.app import create_app
from flce_tune.service.settings import ServiceSettings
from flce_tune.tuning_db.records import (
    DeviceRecord,
    Measurement,
    ProblemRecord,
    Status,
    ToolchainRecord,
    Winner,
)
from flce_tune.tuning_db.store import Store

H200 = DeviceRecord("cuda", "NVIDIA H200", "9.0", 132, 232448, 150_000_000_000)
LLAMA3 = ProblemRecord("train", "bfloat16", "fp32", 4096, 128256, 4096)
TOOLCHAIN = ToolchainRecord("2.13.0", "3.7.1", "13.0", "580.1", "0" * 64)
CONFIG = {"strategy": "chunked", "chunk": 1024}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    """A service that knows a front, a failure and a job that has ended."""
    folder: Path = tmp_path_factory.mktemp("fuzz")
    url = f"sqlite:///{folder / 'tuning.sqlite3'}"
    with Store.open(url) as store:
        timed = Measurement(H200, TOOLCHAIN, LLAMA3, 4096, CONFIG, Status.OK, (12.5,), 12.5, 0.1)
        store.set_winners(H200, LLAMA3, [Winner(store.add_measurement(timed), 20.0, 25.0)])
        store.add_measurement(
            Measurement(H200, TOOLCHAIN, LLAMA3, 4096, CONFIG, Status.CRASH, message="crashed")
        )
        problem = {"tokens": 8, "hidden": 8, "vocab": 8}
        job = store.submit_job({"device": "cpu", "problems": [problem]})
        store.request_cancel(job.id)
    with TestClient(
        create_app(
            ServiceSettings(url, token="t0ken", max_refused_tokens=1_000_000, run_jobs=False)
        )
    ) as client:
        client.app.state.ended_job = job.id
        yield client


@pytest.fixture(scope="module")
def document(served: TestClient) -> schemathesis.BaseSchema:
    return schemathesis.openapi.from_asgi("/openapi.json", served.app)


NOT_PROMISED = [
    positive_data_acceptance
]  # a schema does not say that two fields exclude each other

TOKEN = {"Authorization": "Bearer t0ken"}

PATHS = create_app(ServiceSettings("sqlite:///unused")).openapi()["paths"]
QUESTIONS = [
    (method, path, mode)
    for path, operations in PATHS.items()
    for method, operation in operations.items()
    for mode in GenerationMode
    # Where nothing is asked for, nothing can be wrong.
    if mode is GenerationMode.POSITIVE or {"parameters", "requestBody"} & operation.keys()
]


@pytest.mark.parametrize(("method", "path", "mode"), QUESTIONS)
def test_no_operation_surprises(
    document: schemathesis.BaseSchema,
    served: TestClient,
    method: str,
    path: str,
    mode: GenerationMode,
):
    operation = document[path][method]
    known = {"job_id": served.app.state.ended_job, "device": "NVIDIA H200"}

    @given(case=operation.as_strategy(generation_mode=mode), there=st.booleans())
    @settings(
        max_examples=15,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    def ask(case: schemathesis.Case, there: bool) -> None:
        path = case.meta.components.get(ParameterLocation.PATH)
        odd = path is not None and path.mode is GenerationMode.NEGATIVE  # it must stay so
        for name in case.path_parameters if there and not odd else ():
            case.path_parameters[name] = known[name]
        case.call_and_validate(session=served, headers=TOKEN, excluded_checks=NOT_PROMISED)

    ask()
