"""Real text found on any machine that runs Python: its own sources, documents and licences."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SUFFIXES = {".py", ".pyi", ".md", ".rst", ".txt"}
NAMES = {"LICENSE", "LICENCE", "COPYING", "NOTICE", "README", "METADATA"}
LARGEST_FILE = 400_000  # bytes; larger ones are tables and generated code


@dataclass(frozen=True)
class Corpus:
    """The text, and how to recognise it."""

    text: str
    files: int
    sha256: str


def collect(size: int) -> Corpus:
    """Gather ``size`` bytes of text, or all there is if that is less.

    The standard library and the installed packages are taken file by file in the order of the
    hashes of their relative paths, so the selection depends on what is installed and nothing else.
    """
    pieces: list[str] = []
    seen: set[bytes] = set()
    total = 0
    for path in _files():
        if total >= size:
            break
        raw = path.read_bytes()
        fingerprint = hashlib.sha256(raw).digest()
        if fingerprint in seen or len(raw) > LARGEST_FILE:
            continue
        try:
            text = raw.decode()
        except UnicodeDecodeError:
            continue
        seen.add(fingerprint)
        pieces.append(text)
        total += len(raw)
    text = "\n\n".join(pieces)
    return Corpus(text, len(pieces), hashlib.sha256(text.encode()).hexdigest())


def _files() -> Iterator[Path]:
    places = {Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "purelib")}
    found = {
        path.relative_to(place).as_posix(): path
        for place in sorted(places, key=lambda place: len(place.parts))
        for path in place.rglob("*")
        if (path.suffix in SUFFIXES or path.stem.upper() in NAMES) and path.is_file()
    }
    for name in sorted(found, key=lambda name: hashlib.sha256(name.encode()).digest()):
        yield found[name]
