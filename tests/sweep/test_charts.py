"""What no chart may do: draw two strategies alike."""

from flce_tune.kernels import strategies
from flce_tune.sweep.charts import COLOURS


def test_every_strategy_has_a_colour_of_its_own():
    assert set(COLOURS) == set(strategies.names())
    assert len(set(COLOURS.values())) == len(COLOURS)
