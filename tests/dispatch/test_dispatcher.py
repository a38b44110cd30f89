"""What the dispatcher adds to the rules: memory, warnings, quarantine, misses, threads."""

import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from flce_tune.dispatch import Snapshot, TuningWarning, dispatcher
from flce_tune.dispatch.convert import device_record, problem_record
from flce_tune.kernels import strategies
from flce_tune.kernels.config import Config, Tile
from flce_tune.kernels.problem import Device, Problem


def chunked(chunk: int) -> Config:
    return Config("chunked", chunk=chunk)


def the_warning(recwarn: pytest.WarningsRecorder) -> str:
    """The text of the one warning given."""
    (warning,) = recwarn.list
    assert warning.category is TuningWarning
    return str(warning.message)


@pytest.fixture
def resolved(monkeypatch: pytest.MonkeyPatch) -> list[Problem]:
    """The problems the rules were walked through for."""
    seen: list[Problem] = []
    original = dispatcher.resolve

    def counting(measured, shipped, query):
        seen.append(query.problem)
        return original(measured, shipped, query)

    monkeypatch.setattr(dispatcher, "resolve", counting)
    return seen


def test_many_token_counts_make_few_lookups(make_dispatcher, problem, h200, resolved):
    subject = make_dispatcher()
    choices = [
        subject.choose(replace(problem, tokens=tokens), h200) for tokens in range(4000, 8000, 40)
    ]
    assert len(choices) == 100
    assert [problem.bucket for problem in resolved] == [4096, 6144, 8192]
    assert len({id(choice) for choice in choices}) == 3


def test_what_changes_the_kernel_is_looked_up_on_its_own(make_dispatcher, problem, h200, resolved):
    variants = [
        (problem, h200, None),
        (replace(problem, hidden=2048), h200, None),
        (replace(problem, vocab=32000), h200, None),
        (replace(problem, dtype="float16"), h200, None),
        (replace(problem, mode="eval"), h200, None),
        (replace(problem, accumulate="weight_dtype"), h200, None),
        (replace(problem, features=("bias",)), h200, None),
        (problem, replace(h200, sm_count=66), None),
        (problem, h200, 1 << 40),
    ]
    subject = make_dispatcher()
    for _ in range(2):
        for asked, device, limit in variants:
            subject.choose(asked, device, workspace_limit=limit)
    assert len(resolved) == len(variants)


def test_the_memory_is_bounded(make_dispatcher, problem, h200, monkeypatch, resolved):
    monkeypatch.setattr(dispatcher, "MEMO_CAPACITY", 10)
    subject = make_dispatcher()
    for limit in range(1, 100):
        subject.choose(problem, h200, workspace_limit=limit << 30)
    assert len(subject._memo) <= 10


def test_threads_share_one_lookup(make_dispatcher, make_winner, problem, h200, resolved):
    def slow(_: object) -> Snapshot:
        time.sleep(0.05)  # while the others find nothing remembered yet
        return Snapshot.empty()

    subject = make_dispatcher(make_winner(chunked(64)), fetch=slow)
    together = threading.Barrier(8)

    def ask(_: int):
        together.wait()
        return subject.choose(problem, h200)

    with ThreadPoolExecutor(8) as pool:
        choices = list(pool.map(ask, range(8)))
    assert len({id(choice) for choice in choices}) == 1
    assert len(resolved) == 1


UNUSABLE = [
    {"strategy": "chunked", "chunk": 512, "BLOCK": 8},
    {"strategy": "chunked", "chunk": 0},
    {"strategy": "chunked", "chunk": 512, "logits": {"n_block": 64, "v_block": 0, "d_block": 64}},
    {"strategy": "nobody knows"},
    Config("chunked", chunk=512, logits=Tile(8, 8, 8)).to_dict(),
    Config("chunked", chunk=512, logits=Tile(256, 256, 256, num_stages=8)).to_dict(),
]


@pytest.mark.parametrize("stored", UNUSABLE)
def test_an_unusable_row_is_passed_over_with_one_warning(
    make_dispatcher, make_winner, problem, h200, resolved, recwarn, stored
):
    subject = make_dispatcher(make_winner(stored, 0.5))
    choice = subject.choose(problem, h200)
    assert subject.choose(problem, h200) is choice
    assert "flce-tune sweep" in the_warning(recwarn)
    assert len(resolved) == 1
    assert choice.config == strategies.default(problem, h200)


def test_an_unusable_row_does_not_hide_the_next_of_its_front(
    make_dispatcher, make_winner, problem, h200, recwarn
):
    subject = make_dispatcher(*(make_winner(row, 0.5) for row in UNUSABLE), make_winner(chunked(8)))
    choice = subject.choose(problem, h200)
    assert (choice.rule, choice.config) == ("exact", chunked(8))
    assert "flce-tune explain" in the_warning(recwarn)


def test_a_config_that_failed_is_not_used_again(
    make_dispatcher, make_winner, problem, h200, recwarn
):
    subject = make_dispatcher(make_winner(chunked(8), 1.0), make_winner(chunked(16), 2.0))
    bad = subject.choose(problem, h200).config
    choice = subject.quarantine(bad, problem, h200, "no such instruction")
    again = subject.quarantine(bad, problem, h200, "no such instruction")
    assert "no such instruction" in the_warning(recwarn)
    assert choice.config == again.config == chunked(16)
    assert subject.choose(problem, h200).config == chunked(16)
    more_tokens = replace(problem, tokens=8192)
    assert subject.choose(more_tokens, h200).config == chunked(16)
    assert "no such instruction" in subject.explain(problem, h200).steps[0].skipped[0].reason


