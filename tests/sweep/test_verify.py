import dataclasses

import pytest

from flce_tune.dispatch.convert import config_of, toolchain_record
from flce_tune.kernels import strategies
from flce_tune.kernels.problem import describe_device
from flce_tune.sweep.claims import Claims
from flce_tune.sweep.events import SweepEvents, SweepOptions
from flce_tune.sweep.sweep import sweep
from flce_tune.sweep.verify import _Again, verify
from flce_tune.sweep.worker import StoppedError
from flce_tune.tuning_db.records import Winner

HERE = SweepOptions(isolate=False, quick=True)


class Stopping(SweepEvents):
    """Wants to stop after some measurements."""

    def __init__(self, after):
        self.left = after

    def on_measurement(self, measurement, done, total):
        self.left -= 1

    def should_stop(self):
        return self.left <= 0


@pytest.fixture
def tuned(planted, store, problem, cpu):
    """The front of a sweep on the puppet bench, as an older toolchain left it."""
    sweep([problem], store, cpu, HERE, make_bench=planted.Impatient)
    front = store.winners()
    old = [
        store.add_measurement(
            dataclasses.replace(
                w.measurement,
                id=None,
                toolchain=dataclasses.replace(w.measurement.toolchain, kernel_hash="old"),
            )
        )
        for w in front
    ]
    measured = old[0]
    store.set_winners(measured.device, measured.problem, [Winner(m, verified=False) for m in old])
    return store.winners()


def configs(winners):
    return [config_of(w.measurement) for w in winners]


def test_winners_that_still_win_are_measured_with_the_toolchain_of_now(planted, store, cpu, tuned):
    (done,) = verify([tuned], store, cpu, HERE, make_bench=planted.Impatient)
    assert [verdict.reason for verdict in done.verdicts] == [None] * len(tuned)
    assert configs(store.winners()) == configs(tuned)
    for winner in store.winners():
        assert winner.measurement.toolchain == toolchain_record(cpu)
        assert winner.verified
        assert winner.default_ms is not None
        assert winner.eager_ms == 50.0


def test_winners_that_do_not_win_any_more_are_demoted_but_kept_as_measurements(
    planted, store, problem, cpu, tuned
):
    def slower_and_broken(asked, device, seed):
        bench = planted.Impatient(asked, device, seed)
        fine = bench.trial

        def trial(config):
            if config == slow:
                return dataclasses.replace(fine(config), workspace_bytes=1 << 30)
            if config == broken:
                raise RuntimeError("planted")
            return fine(config)

        bench.trial = trial
        bench.ms = lambda config: 90.0 if config == slow else 10.0
        return bench

    default = strategies.default(problem, describe_device(cpu))
    slow, broken = [c for c in strategies.space(problem, describe_device(cpu)) if c != default][:2]
    stored = [
        store.add_measurement(
            dataclasses.replace(tuned[0].measurement, id=None, config=config.to_dict())
        )
        for config in (slow, broken)
    ]
    odd = store.add_measurement(
        dataclasses.replace(stored[0], id=None, config={"strategy": "of another version"})
    )
    front = [Winner(one) for one in (*stored, odd)]
    store.set_winners(odd.device, odd.problem, front)
    before = store.count_measurements()

    (done,) = verify([front], store, cpu, HERE, make_bench=slower_and_broken)
    reasons = [verdict.reason for verdict in done.verdicts]
    assert "90 ms now, the fastest 10 ms" in reasons[0]
    assert "error" in reasons[1]
    assert "planted" in reasons[1]
    assert "of another version" in reasons[2]
    assert configs(store.winners()) == [default]
    assert store.count_measurements() > before
    assert {m.id for m in (*stored, odd)} <= {m.id for m in store.measurements()}


def test_if_nothing_runs_the_front_stays(planted, store, cpu, tuned):
    (done,) = verify([tuned], store, cpu, HERE, make_bench=planted.Failing)
    assert "none of the configs ran" in done.error
    assert done.verdicts == ()
    assert store.winners() == tuned


