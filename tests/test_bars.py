"""benchmarks/bars.py in miniature on a CPU, and what its rows say."""

import json
from pathlib import Path

import pytest
import torch

SCRIPTS = Path(__file__).parent.parent / "benchmarks"
pytestmark = pytest.mark.usefixtures("_quick_collections")


@pytest.fixture(autouse=True)
def _scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))


def test_every_section_measures_and_the_json_says_with_what(tmp_path, monkeypatch, capsys):
    import bar_host
    import bars

    monkeypatch.setattr(bar_host, "BATCHES", 1)
    monkeypatch.setattr(bar_host, "STEPS", 2)
    out = tmp_path / "bars.json"
    assert (
        bars.main(["--shrink", "512", "--rounds", "1", "--device", "cpu", "--out", str(out)]) == 0
    )
    document = json.loads(out.read_text())
    assert document["failed"] == {}
    assert {"date", "command", "device", "versions"} <= set(document["environment"])
    rows = document["rows"]
    assert {row["section"] for row in rows} == set(bars.SECTIONS)
    assert all(row["value"] is None or row["value"] > 0 for row in rows)
    kept = [row["counted_rows"] for row in rows if row["section"] == "masked"]
    assert kept == [16, 16, 0, 0]  # of eight sequences of 4, of which 2 and 4 are ignored
    printed = capsys.readouterr().out
    assert len(printed.splitlines()) == 2 + len(rows)
    assert bars.main(["--table", str(out)]) == 0
    assert capsys.readouterr().out == printed


def test_a_section_that_fails_is_reported_and_the_others_go_on(tmp_path, monkeypatch):
    import bars
    from bar_rows import Row

    def broken(bench):
        yield Row("eval", "first", 1.0, "×")
        raise RuntimeError("no memory")

    sections = {"eval": broken, "host": lambda bench: iter([Row("host", "one", 2.0, "µs", 3.0)])}
    monkeypatch.setattr(bars, "SECTIONS", sections)
    out = tmp_path / "bars.json"
    assert bars.main(["--only", "eval,host", "--device", "cpu", "--out", str(out)]) == 0
    document = json.loads(out.read_text())
    assert document["failed"] == {"eval": "RuntimeError: no memory"}
    assert [row["case"] for row in document["rows"]] == ["first", "one"]


@pytest.mark.parametrize(
    ("value", "bar", "at_least", "met"),
    [(1.0, 1.0, False, True), (1.1, 1.0, False, False), (0.9, 0.8, True, True),
     (0.7, 0.8, True, False), (None, 1.0, False, None), (1.0, None, False, None)],
)  # fmt: skip
def test_a_row_says_whether_its_bar_is_met(value, bar, at_least, met):
    from bar_rows import Row, table

    row = Row("s", "c", value, "×", bar, at_least)
    assert row.met is met
    assert row.to_dict()["met"] is met
    assert (
        table([row.to_dict()])
        .splitlines()[-1]
        .endswith({True: "yes |", False: "no |", None: " |"}[met])
    )


def test_an_unknown_section_is_refused_with_the_known_ones(capsys):
    import bars

    with pytest.raises(SystemExit):
        bars.main(["--only", "evil"])
    assert "known are eval, ragged, masked, host, given" in capsys.readouterr().err


def test_the_given_logits_are_no_copy_and_no_leaf():
    from bar_sections import _Computed

    logits = torch.randn(3, 4)
    given = _Computed.apply(logits, torch.zeros((), requires_grad=True))
    assert given.data_ptr() == logits.data_ptr()
    assert given.requires_grad
    assert not given.is_leaf


def test_the_profile_names_the_op(capsys, monkeypatch):
    import bar_host
    import bars

    monkeypatch.setattr(bar_host, "STEPS", 1)
    assert bars.main(["--profile", "--shrink", "512", "--device", "cpu"]) == 0
    assert "linear_cross_entropy" in capsys.readouterr().out
