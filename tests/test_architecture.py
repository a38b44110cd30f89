"""The arrows between the parts, read from the source.

``cli, service → sweep, dispatch → kernels, tuning_db``; only ``settings`` reads the environment.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

FREE = {"errors", "settings", "version"}
"""Modules of the package that any part may use."""

MAY_IMPORT = {
    "kernels": {"errors"},
    "tuning_db": {"errors"},
    "pretuned": {"errors", "tuning_db"},
    "dispatch": FREE | {"kernels", "tuning_db", "pretuned"},
    "sweep": FREE | {"kernels", "tuning_db", "dispatch"},
    "integrations": FREE | {"api", "kernels"},
    "service": FREE | {"sweep", "dispatch", "kernels", "tuning_db"},
    "client": FREE | {"service", "tuning_db"},
    "worker": FREE | {"client", "service", "dispatch", "kernels", "tuning_db"},
    "cli": FREE
    | {
        "client",
        "worker",
        "api",
        "pretuned",
        "sweep",
        "dispatch",
        "kernels",
        "tuning_db",
        "service",
    },
    "api": FREE | {"kernels", "dispatch"},
}
"""What each part may import from the package, besides itself."""

FORBIDDEN_LIBRARIES = {
    "kernels": {"sqlalchemy", "alembic", "sqlite3", "pydantic", "fastapi"},
    "tuning_db": {"torch", "triton"},
    "dispatch": {"sqlalchemy", "fastapi", "triton"},
    "sweep": {"sqlalchemy", "fastapi", "typer"},
    "cli": {"sqlalchemy"},
    "service": {"typer"},
    "client": {"fastapi", "starlette", "sqlalchemy", "typer"},
    "worker": {"fastapi", "starlette", "sqlalchemy", "typer"},
}


def sources() -> Iterator[tuple[str, Path]]:
    """Each module of the package with its dotted name below ``flce_tune``."""
    for folder, prefix in (("flce_tune", ""), ("kernels", "kernels."), ("tuning_db", "tuning_db.")):
        for path in sorted((ROOT / folder).rglob("*.py")):
            inside = path.relative_to(ROOT / folder)
            if inside.parts[0] in ("kernels", "tuning_db"):  # the symlinks
                continue
            yield prefix + ".".join(inside.with_suffix("").parts), path


def imported_modules(name: str, tree: ast.AST) -> Iterator[str]:
    """Absolute names of what a module imports, at any depth."""
    package = ["flce_tune", *name.split(".")[:-1]]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def violations(name: str, source: str) -> list[str]:
    """Imports of one module that go against the arrows."""
    part = name.split(".")[0]
    tree = ast.parse(source)
    found = []
    for module in imported_modules(name, tree):
        head, _, rest = module.partition(".")
        if head in FORBIDDEN_LIBRARIES.get(part, ()):
            found.append(f"{name} imports {head}")
        target = rest.split(".")[0]
        if head == "flce_tune" and part in MAY_IMPORT and target and target != part:
            is_part = (ROOT / "flce_tune" / target).exists()
            is_module = (ROOT / "flce_tune" / f"{target}.py").exists()
            if (is_part or is_module) and target not in MAY_IMPORT[part]:
                found.append(f"{name} imports flce_tune.{target}")
        if head in ("kernels", "tuning_db"):
            found.append(f"{name} imports {head} without flce_tune.")
    return found


def environment_reads(source: str) -> list[int]:
    """Lines that touch the environment."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        is_attribute = isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")
        is_name = isinstance(node, ast.ImportFrom) and node.module == "os"
        if is_attribute or (
            is_name and any(alias.name in ("environ", "getenv") for alias in node.names)
        ):
            lines.append(node.lineno)
    return lines


MODULES = list(sources())


@pytest.mark.parametrize(("name", "path"), MODULES, ids=[name for name, _ in MODULES])
def test_imports_follow_the_arrows(name: str, path: Path):
    assert violations(name, path.read_text()) == []


def test_only_settings_reads_the_environment():
    readers = [name for name, path in MODULES if environment_reads(path.read_text())]
    assert set(readers) <= {"settings"}


def test_every_part_has_a_rule():
    parts = {path.parent.name for path in (ROOT / "flce_tune").glob("*/__init__.py")}
    assert parts == set(MAY_IMPORT) - {"api"}


@pytest.mark.parametrize(
    ("name", "source", "fault"),
    [
        ("kernels.op", "import sqlalchemy.orm", "kernels.op imports sqlalchemy"),
        ("kernels.op", "from flce_tune import dispatch", "kernels.op imports flce_tune.dispatch"),
        ("kernels.a.b", "from ... import tuning_db", "kernels.a.b imports flce_tune.tuning_db"),
        ("tuning_db.store", "def f():\n  import torch", "tuning_db.store imports torch"),
        ("dispatch.x", "from flce_tune.sweep import y", "dispatch.x imports flce_tune.sweep"),
        ("sweep.x", "import kernels", "sweep.x imports kernels without flce_tune."),
    ],
)
def test_the_rule_sees_a_violation(name: str, source: str, fault: str):
    assert fault in violations(name, source)


def test_the_rule_sees_an_environment_read():
    assert environment_reads("import os\nx = os.environ['A']") == [2]
    assert environment_reads("from os import getenv") == [1]


def test_the_symlinks_point_at_the_folders():
    for name in ("kernels", "tuning_db"):
        link = ROOT / "flce_tune" / name
        assert link.resolve() == ROOT / name


TURNS_DATA_INTO_CODE = {"eval", "exec", "compile", "__import__", "system", "popen", "execfile"}
UNSAFE_LIBRARIES = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "yaml"}


@pytest.mark.parametrize("part", ["service", "client", "worker", "tuning_db"])
def test_no_pickle_eval_or_shell_where_input_comes_from_others(part: str):
    """Also not by mistake: what others send reaches none of these, because there are none."""
    found = []
    for name, path in sources():
        if name.split(".")[0] != part:
            continue
        tree = ast.parse(path.read_text())
        libraries = {module.split(".")[0] for module in imported_modules(name, tree)}
        found += [f"{name} imports {library}" for library in libraries & UNSAFE_LIBRARIES]
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            callee = getattr(call.func, "id", None)  # re.compile and the like are attributes
            if isinstance(call.func, ast.Attribute) and getattr(call.func.value, "id", "") == "os":
                callee = call.func.attr
            shell = any(keyword.arg == "shell" for keyword in call.keywords)
            if callee in TURNS_DATA_INTO_CODE or shell:
                found.append(f"{name}:{call.lineno} calls {ast.unparse(call.func)}")
    assert found == []


def test_the_image_installs_what_is_pinned():
    dockerfile = (ROOT / "Dockerfile").read_text()
    assert "--constraint /constraints.txt" in dockerfile
    pinned = {
        re.split(r"==", line)[0].strip().lower().replace("_", "-")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line and not line.startswith("#")
    }
    needed = {"fastapi", "starlette", "uvicorn", "pydantic", "jinja2", "sqlalchemy", "alembic"}
    needed |= {"psycopg", "httpx", "altair", "vl-convert-python", "sse-starlette", "typer"}
    assert needed <= pinned
