import io
import itertools
import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flce_tune.errors import InterchangeError
from flce_tune.tuning_db import merging
from flce_tune.tuning_db.document import Document
from flce_tune.tuning_db.interchange import (
    export_json,
    export_pieces,
    import_file,
    import_json,
    parse_winners,
)
from flce_tune.tuning_db.records import Status, Winner
from flce_tune.tuning_db.store import Store


@pytest.fixture
def filled(store, measured, device, problem, toolchain):
    return fill(store, measured, device, problem, toolchain)


@pytest.fixture
def exported(tmp_path, measured, device, problem, toolchain):
    """The text of an export, for what depends on no backend."""
    with Store.open(f"sqlite:///{tmp_path / 'exported.sqlite3'}") as store:
        return export_json(fill(store, measured, device, problem, toolchain))


def fill(store, measured, device, problem, toolchain):
    """Two devices, failures, and a front of two."""
    other = replace(device, name="NVIDIA H100", sm_count=114)
    fast = store.add_measurement(measured(1.0, errors={"dx": 0.25}, message="日本"))
    lean = store.add_measurement(measured(2.0, workspace_bytes=7, config={"strategy": "atomic"}))
    store.add_measurement(measured(None, status=Status.TIMEOUT, message="60 s"))
    elsewhere = store.add_measurement(
        measured(3.0, device=other, toolchain=replace(toolchain, triton="3.9"))
    )
    store.set_winners(device, problem, [Winner(fast, default_ms=1.5, eager_ms=4.0), Winner(lean)])
    store.set_winners(other, problem, [Winner(elsewhere)])
    return store


@pytest.fixture
def empty(tmp_path):
    with Store.open(f"sqlite:///{tmp_path / 'other.sqlite3'}") as opened:
        yield opened


def anonymous(measurements):
    return [replace(m, id=None) for m in measurements]


def test_there_and_back(filled, empty):
    text = export_json(filled)
    report = import_json(empty, text, source="export.json")
    assert (report.measurements, report.winners, report.skipped) == (4, 3, 0)
    assert anonymous(empty.measurements()) == anonymous(filled.measurements())
    assert empty.devices()[0].memory_bytes == 150_000_000_000
    ours, theirs = empty.winners(), filled.winners()
    assert [(w.measurement.median_ms, w.default_ms, w.eager_ms) for w in ours] == [
        (w.measurement.median_ms, w.default_ms, w.eager_ms) for w in theirs
    ]
    assert not any(w.verified for w in ours)
    assert all(w.verified for w in theirs)
    assert export_json(empty) == text


def test_again_changes_nothing(filled, empty):
    text = export_json(filled)
    import_json(empty, text, source="export.json")
    for store in (empty, filled):
        before = store.winners()
        report = import_json(store, text, source="export.json")
        assert (report.measurements, report.winners, report.skipped) == (0, 0, 7)
        assert store.winners() == before
        assert store.count_measurements() == 4


def test_a_part_adds_only_what_is_new(filled, empty, device):
    import_json(empty, export_json(filled, device=device), source="a")
    assert empty.devices() == [device]
    report = import_json(empty, export_json(filled), source="b")
    assert (report.measurements, report.winners) == (1, 1)


def test_what_was_measured_here_is_worth_more(filled, empty, measured, device, problem):
    mine = empty.add_measurement(measured(9.0))
    empty.set_winners(device, problem, [Winner(mine)])
    report = import_json(empty, export_json(filled), source="export.json")
    assert (report.measurements, report.winners, report.skipped) == (4, 1, 2)
    assert [w.measurement for w in empty.winners(device=device)] == [mine]


def test_a_newer_import_replaces_an_unverified_front(filled, empty, measured, device, problem):
    import_json(empty, export_json(filled), source="old")
    faster = filled.add_measurement(measured(0.5))
    filled.set_winners(device, problem, [Winner(faster)])
    import_json(empty, export_json(filled), source="new")
    assert [w.measurement.median_ms for w in empty.winners(device=device)] == [0.5]


def test_winners_only(filled, empty, device):
    text = export_json(filled, device=device, winners_only=True)
    winners = parse_winners(text, "pretuned.json")
    assert [w.measurement.median_ms for w in winners] == [1.0, 2.0]
    assert all(w.measurement.id is None and not w.verified for w in winners)
    assert winners[0].measurement.device == device
    assert import_json(empty, text, source="x").measurements == 2


