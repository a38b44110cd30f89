"""Each benchmark script runs on a CPU in miniature, and its measurements mean what they say."""

import importlib.util
import json
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

SCRIPTS = Path(__file__).parent.parent / "benchmarks"
GIB = 2**30
CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("_quick_collections")


@pytest.fixture(autouse=True)
def _scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))


def rows_by_family(result):
    return {row["family"]: row for row in result["implementations"]}


def small_case(data="peaked", dtype=torch.bfloat16):
    from cases import Shape, make_inputs

    return make_inputs(Shape(96, 32, 200), data, dtype, CPU)


# cases


@pytest.mark.parametrize("data", ["flat", "peaked"])
def test_truth_and_dense_gradient_are_autograds(data):
    from cases import dense_logit_gradient, fp32_truth

    inputs = small_case(data, torch.float32)
    logits = F.linear(inputs.x, inputs.weight)
    loss = F.cross_entropy(logits, inputs.target)
    dx, dw, g = torch.autograd.grad(loss, (inputs.x, inputs.weight, logits))
    truth = fp32_truth(inputs, row_chunk=40)
    torch.testing.assert_close(truth.loss, loss.detach())
    torch.testing.assert_close(truth.dx, dx)
    torch.testing.assert_close(truth.dw, dw)
    torch.testing.assert_close(dense_logit_gradient(inputs, row_chunk=40), g)


def test_peaked_data_is_like_a_trained_models():
    from cases import Shape, fp32_truth, make_inputs

    shape = Shape(512, 512, 8192)
    peaked = fp32_truth(make_inputs(shape, "peaked", torch.float32, CPU)).loss
    flat = fp32_truth(make_inputs(shape, "flat", torch.float32, CPU)).loss
    assert 1.0 < peaked < 3.0
    assert flat > torch.log(torch.tensor(8192.0))


def test_relative_errors_see_a_scaled_gradient():
    from cases import Result, fp32_truth, relative_errors

    truth = fp32_truth(small_case())
    errors = relative_errors(Result(truth.loss, truth.dx, 1.01 * truth.dw), truth)
    assert errors["loss"] == errors["dx"] == 0.0
    assert errors["dw"] == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("text", ["1,2", "1,2,x", "0,1,1", "1;2;3"])
def test_shape_says_what_it_accepts(text):
    from cases import Shape

    with pytest.raises(ValueError, match="three positive integers N,D,V"):
        Shape.parse(text)


@pytest.mark.parametrize(
    ("text", "bytes_"), [("64MiB", 64 << 20), ("1.5GiB", 3 << 29), ("none", None)]
)
def test_sizes(text, bytes_):
    from implementations import parse_size

    assert parse_size(text) == bytes_


# measure


def test_at_most_interrupts_and_leaves_an_outer_alarm_running():
    from measure import OutOfTime, at_most

    def too_long():
        with at_most(0.3):
            with at_most(5):
                pass
            time.sleep(10)

    begin = time.monotonic()
    with pytest.raises(OutOfTime, match="gave up"):
        too_long()
    assert time.monotonic() - begin < 9


def test_at_most_refuses_to_start_late():
    from measure import OutOfTime, at_most

    with pytest.raises(OutOfTime, match="no time left"), at_most(0):
        raise AssertionError("the block must not run")


# compare


def run_comparison(implementations, **options):
    from cases import Shape
    from comparison import Comparison, Contestant
    from measure import Deadline

    contestants = [Contestant(implementation) for implementation in implementations]
    settings = {"rounds": 2, "prepare_seconds": 30.0, "budget": 60.0, **options}
    budget = settings.pop("budget")
    comparison = Comparison(device=CPU, dtype=torch.bfloat16, log=lambda line: None, **settings)
    shape = Shape(64, 32, 256)
    return comparison.run(shape, "peaked", contestants, Deadline(budget))


@pytest.mark.filterwarnings(  # an alarm that strikes inside a gc callback is lost, and rings again
    "ignore::pytest.PytestUnraisableExceptionWarning"
)
def test_a_failing_contestant_costs_itself_alone():
    from implementations import Implementation, plain_loss

    def absent():
        raise ImportError("no module named nobody")

    def broken(x, weight, target):
        raise RuntimeError("boom")

    def hanging(x, weight, target):
        time.sleep(30)

    def wrong(x, weight, target):
        return plain_loss(2 * x, weight, target)

    result = run_comparison(
        [
            Implementation("absent", "absent", "6NDV", absent),
            Implementation("broken", "broken", "6NDV", lambda: broken),
            Implementation("hanging", "hanging", "6NDV", lambda: hanging),
            Implementation("wrong", "wrong", "6NDV", lambda: wrong),
            Implementation("plain", "plain", "6NDV", lambda: plain_loss),
        ],
        prepare_seconds=3.0,
    )
    rows = rows_by_family(result)
    assert [rows[name]["status"] for name in ("absent", "broken", "hanging")] == [
        "absent",
        "error",
        "out of time",
    ]
    assert "boom" in rows["broken"]["reason"]
    assert "samples_ms" not in rows["broken"]
    assert len(rows["plain"]["samples_ms"]) == 2
    assert rows["plain"]["errors"]["dw"] < 0.02 < rows["wrong"]["errors"]["dw"]


