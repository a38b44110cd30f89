import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flce_tune.sweep.race import (
    ALIKE_WORKSPACE,
    Racer,
    front,
    half_iqr,
    interleave,
    is_tie,
    shortlist,
    standard_error,
    thin,
)


def racer(key, samples, workspace=0):
    samples = (samples,) if isinstance(samples, int | float) else tuple(samples)
    return Racer(key, tuple(map(float, samples)), workspace)


def noisy(key, centre, workspace=0, noise=1.0, n=9):
    """Samples spread evenly over centre ± noise, in an order of the key's own."""
    samples = [centre + noise * (2 * i / (n - 1) - 1) for i in range(n)]
    return racer(key, random.Random(key).sample(samples, n), workspace)


def keys(racers):
    return [racer.key for racer in racers]


def test_half_iqr_by_hand():
    assert half_iqr([1.0, 2.0, 3.0, 4.0, 5.0]) == 1.0
    assert half_iqr([7.0]) == 0.0


def test_one_outlier_does_not_spoil_the_noise_estimate():
    steady = [10.0, 10.1, 9.9, 10.0, 10.1, 9.9, 10.0]
    assert standard_error([*steady, 500.0]) < 0.1


def test_standard_error_agrees_with_the_spread_of_real_medians():
    rng = random.Random(0)
    runs = [[rng.gauss(100, 3) for _ in range(25)] for _ in range(400)]
    medians = [racer("x", run).median for run in runs]
    mean = sum(medians) / len(medians)
    true = (sum((m - mean) ** 2 for m in medians) / len(medians)) ** 0.5
    estimated = sum(map(standard_error, runs)) / len(runs)
    assert estimated == pytest.approx(true, rel=0.15)


def test_ties_depend_on_the_noise():
    assert is_tie(noisy("a", 100, noise=10), noisy("b", 103, noise=10))
    assert not is_tie(noisy("a", 100, noise=0.1), noisy("b", 103, noise=0.1))


def test_what_slows_everybody_for_a_while_is_no_noise():
    """Both run in the same rounds; in some of them the machine is twice as slow."""
    load = [1, 1, 2, 1, 2, 2, 1, 2, 1]
    assert not is_tie(racer("a", [100 * x for x in load]), racer("b", [103 * x for x in load]))


def test_single_samples_tie_only_within_half_a_percent():
    assert is_tie(racer("a", 100), racer("b", 100.4))
    assert not is_tie(racer("a", 100), racer("b", 101))


class TestFront:
    def test_slower_but_smaller_stays_and_slower_and_larger_goes(self):
        racers = [racer("fast", 10, 900), racer("small", 15, 100), racer("worse", 16, 500)]
        assert keys(front(racers)) == ["fast", "small"]

    def test_a_tie_keeps_the_incumbent(self):
        racers = [noisy("new", 99.9), noisy("old", 100)]
        assert keys(front(racers, incumbents={"old"})) == ["old"]

    def test_a_clear_improvement_replaces_the_incumbent(self):
        racers = [noisy("new", 90), noisy("old", 100)]
        assert keys(front(racers, incumbents={"old"})) == ["new"]

    def test_without_an_incumbent_a_tie_goes_to_the_default(self):
        racers = [noisy("other", 99.9), noisy("default", 100)]
        assert keys(front(racers, default="default")) == ["default"]

    def test_less_workspace_beats_a_tying_incumbent_that_is_not_faster(self):
        racers = [noisy("new", 99.9, 100), noisy("old", 100, 1000)]
        assert keys(front(racers, incumbents={"old"})) == ["new"]

    def test_noise_never_costs_the_fastest_its_place_to_a_smaller_stranger(self):
        racers = [noisy("fast", 90, 1000, noise=60), noisy("small", 100, 100, noise=50)]
        assert keys(front(racers)) == ["fast", "small"]

    def test_without_incumbents_the_smaller_of_equals_takes_the_place(self):
        racers = [noisy("large", 100, 1000), noisy("small", 100.1, 100)]
        assert keys(front(racers)) == ["small"]

    def test_the_fastest_is_never_clearly_slower_than_the_default(self):
        racers = [noisy("default", 90, 500), noisy("old", 100, 500)]
        assert keys(front(racers, incumbents={"old"}, default="default")) == ["default"]

    def test_nobody_no_front(self):
        assert front([]) == []

    @given(
        st.lists(st.tuples(st.floats(1, 1000), st.integers(0, 10**9)), min_size=1, max_size=12),
        st.sets(st.integers(0, 11)),
    )
    def test_nobody_clearly_beats_a_member(self, points, incumbents):
        racers = [racer(i, time, workspace) for i, (time, workspace) in enumerate(points)]
        members = front(racers, incumbents, default=0)
        assert members
        for faster, smaller in itertools.pairwise(members):
            assert smaller.workspace < faster.workspace * (1 - ALIKE_WORKSPACE)
        for member in members:
            for other in racers:
                clearly_faster = other.median < member.median and not is_tie(other, member)
                assert not (clearly_faster and other.workspace <= member.workspace)

    @given(st.lists(st.tuples(st.floats(1, 1000), st.integers(0, 10**9)), max_size=12))
    def test_a_second_sweep_with_the_same_samples_keeps_all_winners(self, points):
        racers = [racer(i, time, workspace) for i, (time, workspace) in enumerate(points)]
        first = keys(front(racers))
        assert keys(front(racers, incumbents=first)) == first


