"""What is built and shipped, and what importing it costs."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from setuptools import find_packages

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]

HEAVY = ("torch", "triton", "fastapi", "uvicorn", "altair", "optuna", "sqlalchemy", "alembic")


def declared_packages() -> list[str]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]


def test_every_package_is_declared():
    # An undeclared one works in an editable install and is absent from the wheel.
    found = {"flce_tune"}
    found |= {f"flce_tune.{name}" for name in find_packages(str(ROOT / "flce_tune"))}
    for folder in ("kernels", "tuning_db"):
        found |= {f"flce_tune.{folder}"}
        found |= {f"flce_tune.{folder}.{name}" for name in find_packages(str(ROOT / folder))}
    assert sorted(found) == sorted(declared_packages())


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Names of the files in a freshly built wheel, built from a copy of the tracked files."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    tracked = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\0")
    for name in filter(None, tracked):
        path = ROOT / name
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.is_symlink():
            target.symlink_to(path.readlink())
        elif path.is_file():
            target.write_bytes(path.read_bytes())
    offline = ("--no-deps", "--no-build-isolation", "--no-index")
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", *offline, "--wheel-dir", folder, source],
        cwd=folder,
        check=True,
    )
    (wheel,) = folder.glob("flce_tune-*.whl")
    return zipfile.ZipFile(wheel).namelist()


def test_the_wheel_holds_every_module_once(wheel_names: list[str]):
    shipped = {name for name in wheel_names if name.endswith(".py")}
    expected = set()
    for package in declared_packages():
        inside = package.split(".")[1:]
        top = ROOT if inside and inside[0] in ("kernels", "tuning_db") else ROOT / "flce_tune"
        expected |= {
            f"{package.replace('.', '/')}/{path.name}"
            for path in top.joinpath(*inside).glob("*.py")
        }
    assert shipped == expected
    assert len(wheel_names) == len(set(wheel_names))


def test_the_wheel_holds_the_data_files(wheel_names: list[str]):
    patterns = (
        "flce_tune/py.typed",
        "flce_tune/pretuned/*.json",
        "flce_tune/service/templates/*.html",
        "flce_tune/service/static/**/*",
        "flce_tune/tuning_db/migrations/*.mako",
    )
    data = {
        path.relative_to(ROOT).as_posix()
        for pattern in patterns
        for path in ROOT.glob(pattern)
        if path.is_file()
    }
    assert "flce_tune/py.typed" in data
    assert data <= set(wheel_names)


def test_importing_the_package_stays_light():
    code = f"import sys, flce_tune\nprint([name for name in {HEAVY!r} if name in sys.modules])\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", ["kernels", "tuning_db"])
def test_a_folder_refuses_to_be_a_top_level_package(name: str):
    done = subprocess.run(
        [sys.executable, "-c", f"import {name}"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode != 0
    assert f"ImportError: import flce_tune.{name}, not {name}" in done.stderr


def test_the_python_we_run_on_cannot_import_the_folders_by_accident():
    done = subprocess.run(
        [sys.executable, "-c", "import kernels"], cwd=ROOT.parent, capture_output=True, text=True
    )
    assert "No module named 'kernels'" in done.stderr
