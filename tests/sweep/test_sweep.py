import dataclasses
from collections import Counter

import pytest
import torch

from flce_tune.dispatch.convert import config_of, device_record, problem_record
from flce_tune.errors import SweepError, UnknownStrategyError
from flce_tune.kernels import strategies
from flce_tune.kernels.config import Config
from flce_tune.kernels.problem import describe_device
from flce_tune.sweep.events import SweepEvents, SweepOptions
from flce_tune.sweep.measure import OpBench
from flce_tune.sweep.sweep import sweep
from flce_tune.tuning_db.records import Status, Winner

HERE = SweepOptions(isolate=False)


class Recorder(SweepEvents):
    """Notes what it is told, and wants to stop after some measurements."""

    def __init__(self, stop_after=None):
        self.stop_after = stop_after
        self.measured = []
        self.stages = []
        self.winners = ()

    def on_stage(self, stage, total):
        self.stages.append(stage)

    def on_measurement(self, measurement, done, total):
        assert done <= total
        assert measurement.id is not None, "stored before it is told"
        self.measured.append(measurement)

    def on_winners(self, winners):
        self.winners = winners

    def should_stop(self):
        return len(self.measured) == self.stop_after


def configs(measurements):
    return [config_of(m) for m in measurements]


def winners_of(store, problem, cpu):
    return store.winners(
        device=device_record(describe_device(cpu)), problem=problem_record(problem)
    )


@pytest.mark.parametrize("mode", ["train", "train_frozen_weight", "eval"])
def test_a_sweep_of_the_real_strategies(store, problem, cpu, mode):
    problem = dataclasses.replace(problem, mode=mode, features=("bias", "softcap"))
    events = Recorder()
    report = sweep([problem], store, cpu, HERE, events=events)

    (result,) = report.problems
    space = strategies.space(problem, describe_device(cpu))
    default = strategies.default(problem, describe_device(cpu))
    assert set(configs(events.measured)) == {*space, default}
    assert {m.status for m in events.measured} == {Status.OK}
    assert result.measured == len(events.measured)
    assert result.default_ms is not None
    assert result.eager_ms is not None
    assert result.best_ms == result.winners[0].measurement.median_ms
    assert events.stages == ["measure", "race", "final"]

    stored = winners_of(store, problem, cpu)
    assert [w.measurement for w in stored] == [w.measurement for w in report.winners]
    assert list(events.winners) == list(report.winners)
    for winner in stored:
        assert winner.verified
        assert winner.measurement.errors["loss"] < 1e-5
        assert len(winner.measurement.samples_ms) >= 3, "winners were measured again in the final"


@pytest.mark.slow
def test_planted_faults_cost_the_candidate_alone(planted, store, problem, cpu):
    options = SweepOptions(strategies=("planted",), timeout_s=4)
    report = sweep([problem], store, cpu, options, make_bench=planted.PlantedBench)

    rows = store.measurements()
    latest = {config_of(m): m for m in rows}
    strategy = planted.Planted()
    status = {fault: latest[strategy.config(fault)].status for fault in strategy.faults}
    assert status == {
        "runtime_error": Status.ERROR,
        "assertion": Status.ERROR,
        "compiler": Status.COMPILE_ERROR,
        "out_of_memory": Status.OUT_OF_MEMORY,
        "wrong": Status.WRONG_RESULT,
        "unwritten": Status.WRONG_RESULT,
        "writes_inputs": Status.WRONG_RESULT,
        "exits": Status.CRASH,
        "segfault": Status.CRASH,
        "hangs": Status.TIMEOUT,
    }
    assert "wrote into its inputs" in latest[strategy.config("writes_inputs")].message
    assert "dx is NaN" in latest[strategy.config("unwritten")].message
    assert report.problems[0].failures == Counter(status.values())
    fit_to_win = {strategies.default(problem, describe_device(cpu)), Config("planted")}
    assert report.winners
    assert {config_of(w.measurement) for w in report.winners} <= fit_to_win

    again = Recorder()
    report = sweep(
        [problem],
        store,
        cpu,
        dataclasses.replace(options, isolate=False),
        events=again,
        make_bench=planted.PlantedBench,
    )
    assert again.measured == [], "what failed here is not tried again"
    assert report.problems[0].resumed == len(latest)

    bench = OpBench(problem, cpu, seed=1)
    for config in (config_of(m) for m in rows if m.status is Status.OK):
        bench.trial(config)  # another process, other inputs: still right


