from pathlib import Path

from flce_tune.tuning_db.records import Scope
from flce_tune.tuning_db.store import Store
from flce_tune.tuning_db.tokens import digest


def test_create_prints_the_token_alone(run, database: Path):
    result = run("token", "create", "ci", "--scope", "read")
    assert result.exit_code == 0
    with Store.open(f"sqlite:///{database}") as store:
        (token,) = store.tokens()
    assert (token.name, token.scope) == ("ci", Scope.READ)
    assert token.digest == digest(result.stdout.strip())


def test_list_shows_no_secret_and_who_is_revoked(run, database: Path):
    secret = run("token", "create", "ci").stdout.strip()
    run("token", "create", "anna", "--scope", "admin")
    assert run("token", "revoke", "ci").exit_code == 0
    listed = run("token", "list").stdout
    assert secret not in listed
    lines = [line.split() for line in listed.splitlines()]
    (ci,) = [line for line in lines if line[:1] == ["ci"]]
    (anna,) = [line for line in lines if line[:1] == ["anna"]]
    assert (ci[1], len(ci)) == ("submit", 6)
    assert (anna[1], len(anna)) == ("admin", 4)


def test_what_is_not_there_is_said(run, database: Path):
    assert run("token", "list").exit_code == 4
    assert run("token", "revoke", "nobody").exit_code == 4
    run("token", "create", "ci")
    again = run("token", "create", "ci")
    assert again.exit_code == 2
    assert "'ci' already" in again.stderr
    assert run("token", "create", "x", "--scope", "root").exit_code == 2
