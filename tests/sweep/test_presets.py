import json

import pytest

from flce_tune.sweep.presets import PRESETS, from_model_config, get_preset, problems_for


@pytest.mark.parametrize(
    ("name", "hidden", "vocab", "softcap"),
    [
        ("llama3-8b", 4096, 128256, None),
        ("llama3-70b", 8192, 128256, None),
        ("llama2-7b", 4096, 32000, None),
        ("qwen3-0.6b", 1024, 151936, None),
        ("gemma2-2b", 2304, 256000, 30.0),
        ("gemma2-9b", 3584, 256000, 30.0),
        ("gemma3-1b", 1152, 262144, None),
        ("gemma3-4b", 2560, 262208, None),
        ("gpt-oss-20b", 2880, 201088, None),
        ("deepseek-v3", 7168, 129280, None),
    ],
)
def test_presets_have_the_published_shapes(name, hidden, vocab, softcap):
    preset = get_preset(name)
    assert (preset.hidden, preset.vocab, preset.softcap) == (hidden, vocab, softcap)


def test_an_unknown_preset_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"unknown preset 'llama9'.*llama3-8b.*gpt2"):
        get_preset("llama9")


def test_every_preset_makes_problems_with_its_features():
    for name, preset in PRESETS.items():
        problems = problems_for(name)
        assert [p.tokens for p in problems] == list(preset.tokens)
        assert {p.features for p in problems} == {("softcap",) if preset.softcap else ()}


def test_problems_follow_what_is_asked_for():
    (problem,) = problems_for("llama3-8b", [777], "float16", "train_frozen_weight")
    assert (problem.tokens, problem.dtype, problem.mode) == (777, "float16", "train_frozen_weight")


def write(tmp_path, data):
    file = tmp_path / "config.json"
    file.write_text(data if isinstance(data, str) else json.dumps(data))
    return file


def test_a_model_config_gives_its_output_layer(tmp_path):
    write(tmp_path, {"hidden_size": 2304, "vocab_size": 256000, "final_logit_softcapping": 30.0})
    preset = from_model_config(tmp_path)
    assert (preset.hidden, preset.vocab, preset.softcap) == (2304, 256000, 30.0)
    assert preset.name == tmp_path.name


def test_the_text_model_of_a_multimodal_config_counts(tmp_path):
    config = {
        "vocab_size": 262208,
        "vision_config": {"hidden_size": 1152},
        "text_config": {"hidden_size": 2560, "final_logit_softcapping": None},
    }
    preset = from_model_config(write(tmp_path, config))
    assert (preset.hidden, preset.vocab, preset.softcap) == (2560, 262208, None)


def test_gpt2_calls_its_hidden_size_n_embd(tmp_path):
    assert from_model_config(write(tmp_path, {"n_embd": 768, "vocab_size": 50257})).hidden == 768


@pytest.mark.parametrize(
    ("fields", "scale"),
    [
        ({"logit_scale": 0.0625}, 0.0625),  # Cohere multiplies
        ({"logits_scaling": 8.0}, 0.125),  # Granite divides
        ({"logits_scaling": 1.0}, None),
    ],
)
def test_logit_scales(tmp_path, fields, scale):
    file = write(tmp_path, {"hidden_size": 64, "vocab_size": 100, **fields})
    assert from_model_config(file).logit_scale == scale


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        ("{", "not valid JSON"),
        ([1], "must hold a JSON object, got list"),
        ({"vocab_size": 100}, "no hidden_size or n_embd or d_model"),
        ({"hidden_size": 64}, "no vocab_size"),
        ({"hidden_size": "64", "vocab_size": 100}, "hidden_size must be a positive integer"),
        ({"hidden_size": 64, "vocab_size": True}, "vocab_size must be a positive integer"),
        (
            {"hidden_size": 64, "vocab_size": 100, "final_logit_softcapping": -1},
            "final_logit_softcapping must be a positive number",
        ),
    ],
)
def test_a_bad_model_config_is_named_and_explained(tmp_path, data, complaint):
    file = write(tmp_path, data)
    with pytest.raises(ValueError, match=complaint) as raised:
        from_model_config(file)
    assert str(file) in str(raised.value)


def test_a_missing_model_config_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"cannot read the model config .*nowhere"):
        from_model_config(tmp_path / "nowhere.json")
