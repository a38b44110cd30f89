import io
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flce_tune.tuning_db import json_rows
from flce_tune.tuning_db.json_rows import Row, rows


def read(text):
    return list(rows(io.BytesIO(text.encode("utf-8", "surrogatepass"))))


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@settings(max_examples=30, deadline=None)
@given(
    st.dictionaries(st.text(), values),
    st.integers(1, 40),
    st.sampled_from([None, 1]),
    st.booleans(),
)
def test_any_object_is_read_whole_however_it_is_cut(document, chunk, indent, ascii_only):
    text = json.dumps(document, indent=indent, ensure_ascii=ascii_only)
    expected = []
    for name, value in document.items():
        if isinstance(value, list):
            expected.append((name, None, []))
            expected += [(name, number, item) for number, item in enumerate(value)]
        else:
            expected.append((name, None, value))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_rows, "CHUNK", chunk)
        try:
            found = read(text)
        except ValueError as error:  # text may hold half a surrogate pair
            assert "UTF-8" in str(error)  # noqa: PT017
            return
    assert [(name, number, json.loads(value)) for name, number, value in found] == expected


def test_values_keep_their_spelling():
    assert read('{"a": [1.50, "1"], "b": 2e3}') == [
        Row("a", None, "[]"),
        Row("a", 0, "1.50"),
        Row("a", 1, '"1"'),
        Row("b", None, "2e3"),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1 column 1"),
        ("[]", "'{' was expected: line 1 column 1"),
        ('{"a": [1,\n 2', "line 2 column 3"),
        ('{"a": [1,\n 2 3]}', "',' was expected: line 2 column 4"),
        ('{"a": [1,]}', "line 1 column 10"),
        ('{"a": 1,}', "line 1 column 9"),
        ("{1: 1}", "a name in quotes"),
        ('{"a": 1} x', "nothing was expected after the last brace: line 1 column 10"),
        ('{"a": ' + "[" * 100_000, "nested too deeply"),
    ],
)
@pytest.mark.parametrize("chunk", [1, 1 << 18])
def test_what_is_wrong_is_said_with_its_place(text, message, chunk, monkeypatch):
    monkeypatch.setattr(json_rows, "CHUNK", chunk)
    if chunk == 1 and len(text) > 1000:
        pytest.skip("a hundred thousand reads tell nothing new")
    with pytest.raises(ValueError, match=message):
        read(text)


def test_no_single_value_fills_the_memory(monkeypatch):
    monkeypatch.setattr(json_rows, "MAX_VALUE", 1000)
    monkeypatch.setattr(json_rows, "CHUNK", 100)
    read(json.dumps({"a": ["x" * 700] * 5}))
    file = io.BytesIO(b'{"a": "' + b"x" * 100_000)
    with pytest.raises(ValueError, match="Unterminated string"):
        list(rows(file))
    assert file.tell() < 2000