@pytest.fixture
def extra(planted):
    """Registers one more strategy of ``planted`` for as long as the test runs."""
    added = []

    def register(strategy):
        strategies.register(strategy)
        added.append(strategy.name)

    yield register
    for name in added:
        strategies.unregister(name)


def test_what_is_right_only_on_round_shapes_never_wins(planted, extra, store, problem, cpu):
    """It seems by far the fastest, and was stored as a winner before."""
    extra(planted.Round())
    bad = planted.Round.bad

    class Fast(OpBench):
        def trial(self, config):
            trial = super().trial(config)
            return dataclasses.replace(trial, sample_ms=1e-3) if config == bad else trial

        def time(self, config):
            return 1e-3 if config == bad else super().time(config)

    def run():
        options = SweepOptions(strategies=("round",), isolate=False)
        report = sweep([problem], store, cpu, options, make_bench=Fast)
        assert report.winners
        assert bad not in configs(w.measurement for w in report.winners)

    run()
    ok, refused = (m for m in store.measurements() if config_of(m) == bad)
    assert (ok.status, refused.status) == (Status.OK, Status.WRONG_RESULT)
    assert refused.message.startswith("with N=299, D=28, V=401: dx: relative error")
    store.set_winners(ok.device, ok.problem, [Winner(ok)])
    run()


def test_equal_binaries_are_timed_and_race_once(planted, extra, store, problem, cpu, monkeypatch):
    compiler = pytest.importorskip("triton.compiler")
    monkeypatch.setattr(compiler.CompiledKernel, "launch_metadata", lambda kernel, *args: args)
    extra(planted.Tiled())
    timed = Counter()

    class Counting(OpBench):
        def time(self, config):
            timed[config] += 1
            return super().time(config)

    options = SweepOptions(strategies=("tiled",), isolate=False)
    report = sweep([problem], store, cpu, options, make_bench=Counting)
    first, same, other = (Config("tiled", logits=tile) for tile in planted.Tiled.tiles)
    assert timed[first] > 0
    assert timed[other] > 0
    assert timed[same] == 0
    (shared,) = (m for m in store.measurements() if config_of(m) == same)
    twin = next(m for m in store.measurements() if config_of(m) == first)
    assert shared.samples_ms == twin.samples_ms
    assert f"the same binaries as {first}" in shared.message
    assert same not in configs(w.measurement for w in report.winners)


def test_trials_are_compared_at_the_same_clock(planted, store, problem, cpu, monkeypatch):
    """A GPU that cools while a config compiles is faster for a moment, and that config seems so."""
    monkeypatch.setattr("flce_tune.sweep.trials.SCALE_S", 0.0)
    slow = Config("full")

    class Cooling(planted.Impatient):
        clock = 1.0

        def ms(self, config):
            return self.clock * (12 if config == slow else 10 + super().ms(config) / 1000)

        def trial(self, config):
            self.clock = 0.5 if config == slow else 1.0
            return super().trial(config)

    class Shortlist(Recorder):
        total = {}  # noqa: RUF012

        def on_stage(self, stage, total):
            self.total[stage] = total

    events = Shortlist()
    options = SweepOptions(isolate=False, quick=True)
    sweep([problem], store, cpu, options, events=events, make_bench=Cooling)
    finals = [m for m in store.measurements() if len(m.samples_ms) > 1]
    assert finals
    assert slow not in configs(finals), "it never was fast"


