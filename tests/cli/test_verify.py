"""``flce-tune verify`` over what a real sweep stored."""

import dataclasses
import json
from pathlib import Path

import pytest

from flce_tune.sweep.verify import Verification
from flce_tune.tuning_db.records import Winner
from flce_tune.tuning_db.store import Store

TINY = ("--hidden", "16", "--vocab", "64", "--tokens", "32", "--dtype", "float32")


def test_without_winners_there_is_nothing_to_verify(run):
    result = run("verify", "--device", "cpu")
    assert result.exit_code == 4
    assert "flce-tune sweep" in result.stderr


def test_an_unknown_preset_is_a_usage_error(run):
    assert run("verify", "--device", "cpu", "--preset", "gpt9").exit_code == 2


def test_stale_winners_are_refreshed_or_demoted(run, database: Path):
    assert run("sweep", *TINY, "--device", "cpu", "--quick").exit_code == 0
    with Store.open(f"sqlite:///{database}") as store:
        new = store.winners()[0].measurement
        toolchain = dataclasses.replace(new.toolchain, kernel_hash="old")
        stale = dataclasses.replace(new, id=None, toolchain=toolchain)
        odd = dataclasses.replace(stale, config={"strategy": "gone"})
        front = [Winner(store.add_measurement(one)) for one in (stale, odd)]
        store.set_winners(new.device, new.problem, front)

    assert run("verify", "--device", "cpu", "--preset", "llama3-8b").exit_code == 4
    result = run("verify", "--device", "cpu", "--json")
    assert result.exit_code == 0, result.stderr
    (problem,) = json.loads(result.stdout)["problems"]
    hashes = {one["measurement"]["toolchain"]["kernel_hash"] for one in problem["winners"]}
    assert hashes == {new.toolchain.kernel_hash}
    assert "gone" in [
        one["winner"]["measurement"]["config"]["strategy"] for one in problem["demoted"]
    ]
    shown = json.loads(run("show", "--json").stdout)
    assert [one["measurement"] for one in shown] == [
        one["measurement"] for one in problem["winners"]
    ]
    assert "gone" not in run("verify", "--device", "cpu").stdout


@pytest.mark.usefixtures("h200_database")
def test_winners_of_other_devices_are_left_alone(run):
    before = run("show", "--json").stdout
    assert run("verify", "--device", "cpu").exit_code == 4
    assert run("show", "--json").stdout == before


@pytest.mark.parametrize(
    ("outcome", "code", "said"),
    [("stopped", 130, "interrupted; 1 of 1 problems"), ("failed", 1, "nothing ran")],
)
def test_what_could_not_be_verified_shows_in_the_exit_code(
    run, monkeypatch, outcome: str, code: int, said: str
):
    assert run("sweep", *TINY, "--device", "cpu", "--quick").exit_code == 0

    def verified(fronts, *_: object, **__: object) -> list[Verification]:
        problem = fronts[0][0].measurement.problem
        return [] if outcome == "stopped" else [Verification(problem, None, (), "nothing ran")]

    monkeypatch.setattr("flce_tune.sweep.verify.verify", verified)
    result = run("verify", "--device", "cpu", "--json")
    assert result.exit_code == code
    assert said in result.stderr
    assert json.loads(result.stdout)["interrupted"] is (outcome == "stopped")
