"""From a problem and a device to the config to run."""

from flce_tune.dispatch.choice import Choice, Explanation, Rule, Skipped, Step
from flce_tune.dispatch.default import (
    build_dispatcher,
    default_dispatcher,
    reset_default_dispatcher,
)
from flce_tune.dispatch.dispatcher import Dispatcher
from flce_tune.dispatch.notices import TuningWarning
from flce_tune.dispatch.snapshot import Snapshot

__all__ = [
    "Choice",
    "Dispatcher",
    "Explanation",
    "Rule",
    "Skipped",
    "Snapshot",
    "Step",
    "TuningWarning",
    "build_dispatcher",
    "default_dispatcher",
    "reset_default_dispatcher",
]