def test_no_time_left_still_gives_a_result():
    from implementations import Implementation, plain_loss

    result = run_comparison(
        [Implementation("plain", "plain", "6NDV", lambda: plain_loss)], budget=0.0
    )
    assert result["rounds"] == 0
    assert rows_by_family(result)["plain"]["status"] == "out of time"


def test_compare_writes_ours_beside_plain_pytorch(tmp_path, capsys, monkeypatch):
    import compare

    monkeypatch.setitem(sys.modules, "quack", None)
    configs = tmp_path / "configs.json"
    configs.write_text(json.dumps([{"strategy": "chunked", "chunk": 16}]))
    out = tmp_path / "deep" / "comparison.json"
    arguments = ["--shape", "64,32,256", "--rounds", "2", "--device", "cpu", "--out", str(out)]
    arguments += ["--implementations", "eager,quack,ours,ours_weight_dtype,ours_configs"]
    assert compare.main([*arguments, "--configs", str(configs)]) == 0
    document = json.loads(out.read_text())
    assert document["schema"] == compare.SCHEMA
    assert document["environment"]["versions"]["torch"] == torch.__version__
    assert [result["data"] for result in document["results"]] == ["flat", "peaked"]
    for result in document["results"]:
        rows = rows_by_family(result)
        assert rows["quack"]["status"] == "absent"
        assert rows["ours_configs"]["config"] == {"strategy": "chunked", "chunk": 16}
        for family in ("ours", "ours_configs"):
            assert rows[family]["errors"]["dw"] <= rows["eager"]["errors"]["dw"]
            assert len(rows[family]["samples_ms"]) == result["rounds"] == 2
            assert rows[family]["times_floor"] == pytest.approx(
                rows[family]["median_ms"] / result["floor_ms"]
            )
    assert "64×32×256 bfloat16 peaked" in capsys.readouterr().out


def test_compare_names_unknown_implementations(capsys):
    import compare

    with pytest.raises(SystemExit):
        compare.main(["--implementations", "eager,nobody"])
    assert "['nobody']" in capsys.readouterr().err


# article_table


def test_article_table_has_a_row_for_each_and_says_why_one_is_empty(tmp_path):
    import article_table

    out = tmp_path / "article.json"
    arguments = ["--shape", "64,32,256", "--device", "cpu", "--out", str(out)]
    assert article_table.main(arguments) == 0
    plain, atomic, *ours = json.loads(out.read_text())["rows"]
    assert plain["median_ms"] > 0
    assert "atomic needs a CUDA device" in atomic["reason"]
    assert ours
    assert all(row["median_ms"] > 0 and row["config"] for row in ours)
    assert out.with_suffix(".md").read_text().count("\n| ") == 3 + len(ours)


# plot


def plotted_row(name, family, times, gib, dw=2.7e-3, **details):
    return {
        "name": name,
        "family": family,
        "times_floor": times,
        "extra_bytes": int(gib * GIB),
        "errors": {"dw": dw},
        **details,
    }


def ours_row(times, gib, chunk):
    config = {"strategy": "chunked", "chunk": chunk}
    return plotted_row("ours", "ours", times, gib, config=config, accumulate="fp32")


def test_pareto_keeps_what_nothing_beats():
    from plot import pareto

    rows = [
        ours_row(1.3, 1.2, 1),
        ours_row(1.4, 1.5, 2),
        ours_row(1.1, 2.0, 3),
        ours_row(1.1, 3.0, 4),
    ]
    assert [row["config"]["chunk"] for row in pareto(rows[::-1])] == [1, 3]


