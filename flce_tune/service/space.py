"""Whether a measurement from elsewhere can be one at all."""

from __future__ import annotations

from flce_tune.dispatch.convert import config_of, device_of, problem_of
from flce_tune.errors import InterchangeError
from flce_tune.kernels import strategies
from flce_tune.kernels.problem import token_bucket
from flce_tune.tuning_db.records import Measurement


def check(position: int, measurement: Measurement) -> None:
    """Check that the config is in the space that the strategies declare for problem and device.

    Raises:
        InterchangeError: it is not; the message names the position and the reason.
    """
    if reason := _reason(measurement):
        raise InterchangeError(f"measurements[{position}]: {reason}")


def _reason(measurement: Measurement) -> str | None:
    try:
        problem = problem_of(measurement.problem, measurement.tokens)
        device = device_of(measurement.device)
        config = config_of(measurement)
    except ValueError as error:
        return str(error)
    if token_bucket(measurement.tokens) != measurement.problem.token_bucket:
        return f"{measurement.tokens} tokens are not of bucket {measurement.problem.token_bucket}"
    return strategies.reject(config, problem, device)