def test_each_row_is_a_line(exported):
    assert len(exported.splitlines()) == 4 + 3 + 2 + 2 + 1 + 13  # 13: the brackets and the schema
    assert json.loads(exported)["schema"] == "flce-tune/1"


def test_an_empty_store(empty):
    assert import_json(empty, export_json(empty), source="x").skipped == 0


def spoil(document, path, value):
    *parents, last = path
    for key in parents:
        document = document[key]
    if value is KeyError:
        del document[last]
    else:
        document[last] = value


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["schema"], "flce-tune/2", "schema: this flce-tune reads 'flce-tune/1'.*pip install -U"),
        (["schema"], KeyError, "schema: Field required"),
        (["surprise"], 1, "surprise: Extra inputs"),
        (["measurements", 1, "median_ms"], "fast", r"measurements\[1\].median_ms: .*number"),
        (["measurements", 1, "median_ms"], float("nan"), r"measurements\[1\].median_ms"),
        (["measurements", 1, "median_ms"], float("inf"), r"measurements\[1\].median_ms"),
        (["measurements", 1, "median_ms"], -1.0, r"measurements\[1\].median_ms"),
        (["measurements", 1, "median_ms"], None, r"measurements\[1\]: .*ok needs median_ms"),
        (["measurements", 1, "samples_ms", 0], float("inf"), r"measurements\[1\].samples_ms\[0\]"),
        (["measurements", 1, "status"], "good", r"measurements\[1\].status"),
        (["measurements", 1, "status"], "crash", r"measurements\[1\]: only status ok has times"),
        (["measurements", 0, "errors", "dx"], float("nan"), r"measurements\[0\].errors.dx"),
        (["measurements", 1, "config"], {"a": float("nan")}, r"measurements\[1\]: a config must"),
        (["measurements", 1, "config"], "atomic", r"measurements\[1\].config"),
        (["measurements", 1, "device"], 5, r"measurements\[1\].device is 5, .* only 2"),
        (["measurements", 1, "device"], -1, r"measurements\[1\].device"),
        (["measurements", 1, "tokens"], 2**63, r"measurements\[1\].tokens"),
        (["measurements", 1, "registers"], 2**31, r"measurements\[1\].registers"),
        (["measurements", 1, "message"], "a\0b", r"measurements\[1\].message"),
        (["measurements", 1, "created_at"], "2026-01-01T00:00:00", r"measurements\[1\].created_at"),
        (["measurements", 1, "created_at"], KeyError, r"measurements\[1\].created_at"),
        (["devices", 0, "sm_count"], True, r"devices\[0\].sm_count"),
        (["devices", 0, "capability"], "nine", r"devices\[0\].capability"),
        (["problems", 0, "vocab"], 0, r"problems\[0\].vocab"),
        (["problems", 0, "features"], ["a,b"], r"problems\[0\].features\[0\]"),
        (["winners", 0, "measurement"], 99, r"winners\[0\].measurement is 99"),
        (["winners", 0, "measurement"], 2, r"winners\[0\].measurement: .*must be ok.*timeout"),
        (["winners"], {}, "winners"),
    ],
)
def test_what_does_not_validate_is_named_and_nothing_is_stored(
    exported, empty, path, value, message
):
    document = json.loads(exported)
    spoil(document, path, value)
    with pytest.raises(InterchangeError, match=f"^bad.json: .*{message}"):
        import_json(empty, json.dumps(document), source="bad.json")
    assert empty.count_measurements() == 0


