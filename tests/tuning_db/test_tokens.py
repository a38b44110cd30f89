import pytest

from flce_tune.tuning_db import tokens
from flce_tune.tuning_db.records import Scope, Winner
from flce_tune.tuning_db.store import Store


def test_a_token_is_known_by_its_digest_only(store):
    secret = store.create_token("ci", Scope.SUBMIT)
    (token,) = store.tokens()
    assert (token.name, token.scope, token.revoked_at) == ("ci", Scope.SUBMIT, None)
    assert token.digest == tokens.digest(secret)
    assert secret.startswith("flce_")
    assert len(secret) > 40


def test_the_secret_is_nowhere_in_the_file(sqlite_path):
    with Store.open(f"sqlite:///{sqlite_path}") as store:
        secret = store.create_token("ci", Scope.READ)
    for file in sqlite_path.parent.iterdir():
        assert secret.encode() not in file.read_bytes()


def test_tokens_differ(store):
    assert len({store.create_token(f"t{n}", Scope.READ) for n in range(20)}) == 20


def test_a_revoked_token_stays_revoked_and_keeps_its_name(store):
    store.create_token("ci", Scope.READ)
    first = store.revoke_token("ci")
    assert first.revoked_at is not None
    assert store.revoke_token("ci") == first
    assert store.tokens() == [first]
    with pytest.raises(ValueError, match="'ci' already"):
        store.create_token("ci", Scope.READ)
    assert store.revoke_token("nobody") is None


def test_scopes_grow():
    covered = {(a, b) for a in Scope for b in Scope if a.covers(b)}
    growing = [Scope.READ, Scope.SUBMIT, Scope.WORK, Scope.ADMIN]
    assert covered == {(a, b) for i, a in enumerate(growing) for b in growing[: i + 1]}


def test_the_winners_version_grows_with_every_change(store, measured, device, problem):
    first = store.winners_version()
    winner = Winner(store.add_measurement(measured()))
    assert store.winners_version() == first
    store.set_winners(device, problem, [winner])
    store.set_winners(device, problem, [])
    assert store.winners_version() == first + 2
