"""How sure a median is: a confidence interval from the samples themselves."""

from __future__ import annotations

import math
from collections.abc import Sequence

CONFIDENCE = 0.95
FEWEST = 6  # samples; of fewer not even smallest and largest hold the median so surely


def median_interval(samples: Sequence[float]) -> tuple[float, float] | None:
    """Bound the median of what was sampled, with at least CONFIDENCE; None for fewer than FEWEST.

    The k-th smallest and the k-th largest sample, where k is the largest number with
    2·P(B < k) ≤ 1 - CONFIDENCE and B ~ Binomial(n, ½): each sample lies below the true median with
    probability ½, whatever the distribution (David and Nagaraja, Order Statistics, section 7.1).
    Samples are taken to be independent; what changes from one hour to the next is not in them.
    """
    n = len(samples)
    if n < FEWEST:
        return None
    below, k = 0, 0
    while 2 * (below + math.comb(n, k)) <= (1 - CONFIDENCE) * 2**n:
        below += math.comb(n, k)
        k += 1
    ranked = sorted(samples)
    return ranked[k - 1], ranked[n - k]


def overlap(a: tuple[float, float] | None, b: tuple[float, float] | None) -> bool | None:
    """Whether two intervals have a point in common; None where one is missing."""
    if a is None or b is None:
        return None
    return a[0] <= b[1] and b[0] <= a[1]
