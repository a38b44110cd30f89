"""The problem next to a problem, with sizes that no tile divides."""

from __future__ import annotations

from dataclasses import replace

from flce_tune.kernels.limits import ALIGNMENT
from flce_tune.kernels.problem import Problem


def ragged_neighbour(problem: Problem) -> Problem:
    """One token less, one vocabulary column more, and the next hidden size that tiles can read.

    The last tile along N, V and D is then a sliver. Rows of x and weight stay aligned to ALIGNMENT
    bytes: tiles refuse others.
    """
    return replace(
        problem,
        tokens=max(problem.tokens - 1, 1),
        hidden=problem.hidden + ALIGNMENT // problem.itemsize,
        vocab=problem.vocab + 1,
    )