def test_a_failure_on_one_device_says_nothing_of_another(
    make_dispatcher, make_winner, problem, h200
):
    other = replace(h200, name="NVIDIA GH200")
    subject = make_dispatcher(make_winner(chunked(8)))
    with pytest.warns(TuningWarning):
        subject.quarantine(chunked(8), problem, h200, "broken")
    assert subject.choose(problem, h200).rule == "default"
    assert subject.choose(problem, other).config == chunked(8)


def test_quarantine_keeps_to_the_limit(make_dispatcher, make_winner, problem, h200):
    subject = make_dispatcher(make_winner(Config("recompute", slab=1024)))
    limit = strategies.workspace(Config("recompute", slab=512), problem)
    with pytest.warns(TuningWarning):
        choice = subject.quarantine(
            Config("recompute", slab=256), problem, h200, "broken", workspace_limit=limit
        )
    assert strategies.workspace(choice.config, problem) <= limit


def test_a_default_that_failed_is_replaced_while_there_is_another(
    make_dispatcher, problem, h200, recwarn
):
    subject = make_dispatcher()
    tried = [subject.choose(problem, h200).config]
    while (config := subject.quarantine(tried[-1], problem, h200, "x").config) not in tried:
        tried.append(config)
    assert len(recwarn) == len(tried)
    assert {config.strategy for config in tried} >= {"chunked", "full", "recompute"}


def test_results_of_other_kernels_are_used_with_one_warning(
    make_dispatcher, make_winner, problem, h200, recwarn
):
    stored = make_winner(chunked(8))
    toolchain = replace(stored.measurement.toolchain, kernel_hash="older")
    stale = make_winner(chunked(8), toolchain=toolchain)
    also = make_winner(chunked(8), toolchain=toolchain, vocab=32000)
    subject = make_dispatcher(stale, also)
    assert subject.choose(problem, h200).config == chunked(8)
    assert subject.choose(replace(problem, vocab=32000), h200).config == chunked(8)
    assert "flce-tune verify" in the_warning(recwarn)
    assert "kernel" in subject.explain(problem, h200).stale


def test_another_triton_matters_on_a_gpu_only(make_dispatcher, make_winner, problem, h200):
    toolchain = replace(make_winner(chunked(8)).measurement.toolchain, triton="3.4.0")
    cpu = Device("cpu", "x86_64", (0, 0), 2, 0, 0)
    subject = make_dispatcher(
        make_winner(chunked(8), toolchain=toolchain),
        make_winner(chunked(8), toolchain=toolchain, device=cpu),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert subject.choose(problem, cpu).rule == "exact"
    with pytest.warns(TuningWarning, match=r"Triton 3\.4\.0"):
        assert subject.choose(problem, h200).rule == "exact"


@pytest.mark.parametrize(
    "change", [{"driver": "600"}, {"cuda": "14.0"}, {"torch": "2.99"}, {}], ids=str
)
def test_other_versions_do_not_make_results_stale(
    make_dispatcher, make_winner, problem, h200, change, recwarn
):
    toolchain = replace(make_winner(chunked(8)).measurement.toolchain, **change)
    subject = make_dispatcher(make_winner(chunked(8), toolchain=toolchain))
    assert subject.choose(problem, h200).rule == "exact"
    assert not recwarn.list


def test_users_are_not_warned_of_stale_shipped_results(
    make_dispatcher, make_winner, problem, h200, recwarn
):
    toolchain = replace(make_winner(chunked(8)).measurement.toolchain, kernel_hash="older")
    subject = make_dispatcher(shipped=(make_winner(chunked(8), toolchain=toolchain),))
    assert subject.choose(problem, h200).rule == "pretuned"
    assert not recwarn.list


def test_misses_are_the_problems_without_an_answer_of_their_own(
    make_dispatcher, make_winner, problem, h200
):
    eval_problem = replace(problem, mode="eval")
    subject = make_dispatcher(
        make_winner(chunked(8)), shipped=(make_winner(chunked(8), mode="eval"),)
    )
    missed = replace(problem, tokens=10000)
    for asked in (problem, eval_problem, missed, replace(problem, tokens=10001), missed):
        subject.choose(asked, h200)
    subject.explain(replace(problem, dtype="float16"), h200)
    (miss,) = subject.misses.pending()
    assert (miss.device, miss.problem) == (device_record(h200), problem_record(missed))
    assert (miss.tokens, miss.count) == (10000, 1)


def test_a_device_prepared_is_not_fetched_again_by_its_first_use(
    make_dispatcher, make_winner, problem, h200
):
    asked = []

    def fetch(device):
        asked.append(device)
        return Snapshot.from_winners([make_winner(chunked(16))], "the team")

    subject = make_dispatcher(fetch=fetch)
    subject.prepare(h200)
    assert asked == [device_record(h200)]
    assert subject.choose(problem, h200).config == chunked(16)
    assert len(asked) == 1


def test_a_device_is_fetched_once_and_its_winners_go_first(
    make_dispatcher, make_winner, problem, h200
):
    asked = []

    def fetch(device):
        asked.append(device)
        return Snapshot.from_winners([make_winner(chunked(16))], "the team")

    subject = make_dispatcher(
        make_winner(chunked(8), 0.1), make_winner(chunked(32), tokens=64), fetch=fetch
    )
    for tokens, chunk in ((4096, 16), (64, 32), (96, 32), (6144, 16)):
        assert subject.choose(replace(problem, tokens=tokens), h200).config == chunked(chunk)
    assert asked == [device_record(h200)]
