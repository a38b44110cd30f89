"""``flce-tune report``: the page, its PNGs, and what is said when there are none."""

import builtins
import dataclasses
import json
import re
from pathlib import Path

import pytest

from flce_tune.tuning_db.records import Status
from flce_tune.tuning_db.store import Store

TILE = {"n_block": 1, "v_block": 64, "d_block": 32, "num_warps": 4}


@pytest.fixture
def with_tiles(h200_database: Path) -> Path:
    pytest.importorskip("altair")
    pytest.importorskip("vl_convert")
    with Store.open(f"sqlite:///{h200_database}") as store:
        one = store.winners()[0].measurement
        config = {"strategy": "atomic", "logits": TILE}
        store.add_measurement(dataclasses.replace(one, id=None, config=config, median_ms=99.0))
    return h200_database


def specs(page: str) -> dict[str, dict[str, object]]:
    found = re.search(r"^const specs = (.*);$", page, re.MULTILINE)
    assert found
    return json.loads(found[1])


@pytest.mark.usefixtures("with_tiles")
def test_the_page_needs_no_network_and_has_every_chart(run, tmp_path: Path):
    out, folder = tmp_path / "new" / "report.html", tmp_path / "png"
    result = run("report", "--out", out, "--png", folder)
    assert result.exit_code == 0, result.stderr
    page = out.read_text()
    outside_scripts = re.sub(r"(<script)>.*?</script>", r"\1>", page, flags=re.DOTALL)
    assert outside_scripts.count("<script") == 2
    assert not re.search(r"\b(src|href)=|url\(|@import", outside_scripts)
    charts = specs(page)
    assert [key.split("-")[-1] for key in charts] == ["front", "speedup", "tiles", "failures"]
    assert all(f'id="{key}"' in page for key in charts)
    drawn = json.dumps(charts)
    assert Status.OUT_OF_MEMORY.value in drawn
    assert "2.00×" in page
    (png,) = folder.iterdir()
    assert png.read_bytes().startswith(b"\x89PNG")
    assert png.name == "cuda-nvidia-h200-9.0-132-232448-16384x4096x128256-train.png"


def test_markup_in_stored_text_stays_text(run, with_tiles: Path, tmp_path: Path):
    with Store.open(f"sqlite:///{with_tiles}") as store:
        one = store.winners()[0].measurement
        device = dataclasses.replace(one.device, name="</script><script>alert(1)</script>")
        config = {"strategy": "</script><b>"}
        store.add_measurement(dataclasses.replace(one, id=None, device=device, config=config))
    out = tmp_path / "report.html"
    assert run("report", "--out", out).exit_code == 0
    page = out.read_text()
    assert "<script>alert" not in page
    assert "</script><b>" not in page
    assert "</script><b>" in json.dumps(specs(page))


def test_without_measurements_there_is_nothing_to_draw(run, database: Path, tmp_path: Path):
    pytest.importorskip("altair")
    out = tmp_path / "report.html"
    assert run("report", "--out", out).exit_code == 4
    Store.open(f"sqlite:///{database}").close()
    assert run("report", "--out", out).exit_code == 4
    assert not out.exists()


@pytest.mark.usefixtures("with_tiles")
def test_a_file_that_cannot_be_written_is_named(run, tmp_path: Path):
    result = run("report", "--out", tmp_path)
    assert result.exit_code == 1
    assert str(tmp_path) in result.stderr


@pytest.mark.usefixtures("h200_database")
def test_without_altair_the_error_says_what_to_install(run, monkeypatch, tmp_path: Path):
    importing = builtins.__import__

    def without(name: str, *args: object, **kwargs: object) -> object:
        if name.partition(".")[0] == "altair":
            raise ModuleNotFoundError("No module named 'altair'")
        return importing(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    result = run("report", "--out", tmp_path / "report.html")
    assert result.exit_code == 1
    assert "flce-tune[service]" in result.stderr
