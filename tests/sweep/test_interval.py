import random

import pytest

from flce_tune.sweep.interval import CONFIDENCE, FEWEST, median_interval, overlap


def test_by_hand():
    """P(no sample above the median of 6) = 2⁻⁶; of 9, k = 2: 2·(1 + 9) / 2⁹ = 3.9 %."""
    assert median_interval([6, 1, 5, 2, 4, 3]) == (1, 6)
    assert median_interval(range(1, 10)) == (2, 8)
    assert median_interval(range(1, 16)) == (4, 12)


def test_few_samples_promise_nothing():
    assert median_interval([1.0] * (FEWEST - 1)) is None


@pytest.mark.parametrize("n", [6, 9, 15])
@pytest.mark.parametrize("draw", [random.Random(0).gauss, random.Random(1).lognormvariate])
def test_it_holds_the_true_median_as_often_as_it_says(n, draw):
    true = 0.0 if draw.__name__ == "gauss" else 1.0
    intervals = [median_interval([draw(0, 1) for _ in range(n)]) for _ in range(3000)]
    held = sum(low <= true <= high for low, high in intervals) / len(intervals)
    assert CONFIDENCE - 0.01 < held < 0.99


def test_overlap():
    assert overlap((1, 3), (2, 4))
    assert overlap((1, 2), (2, 3))
    assert not overlap((1, 2), (3, 4))
    assert overlap(None, (3, 4)) is None
