from dataclasses import replace

import pytest

from flce_tune.dispatch.convert import device_record, problem_record
from flce_tune.dispatch.misses import Misses
from flce_tune.errors import StoreUnavailableError
from flce_tune.tuning_db.records import Miss


class Recorder:
    """The part of a store that misses are flushed to."""

    def __init__(self, *, fails: bool = False) -> None:
        self.noted: list[Miss] = []
        self.fails = fails

    def note_misses(self, misses):
        if self.fails:
            raise StoreUnavailableError("away")
        self.noted += misses


def test_repeats_are_counted_and_the_latest_tokens_kept(problem, h200):
    misses = Misses()
    for tokens in (4000, 4096):
        misses.note(device_record(h200), problem_record(problem), tokens)
    (miss,) = misses.pending()
    assert (miss.count, miss.tokens) == (2, 4096)
    assert miss.last_seen.tzinfo is not None


def test_a_full_record_drops_what_is_new(problem, h200):
    misses = Misses(capacity=2)
    for hidden in (1, 2, 3, 1):
        misses.note(device_record(h200), problem_record(replace(problem, hidden=hidden)), 8)
    assert {miss.problem.hidden: miss.count for miss in misses.pending()} == {1: 2, 2: 1}


def test_a_flush_writes_once(problem, h200):
    misses, store = Misses(), Recorder()
    assert misses.flush(store) == 0
    misses.note(device_record(h200), problem_record(problem), 4096)
    assert misses.flush(store) == 1
    assert misses.flush(store) == 0
    assert [miss.tokens for miss in store.noted] == [4096]


def test_a_failed_flush_forgets_nothing(problem, h200):
    misses = Misses()
    misses.note(device_record(h200), problem_record(problem), 4096)
    with pytest.raises(StoreUnavailableError):
        misses.flush(Recorder(fails=True))
    assert len(misses.pending()) == 1