def test_a_sweep_goes_on_where_it_was_stopped(store, problem, cpu):
    first = Recorder(stop_after=2)
    report = sweep([problem], store, cpu, HERE, events=first, should_stop=first.should_stop)
    assert report.interrupted
    assert report.winners == ()
    assert report.problems[0].measured == 2
    assert store.count_measurements() == 2

    second = Recorder()
    report = sweep([problem], store, cpu, HERE, events=second)
    assert not report.interrupted
    assert report.problems[0].resumed == 2
    assert not set(configs(first.measured)) & set(configs(second.measured))
    assert report.winners

    third = Recorder()
    report = sweep([problem], store, cpu, HERE, events=third)
    assert third.measured == []
    assert report.winners, "the final was run again"


def test_an_exception_in_between_loses_nothing_stored(store, problem, cpu):
    class Interrupting(Recorder):
        def on_measurement(self, measurement, done, total):
            super().on_measurement(measurement, done, total)
            if done == 3:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sweep([problem], store, cpu, HERE, events=Interrupting())
    assert store.count_measurements() == 3


def test_another_toolchain_measures_again(store, problem, cpu, monkeypatch):
    sweep([problem], store, cpu, HERE)
    monkeypatch.setattr("flce_tune.dispatch.convert.kernel_hash", lambda: "another")
    events = Recorder()
    sweep([problem], store, cpu, HERE, events=events)
    assert events.measured


def test_the_incumbent_stays_on_a_tie_and_goes_when_beaten(planted, store, problem, cpu):
    def run():
        return sweep([problem], store, cpu, HERE, make_bench=planted.Impatient).winners

    first = run()
    assert [w.measurement.median_ms for w in first] == sorted(
        w.measurement.median_ms for w in first
    )
    assert configs(w.measurement for w in run()) == configs(w.measurement for w in first)

    slow = max(store.measurements(), key=lambda m: m.median_ms)
    store.set_winners(slow.device, slow.problem, [Winner(slow)])
    assert configs(w.measurement for w in run()) == configs(w.measurement for w in first)


def test_a_stored_winner_that_cannot_run_here_is_left_out(store, problem, cpu):
    report = sweep([problem], store, cpu, HERE)
    good = report.winners[0].measurement
    odd = store.add_measurement(
        dataclasses.replace(good, id=None, config={"strategy": "of another version"})
    )
    store.set_winners(good.device, good.problem, [Winner(odd)])
    report = sweep([problem], store, cpu, HERE)
    assert odd.config not in [w.measurement.config for w in report.winners]


def test_if_all_fail_the_error_says_how(planted, store, problem, cpu):
    with pytest.raises(SweepError, match=r"none of the configs ran \(\d+ error\)"):
        sweep([problem], store, cpu, HERE, make_bench=planted.Failing)
    assert store.count_measurements(status=Status.ERROR) > 0


def test_one_problem_without_winners_does_not_stop_the_next(planted, store, problem, cpu):
    other = dataclasses.replace(problem, hidden=32)

    def bench(asked, device, seed):
        return (planted.Failing if asked == problem else planted.Impatient)(asked, device, seed)

    report = sweep([problem, other], store, cpu, HERE, make_bench=bench)
    assert [bool(p.winners) for p in report.problems] == [False, True]
    assert "none of the configs ran" in report.problems[0].error


def test_an_unknown_strategy_is_refused_at_once(store, problem, cpu):
    with pytest.raises(UnknownStrategyError, match="unknown strategy 'magic'"):
        sweep([problem], store, cpu, SweepOptions(strategies=("magic",)))


def test_a_sweep_leaves_torch_as_it_was(store, problem, cpu):
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    sweep([problem], store, cpu, SweepOptions(strategies=("full",), isolate=False))
    assert torch.equal(torch.rand(1), expected)
    assert torch.is_grad_enabled()
