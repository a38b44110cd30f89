"""Where a sweep starts: the nearest front that can run here."""

from dataclasses import replace

import pytest

from flce_tune.dispatch.rules import Query, usable_front
from flce_tune.dispatch.snapshot import Snapshot
from flce_tune.kernels.config import Config


def chunked(chunk: int) -> Config:
    return Config("chunked", chunk=chunk)


@pytest.fixture
def ask(problem, h200):
    def front(*winners, shipped=()):
        query = Query(problem, h200, None, {}, lambda _: "")
        return usable_front(
            Snapshot.from_winners(winners, ""), Snapshot.from_winners(shipped, ""), query
        )

    return front


def test_the_whole_front_of_the_nearest_problem_fastest_first(ask, make_winner):
    near = [make_winner(chunked(2), 2.0, tokens=8192), make_winner(chunked(1), 1.0, tokens=8192)]
    far = make_winner(chunked(3), tokens=1024)
    assert ask(*near, far) == [chunked(1), chunked(2)]
    assert ask(*near, make_winner(chunked(9))) == [chunked(9)], "the exact one is the nearest"
    assert ask(shipped=near) == [chunked(1), chunked(2)]


def test_what_cannot_run_here_is_left_out_and_an_empty_front_passed_over(ask, make_winner, h200):
    broken = make_winner({"strategy": "of another version"}, tokens=8192)
    assert ask(broken, make_winner(chunked(1), 2.0, tokens=8192)) == [chunked(1)]
    assert ask(broken, make_winner(chunked(2), vocab=128000)) == [chunked(2)]


def test_nothing_comparable(ask, make_winner, h200):
    elsewhere = replace(h200, name="NVIDIA A100", capability=(8, 0))
    assert ask() == ask(make_winner(chunked(1), device=elsewhere)) == []