def test_plot_draws_a_figure_per_result(tmp_path):
    import plot

    result = {"tokens": 64, "hidden": 32, "vocab": 256, "dtype": "bfloat16", "floor_ms": 1.0}
    rows = [
        plotted_row("PyTorch", "eager", 1.1, 11.8),
        plotted_row("CCE", "cce", 3.5, 1.1, dw=1e-2),
        ours_row(1.3, 1.3, 1024),
        ours_row(0.98, 3.0, 4096),
        {"name": "quack", "family": "quack", "status": "absent"},
    ]
    environment = {"device": {"name": "GPU"}, "versions": {"torch": "2"}, "date": "2026-01-01T"}
    results = [
        {**result, "data": "peaked", "implementations": rows},
        {**result, "data": "flat", "implementations": rows[-1:]},
    ]
    source = tmp_path / "comparison.json"
    source.write_text(json.dumps({"environment": environment, "results": results}))
    assert plot.main([str(source), "--out-dir", str(tmp_path)]) == 0
    assert (tmp_path / "64x32x256-peaked.svg").read_text().startswith("<?xml")
    assert (tmp_path / "64x32x256-peaked.png").stat().st_size > 10_000
    assert not (tmp_path / "64x32x256-flat.svg").exists()


# train_lm


def test_training_with_the_op_follows_plain_pytorch(tmp_path):
    import plot_training
    import train_lm

    out = tmp_path / "train.json"
    sizes = ["--steps", "8", "--batch", "4", "--context", "32", "--hidden", "64", "--layers", "1"]
    text = ["--vocab", "256", "--tokenizer", "bytes", "--corpus-bytes", "60000"]
    assert train_lm.main([*sizes, *text, "--device", "cpu", "--out", str(out)]) == 0
    document = json.loads(out.read_text())
    gaps = {tuple(row["heads"]): row for row in document["differences"]}
    for head, run in document["runs"].items():
        assert run["losses"][-1] < run["losses"][0], head
    # the op rounds no more than plain PyTorch does
    ours, plain = gaps["flce_tune", "plain_fp32"], gaps["plain", "plain_fp32"]
    assert ours["mean"] <= 1.1 * plain["mean"]
    assert document["choice"]["config"]["strategy"]
    assert plot_training.main([str(out), "--out", str(tmp_path / "curves")]) == 0
    assert (tmp_path / "curves.png").stat().st_size > 10_000


def test_train_lm_says_what_is_missing_without_tokenizers(monkeypatch):
    import train_lm
    from corpus import Corpus

    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(SystemExit, match="pip install tokenizers"):
        train_lm.encode(Corpus("some text", 1, ""), 32768, "bpe", 100)


def test_the_corpus_is_the_same_each_time_and_as_long_as_asked():
    from corpus import collect

    first = collect(50_000)
    assert first == collect(50_000)
    assert len(first.text.encode()) >= 50_000
    assert collect(200_000).text.startswith(first.text)


# train_step


def test_train_step_compares_heads_on_one_model(tmp_path, capsys, monkeypatch):
    import train_step

    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    out = tmp_path / "deep" / "train_step.json"
    sizes = ["--vocab", "300", "--hidden", "32", "--layers", "1", "--feed-forward", "64"]
    sizes += ["--query-heads", "4", "--key-value-heads", "2", "--sequences", "2", "--length", "16"]
    arguments = [*sizes, "--rounds", "2", "--device", "cpu", "--out", str(out)]
    assert train_step.main([*arguments, "--heads", "eager_fp32,liger,ours"]) == 0
    document = json.loads(out.read_text())
    rows = {row["family"]: row for row in document["heads"]}
    assert "liger_kernel" in rows["liger"]["reason"]
    assert rows["ours"]["first_loss"] == pytest.approx(rows["eager_fp32"]["first_loss"], rel=1e-4)
    assert len(rows["ours"]["samples_ms"]) == document["rounds"] == 2
    tokens_per_ms = document["batch"]["tokens"] / rows["ours"]["median_ms"]
    assert rows["ours"]["tokens_per_second"] == pytest.approx(1e3 * tokens_per_ms)
    assert capsys.readouterr().out == out.with_suffix(".md").read_text()


def test_the_decoder_looks_back_only_and_recomputes_to_the_same():
    from train_step_model import Decoder, Size

    size = Size(50, 32, 2, 64, 4, 2)
    torch.manual_seed(0)
    model = Decoder(size, recompute_blocks=False)
    tokens = torch.randint(0, 50, (2, 12))
    hidden = model(tokens)
    changed = tokens.clone()
    changed[:, 8] = (changed[:, 8] + 1) % 50
    differs = (model(changed) != hidden).any(dim=-1).any(dim=0)
    assert not differs[:8].any()
    assert differs[8:].all()
    gradient = torch.autograd.grad(hidden.square().mean(), model.tokens.weight)[0]
    model.recompute_blocks = True
    again = torch.autograd.grad(model(tokens).square().mean(), model.tokens.weight)[0]
    torch.testing.assert_close(again, gradient)


# exactness


