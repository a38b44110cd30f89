"""What can happen to a SQLite tuning database."""

import contextlib
import random
import sqlite3
from pathlib import Path

PAGE = 4096


def zero_bytes(path: Path) -> None:
    path.write_bytes(b"")


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:100])


def cut_in_half(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def flipped_pages(path: Path) -> None:
    """Every page but the first, which says that it is a database, has turned to noise."""
    content = path.read_bytes()
    path.write_bytes(content[:PAGE] + random.Random(0).randbytes(len(content) - PAGE))


def text_file(path: Path) -> None:
    path.write_text("this is no database\n" * 100)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def lost_tables(path: Path) -> None:
    _execute(path, "DROP TABLE winner")


def older_version(path: Path) -> None:
    _execute(path, "UPDATE flce_tune_revision SET version_num = '0001'")


def newer_version(path: Path) -> None:
    _execute(path, "UPDATE flce_tune_revision SET version_num = '9999'")


def _execute(path: Path, statement: str) -> None:
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(statement)
