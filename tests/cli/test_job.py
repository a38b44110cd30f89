"""Jobs of a service, from the command line."""

import json
import logging
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from served import ServedTransport

import flce_tune.client
from flce_tune.client import Client
from flce_tune.service.app import create_app
from flce_tune.service.executors import LocalExecutor, RayExecutor
from flce_tune.service.settings import ServiceSettings
from flce_tune.tuning_db.records import DeviceRecord, JobState, Miss, ProblemRecord
from flce_tune.tuning_db.store import Store

SIZES = ("--hidden", "64", "--vocab", "1024", "--tokens", "1024,2048")


@pytest.fixture
def service(database: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """A service that the commands talk to without a network; its store."""
    url = f"sqlite:///{database}"
    settings = ServiceSettings(url, run_jobs=False, poll_seconds=0.05)
    with Store.open(url) as store, TestClient(create_app(settings)) as served:

        def connect(address: str, token: str | None) -> Client:
            return Client(address, token=token, transport=ServedTransport(served))

        monkeypatch.setattr(flce_tune.client, "Client", connect)
        monkeypatch.setenv("FLCE_TUNE_URL", "http://testserver")
        # a log handler of an earlier test may hold a stream that is closed: not said on stderr
        monkeypatch.setattr(logging, "raiseExceptions", False)
        yield store


@pytest.mark.parametrize(
    ("options", "executor"),
    [
        ((), LocalExecutor()),
        (("--device", "cpu"), LocalExecutor(("cpu",))),
        (("--devices", "cpu"), LocalExecutor(("cpu",))),
        (("--executor", "ray"), RayExecutor()),
        (("--executor", "ray", "--accelerator", "H200,L4"), RayExecutor(("H200", "L4"))),
        (("--executor", "ray", "--device", "cpu"), RayExecutor(cpu=True)),
    ],
)
def test_what_a_service_and_a_worker_do_jobs_on(run, monkeypatch, options, executor):
    told = []
    monkeypatch.setattr("flce_tune.service.app.run", told.append)
    monkeypatch.setattr("flce_tune.worker.run.work", lambda settings, _: told.append(settings))
    monkeypatch.setattr("flce_tune.cli.executors.find_spec", lambda _: object())
    assert run("serve", *options).exit_code == 0
    assert told[0].executor == executor
    if options:
        assert run("worker", "--server", "http://localhost:1", *options).exit_code == 0
        assert told[1].executor == executor


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--devices", "cpu,cpu"), "takes all, or each device once"),
        (("--accelerator", "H200"), "--accelerator goes with --executor ray"),
        (("--executor", "ray", "--devices", "cpu"), "with --executor ray, say --accelerator"),
        (("--executor", "ray"), "flce-tune[ray]"),
    ],
)
def test_wrong_executors_are_refused(run, monkeypatch, options, said):
    monkeypatch.setattr("flce_tune.cli.executors.find_spec", lambda _: None)
    for command in (("serve",), ("worker", "--server", "http://localhost:1")):
        answer = run(*command, *options)
        assert answer.exit_code != 0
        assert said in " ".join(answer.stderr.replace("│", " ").split())


def test_a_job_from_submission_to_cancellation(run, service: Store):
    submitted = run(
        "job",
        "submit",
        *SIZES,
        "--device",
        "cpu",
        "--quick",
        "--strategy",
        "chunked",
        "--time-limit",
        "45",
    )
    assert submitted.exit_code == 0, submitted.stderr
    job = submitted.stdout.strip()
    spec = service.job(job).spec
    assert [problem["tokens"] for problem in spec["problems"]] == [1024, 2048]
    assert (spec["options"]["strategies"], spec["options"]["quick"]) == (["chunked"], True)
    assert spec["options"]["time_limit_s"] == 45
    listed = run("job", "list", "--state", "queued", "--json")
    assert [one["id"] for one in json.loads(listed.stdout)] == [job]
    assert "N=1024 D=64 V=1024 bfloat16 and 1 more" in run("job", "show", job).stdout
    assert run("job", "cancel", job).stdout.startswith("cancelled: ")
    followed = run("job", "show", job, "--follow")
    assert followed.stderr.split() == ["queued", "cancelled", "cancelled", "on", "request"]
    assert service.job(job).state is JobState.CANCELLED


def test_a_job_about_what_was_missed(run, service: Store):
    gpu = DeviceRecord("cuda", "NVIDIA H200", "9.0", 132, 232448)
    problem = ProblemRecord("eval", "bfloat16", "fp32", 64, 1000, 64)
    nothing = run("job", "submit", "--missed", "3")
    assert (nothing.exit_code, "nothing was missed" in nothing.stderr) == (1, True)
    service.note_misses([Miss(gpu, problem, 60, 1, datetime.now(timezone.utc))])
    submitted = run("job", "submit", "--missed", "3", "--device", "sm_90")
    assert submitted.exit_code == 0, submitted.stderr
    (asked,) = service.job(submitted.stdout.strip()).spec["problems"]
    assert (asked["tokens"], asked["vocab"], asked["mode"]) == (60, 1000, "eval")
    both = run("job", "submit", "--missed", "3", *SIZES)
    assert (both.exit_code, "leave out the options" in both.stderr) == (2, True)


def test_what_is_wrong_is_said(run, service: Store, monkeypatch: pytest.MonkeyPatch):
    assert run("job", "list").exit_code == 4
    assert "states are queued, running" in run("job", "list", "--state", "lost").stderr
    odd = run("job", "submit", *SIZES, "--device", "abacus")
    assert (odd.exit_code, "device" in odd.stderr) == (2, True)
    unknown = run("job", "show", "00000000-0000-0000-0000-000000000000")
    assert (unknown.exit_code, "no job 0000" in unknown.stderr) == (1, True)
    monkeypatch.delenv("FLCE_TUNE_URL")
    nowhere = run("job", "list")
    assert (nowhere.exit_code, "FLCE_TUNE_URL" in nowhere.stderr) == (2, True)