class TestShortlist:
    def test_the_best_run_again(self):
        racers = [racer(i, 10 + i) for i in range(9)]
        assert keys(shortlist(racers, 3)) == [0, 1, 2]

    def test_nobody_twice_as_slow_runs_again_unless_asked_for(self):
        racers = [racer("best", 10), racer("slow", 21), racer("default", 50)]
        assert keys(shortlist(racers, 3)) == ["best"]
        assert keys(shortlist(racers, 3, always={"default"})) == ["best", "default"]

    def test_small_workspaces_keep_a_place(self):
        racers = [racer(i, 10 + i / 10, 1000) for i in range(9)] + [racer("small", 18, 10)]
        assert "small" in keys(shortlist(racers, 4))

    def test_an_empty_field(self):
        assert shortlist([], 3) == []


def test_thin_keeps_both_ends():
    assert keys(thin([racer(i, i) for i in range(10)], 3))[::2] == [0, 9]


class TestInterleave:
    def test_each_round_runs_everybody_and_turns_around(self):
        order = []

        def run(key):
            order.append(key)
            return float(len(order))

        samples = interleave("abc", 2, run)
        assert "".join(order) == "abccba"
        assert samples == {"a": (1.0, 6.0), "b": (2.0, 5.0), "c": (3.0, 4.0)}

    def test_who_fails_leaves_the_race(self):
        order = []

        def run(key):
            order.append(key)
            return None if key == "b" and len(order) > 2 else 1.0

        samples = interleave("ab", 3, run)
        assert "".join(order) == "abbaa"
        assert samples == {"a": (1.0, 1.0, 1.0)}

    def test_drift_does_not_favour_anybody(self):
        clock = iter(range(1000))
        samples = interleave("abcd", 40, lambda _: 100 + next(clock) * 0.1)
        medians = {key: sorted(s)[len(s) // 2] for key, s in samples.items()}
        assert max(medians.values()) - min(medians.values()) < 0.5


def test_rivals_of_a_small_member_of_the_front_run_again_beside_it():
    """Whoever seemed fast at that workspace may have been lucky."""
    racers = [
        *(racer(f"large {i}", 10 + i / 10, 1000) for i in range(9)),
        racer("lucky", 17.2, 100),
        racer("rival", 17.4, 100),
    ]
    assert {"lucky", "rival"} <= set(keys(shortlist(racers, 6)))


def test_a_tie_is_decided_by_the_rounds_not_by_the_size_of_the_difference():
    base = [100, 120, 90, 150, 110, 95, 130, 105, 99]
    always_faster = [x - 1 for x in base]
    mostly_faster = [x - 1 if i % 3 else x + 1 for i, x in enumerate(base)]
    assert not is_tie(racer("a", base), racer("b", always_faster))
    assert is_tie(racer("a", base), racer("b", mostly_faster))