def test_an_interruption_leaves_the_front_and_ends_the_list(planted, store, cpu, tuned):
    events = Stopping(after=1)
    done = verify(
        [tuned, tuned], store, cpu, HERE,
        events=events, should_stop=events.should_stop, make_bench=planted.Impatient,
    )  # fmt: skip
    assert done == []
    assert store.winners() == tuned


def test_a_problem_this_version_does_not_know_is_an_error_of_its_own(planted, store, cpu, tuned):
    odd = dataclasses.replace(tuned[0].measurement.problem, dtype="float3")
    strange = Winner(dataclasses.replace(tuned[0].measurement, problem=odd))
    first, second = verify([[strange], tuned], store, cpu, HERE, make_bench=planted.Impatient)
    assert "float3" in first.error
    assert second.error is None


def test_a_tie_demotes_nobody(planted, store, problem, cpu, tuned):
    def alike(asked, device, seed):
        bench = planted.Impatient(asked, device, seed)
        fine = bench.trial
        bench.trial = lambda config: dataclasses.replace(fine(config), workspace_bytes=1000)
        bench.ms = lambda config: 10.0
        return bench

    default = strategies.default(problem, describe_device(cpu))
    other = next(c for c in strategies.space(problem, describe_device(cpu)) if c != default)
    measured = store.add_measurement(
        dataclasses.replace(tuned[0].measurement, id=None, config=other.to_dict())
    )
    verify([[Winner(measured)]], store, cpu, HERE, make_bench=alike)
    assert configs(store.winners()) == [other]


def test_nobody_else_may_sweep_what_is_being_verified(planted, store, cpu, tuned):
    one = tuned[0].measurement
    seen = []

    class Watching(SweepEvents):
        def on_measurement(self, measurement, done, total):
            with Claims(store) as claims:
                claim, lease = claims.claim(one.device, one.problem)
            seen.append((claim, lease.owner is not None))

    verify([tuned], store, cpu, HERE, events=Watching(), make_bench=planted.Impatient)
    assert seen
    assert set(seen) == {(None, True)}
    with Claims(store) as claims:
        claim, _ = claims.claim(one.device, one.problem)
    assert claim is not None, "given back in the end"


def test_what_a_sweep_has_is_waited_for_and_its_new_winners_are_verified(
    planted, store, cpu, tuned
):
    """The sweep that held the problem has stored one of the winners alone, as its only one."""
    one = tuned[0].measurement

    class Waiting(SweepEvents):
        waited = False

        def on_wait(self, problem, owner):
            self.waited = True
            store.set_winners(one.device, one.problem, [tuned[-1]])
            claims.release(claim)

    assert len(tuned) > 1
    events = Waiting()
    with Claims(store) as claims:
        claim, _ = claims.claim(one.device, one.problem)
        assert claim is not None
        (done,) = verify([tuned], store, cpu, HERE, events=events, make_bench=planted.Impatient)
    assert events.waited
    assert [config_of(v.before.measurement) for v in done.verdicts] == configs(tuned[-1:])


def test_a_lost_lease_gives_the_problem_back_until_it_is_free(
    planted, store, cpu, tuned, monkeypatch
):
    runs = []
    run_again = _Again.run_again

    def lost_once(self, winners):
        runs.append(winners)
        if len(runs) == 1:
            raise StoppedError
        return run_again(self, winners)

    monkeypatch.setattr(_Again, "run_again", lost_once)
    (done,) = verify([tuned], store, cpu, HERE, make_bench=planted.Impatient)
    assert len(runs) == 2
    assert done.error is None


def test_a_stop_while_waiting_ends_the_list(planted, store, cpu, tuned):
    one = tuned[0].measurement
    with Claims(store) as claims:
        claims.claim(one.device, one.problem)
        assert verify([tuned], store, cpu, HERE, should_stop=lambda: True) == []