def load_exactness():
    """By path: the tests have a module of that name too."""
    spec = importlib.util.spec_from_file_location("bench_exactness", SCRIPTS / "exactness.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_exactness_sees_what_accumulators_do_and_says_what_is_missing(tmp_path, monkeypatch):
    exactness = load_exactness()
    monkeypatch.setattr(exactness, "DIVISORS", exactness.DIVISORS[:2])
    out = tmp_path / "deep" / "exactness.json"
    arguments = ["--shapes", "256,16,200", "--device", "cpu", "--out", str(out)]
    assert exactness.main([*arguments, "--dtypes", "bfloat16"]) == 0
    document = json.loads(out.read_text())
    assert document["schema"] == exactness.SCHEMA
    by_case = {(r["kind"], r["data"]): r["rows"] for r in document["results"]}
    for data in ("flat", "peaked"):
        _, plain, *ours = by_case["strategies", data]  # its logits widened: the stricter one
        assert {row["name"] for row in ours} == {"chunked", "full", "recompute"}
        for row in ours:
            for output in ("token_loss", "dx", "dw", "db"):
                assert 0 < row["errors"][output] <= 1.25 * plain["errors"][output], (row, output)
    many = {
        row["accumulate"]: row["errors"]["dw"]
        for row in by_case["chunks", "flat"]
        if row.get("chunks") == 256
    }
    assert many["weight_dtype"] > 2 * many["fp32"]
    scaled = {
        name: [row["errors"] for row in by_case["upstream", "flat"] if row["name"] == name]
        for name in ("chunked, loss", "chunked, loss / 4")
    }
    assert len(scaled["chunked, loss"]) == len(exactness.DIVISORS)
    for whole, quarter in zip(*scaled.values(), strict=True):  # a power of two rounds nothing
        assert whole == pytest.approx(quarter)
    text = out.with_suffix(".md").read_text()
    assert "Measured on a CPU" in text
    assert f"| flat | bfloat16 | 200 | 256 | fp32 | {plain_dw(by_case):.2e} |" in text
    assert not any(kind == "tiles" for kind, _ in by_case)
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- exactness cpu -->\n\nold\n\n<!-- end -->\nafter\n")
    for _ in range(2):
        importlib.import_module("exactness_table").main([str(page), str(out), "--place", "cpu"])
    text = page.read_text()
    assert text.startswith("before\n<!-- exactness cpu -->\n\n")
    assert text.endswith("|\n\n<!-- end -->\nafter\n")
    assert "old" not in text
    assert text.count("| bfloat16 | 200 | ") == 1
    assert exactness.main([*arguments, "--time-budget", "0"]) == 0
    assert "- strategies, 6 cases: no time left" in out.with_suffix(".md").read_text()


def plain_dw(by_case):
    return by_case["chunks", "flat"][0]["errors"]["dw"]


def test_trained_says_what_a_tolerance_keeps_and_changes(tmp_path, capsys):
    import trained

    out = tmp_path / "trained.json"
    arguments = ["--untrained", "96,32,600", "--rounds", "1", "--tolerances", "1e-30,0.5"]
    assert trained.main([*arguments, "--compute", "float32", "--out", str(out)]) == 0
    rows = json.loads(out.read_text())["implementations"]
    everything, nothing = (row for row in rows if "kept" in row)
    assert (everything["kept"], nothing["kept"]) == (1.0, 0.0)
    assert everything["errors"]["dw"] < 1e-6 < 1e-2 < nothing["errors"]["dw"]
    assert everything["rare_norm"] == pytest.approx(1.0, abs=1e-5)
    assert everything["rare_cosine"] == pytest.approx(1.0, abs=1e-5)
    assert "| 1.000 |" in capsys.readouterr().out


def test_step_kernels_times_each_config_beside_the_floor(tmp_path, capsys):
    import step_kernels

    configs, out = tmp_path / "configs.json", tmp_path / "step_kernels.json"
    configs.write_text(json.dumps([{"strategy": "full"}, {"strategy": "chunked", "chunk": 16}]))
    arguments = ["--shape", "64,32,256", "--device", "cpu", "--steps", "2", "--out", str(out)]
    assert step_kernels.main([*arguments, "--configs", str(configs)]) == 0
    document = json.loads(out.read_text())
    assert document["schema"] == step_kernels.SCHEMA
    products = {}
    for result in document["results"]:
        times = [row["ms"] for row in result["kernels"]]
        assert times == sorted(times, reverse=True)
        assert times[-1] > 0
        products[result["config"]["strategy"]] = sum(
            row["launches"]
            for row in result["kernels"]
            if row["kernel"].removeprefix("aten::") in ("mm", "addmm", "addmm_")
        )
    assert products["full"] == 6, "three of the loss and three of the floor"
    assert products["chunked"] > 6
    assert "full\n" in capsys.readouterr().out
