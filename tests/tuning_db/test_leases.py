import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta

LONG = 3600.0
EXPIRED = -1.0


def test_only_one_sweeps_a_problem_on_a_kind_of_device(store, device, problem):
    ours = store.claim_sweep(device, problem, "us", LONG)
    assert ours.owner == "us"
    assert ours.expires_at > store.now() + timedelta(seconds=LONG / 2)
    assert store.claim_sweep(device, problem, "them", LONG) == ours
    assert not store.renew_sweep(device, problem, "them", LONG)
    assert not store.release_sweep(device, problem, "them", finished="theirs")
    assert store.claim_sweep(device, problem, "us", LONG).owner == "us", "and may ask again"

    other = replace(problem, hidden=problem.hidden * 2)
    assert store.claim_sweep(device, other, "them", LONG).owner == "them"
    elsewhere = replace(device, name="another")
    assert store.claim_sweep(elsewhere, problem, "them", LONG).owner == "them"


def test_what_was_finished_is_told_to_whoever_comes_next(store, device, problem):
    before = store.now()
    lease = store.claim_sweep(device, problem, "us", LONG)
    assert (lease.finished, lease.finished_at) == (None, None)
    assert store.release_sweep(device, problem, "us", finished="all of it")
    lease = store.claim_sweep(device, problem, "them", LONG)
    assert (lease.owner, lease.finished) == ("them", "all of it")
    assert before < lease.finished_at < store.now()
    assert store.release_sweep(device, problem, "them"), "interrupted"
    assert store.claim_sweep(device, problem, "us", LONG).finished_at == lease.finished_at


def test_a_lease_runs_out_unless_it_is_renewed(store, device, problem):
    store.claim_sweep(device, problem, "lost", EXPIRED)
    assert store.renew_sweep(device, problem, "lost", LONG), "late, but nobody else came"
    assert store.claim_sweep(device, problem, "us", LONG).owner == "lost"
    store.renew_sweep(device, problem, "lost", EXPIRED)
    assert store.claim_sweep(device, problem, "us", LONG).owner == "us"
    assert not store.renew_sweep(device, problem, "lost", LONG)
    assert not store.release_sweep(device, problem, "lost", finished="something")


def test_an_owner_known_to_be_dead_is_not_waited_for(store, device, problem):
    store.claim_sweep(device, problem, "dead", LONG)
    assert store.claim_sweep(device, problem, "us", LONG, dead_owner="other").owner == "dead"
    assert store.claim_sweep(device, problem, "us", LONG, dead_owner="dead").owner == "us"


def test_one_of_many_that_ask_at_the_same_time_gets_it(store, device, problem):
    def ask(number):
        time.sleep(0.01)
        return (
            store.claim_sweep(device, problem, f"owner {number}", LONG).owner == f"owner {number}"
        )

    with ThreadPoolExecutor(16) as threads:
        assert sum(threads.map(ask, range(16))) == 1