def test_cut_in_the_middle(exported, empty):
    for length in (0, 1, len(exported) // 2, len(exported) - 2):
        with pytest.raises(InterchangeError, match=r"cut.json: .*line \d+ column \d+"):
            import_json(empty, exported[:length], source="cut.json")
    assert empty.count_measurements() == 0


@pytest.mark.parametrize("text", ["[]", "null", "3", "[" * 100_000, '{"schema": "x"}', "\ud800"])
def test_not_even_close(text):
    with pytest.raises(InterchangeError, match=r"odd\.json: "):
        parse_winners(text, "odd.json")


@given(st.text() | st.recursive(st.none() | st.floats(), st.lists).map(json.dumps))
def test_any_text_is_refused_in_words(text):
    with pytest.raises(InterchangeError):
        parse_winners(text, "x")


@pytest.mark.parametrize(
    "written",
    [
        lambda document: json.dumps(document),
        lambda document: json.dumps(document, indent=4, sort_keys=True),  # measurements come early
    ],
)
def test_a_document_that_another_program_wrote(filled, empty, written):
    exported = export_json(filled)
    import_json(empty, written(json.loads(exported)), source="x")
    assert export_json(empty) == exported


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"schema": "flce-tune/1", "schema": "flce-tune/1"}', "schema is there twice"),
        ('{"schema": "flce-tune/1", "devices": {}}', "devices: must be a list"),
        ('{"schema": "flce-tune/1"} {}', "nothing was expected after the last brace"),
    ],
)
def test_odd_documents(text, message):
    with pytest.raises(InterchangeError, match=f"^odd.json: .*{message}"):
        parse_winners(text, "odd.json")


@pytest.fixture
def small_batches(monkeypatch):
    monkeypatch.setattr(merging, "BATCH", 2)


def test_an_interrupted_import_goes_on(filled, empty, small_batches):
    exported = export_json(filled)
    document = Document.read(io.BytesIO(exported.encode()), "x")

    def breaks():
        yield from itertools.islice(document.measurements(), 3)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        empty.merge(breaks())
    assert empty.count_measurements() == 2
    report = import_json(empty, exported, source="x")
    assert (report.measurements, report.winners) == (2, 3)
    assert export_json(empty) == exported


def test_what_others_import_meanwhile_is_not_doubled(filled, store, empty, small_batches):
    records = list(Document.read(io.BytesIO(export_json(filled).encode()), "x").measurements())

    def interleaved():
        yield from records[:3]
        empty.merge(reversed(records))
        yield from records[3:]

    assert empty.merge(interleaved()) == (2, 0)  # the first batch; the rest was there by then
    assert sorted(anonymous(empty.measurements()), key=repr) == sorted(records, key=repr)


def test_a_row_that_is_there_twice_is_stored_once(exported, empty):
    document = json.loads(exported)
    document["measurements"].append(document["measurements"][0])
    assert import_json(empty, json.dumps(document), source="x").measurements == 4


@pytest.mark.parametrize("first", ["devices", "measurements", "winners"])
def test_a_check_refuses_before_anything_is_written(exported, empty, first):
    document = json.loads(exported)
    exported = json.dumps({first: document.pop(first)} | document)

    def check(position, measurement):
        if measurement.status is Status.TIMEOUT:
            raise InterchangeError(f"measurements[{position}] is too slow")

    with pytest.raises(InterchangeError, match=r"measurements\[2\] is too slow"):
        import_file(empty, io.BytesIO(exported.encode()), source="x", check=check)
    assert empty.count_measurements() == 0


@pytest.mark.parametrize("first", ["devices", "measurements", "winners"])
def test_every_measurement_is_checked(exported, empty, first):
    document = json.loads(exported)
    exported = json.dumps({first: document.pop(first)} | document)
    checked = {}
    import_file(
        empty, io.BytesIO(exported.encode()), source="x", check=lambda n, m: checked.update({n: m})
    )
    assert sorted(checked) == [0, 1, 2, 3]
    assert [replace(m, id=None) for m in empty.measurements()] == [checked[n] for n in range(4)]


def test_an_export_leaves_out_what_comes_meanwhile(filled, measured, device, problem):
    before = export_json(filled)
    pieces = export_pieces(filled)
    start = next(pieces)
    filled.add_measurement(measured(7.0))
    assert start + "".join(pieces) == before


def test_an_export_of_one_problem(filled, measured, empty, problem, toolchain):
    other = replace(problem, vocab=1)
    filled.add_measurement(measured(7.0, problem=other, toolchain=replace(toolchain, torch="9")))
    text = "".join(export_pieces(filled, problem=other))
    document = json.loads(text)
    assert [t["torch"] for t in document["toolchains"]] == ["9"]
    assert [p["vocab"] for p in document["problems"]] == [1]
    assert len(document["measurements"]) == 1
    assert document["winners"] == []
