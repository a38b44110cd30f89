"""Reads a large JSON object row by row, in bounded memory.

Gives the text of each value, so that it can be validated as strictly as JSON allows (ijson, which
does the same, gives decoded values: whether a number was quoted is lost on the way).
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

CHUNK = 1 << 18  # bytes read at once
MAX_VALUE = 1 << 20  # characters of one row, or of one value that is no list

_AFTER_VALUE = frozenset(" \t\r\n,:]}")


class Row(NamedTuple):
    """One element of a member that is a list; or the whole member, with ``position`` None."""

    member: str
    position: int | None
    text: str  # "[]" where a list begins


def rows(file: BinaryIO) -> Iterator[Row]:
    """Read the members of a JSON object: of lists the beginning, then each element.

    Raises:
        ValueError: it is not one JSON object in UTF-8; the message has line and column.
    """
    text = _Text(file)
    try:
        text.expect("{")
        more = text.peek() != "}"
        while more:
            name = text.value()
            if not name.startswith('"'):
                raise text.fault("a name in quotes was expected")
            text.expect(":")
            yield from _member(text, json.loads(name))
            more = text.peek() != "}"
            if more:
                text.expect(",")
        text.expect("}")
        if text.peek():
            raise text.fault("nothing was expected after the last brace")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 text ({error.reason})") from error


def _member(text: _Text, name: str) -> Iterator[Row]:
    if text.peek() != "[":
        yield Row(name, None, text.value())
        return
    text.expect("[")
    yield Row(name, None, "[]")
    position = 0
    more = text.peek() != "]"
    while more:
        yield Row(name, position, text.value())
        position += 1
        more = text.peek() != "]"
        if more:
            text.expect(",")
    text.expect("]")


class _Text:
    """A window on the file's text that moves on as values are taken from it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._scan = json.JSONDecoder().raw_decode
        self._window = ""
        self._at = 0
        self._ended = False
        self._lines_before = 0  # the window
        self._columns_before = 0

    def peek(self) -> str:
        """The next character that is no space; "" at the end."""
        while True:
            while self._at < len(self._window) and self._window[self._at] in " \t\r\n":
                self._at += 1
            if self._at < len(self._window):
                return self._window[self._at]
            if not self._more():
                return ""

    def expect(self, character: str) -> None:
        """Take this character."""
        if self.peek() != character:
            raise self.fault(f"{character!r} was expected")
        self._at += 1

    def value(self) -> str:
        """Take the text of the next value."""
        self.peek()
        while True:
            try:
                _, end = self._scan(self._window, self._at)
            except json.JSONDecodeError as error:
                distance = error.pos - self._at
                if not self._wants_more():
                    self._at += distance
                    raise self.fault(error.msg) from error
            except RecursionError as error:
                raise self.fault("nested too deeply") from error
            else:
                text = self._window[self._at : end]
                # A number may go on behind the window, which then ends in "1", "1." or "1e-".
                if self._window[end : end + 1] in _AFTER_VALUE or not self._wants_more():
                    self._at += len(text)
                    return text

    def fault(self, reason: str) -> ValueError:
        """An error at the current place."""
        line, column = self._lines_before + 1, self._columns_before + self._at + 1
        if newlines := self._window.count("\n", 0, self._at):
            line += newlines
            column = self._at - self._window.rfind("\n", 0, self._at)
        return ValueError(f"{reason}: line {line} column {column}")

    def _wants_more(self) -> bool:
        return len(self._window) - self._at < MAX_VALUE and self._more()

    def _more(self) -> bool:
        """Read on; False at the end of the file."""
        if self._ended:
            return False
        passed = self._window[: self._at]
        if newlines := passed.count("\n"):
            self._lines_before += newlines
            self._columns_before = self._at - passed.rfind("\n") - 1
        else:
            self._columns_before += self._at
        block = self._file.read(CHUNK)
        self._ended = not block
        self._window = self._window[self._at :] + self._decoder.decode(block, final=not block)
        self._at = 0
        return not self._ended
