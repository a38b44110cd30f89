"""Shapes of the models people train, by name, and read from a Hugging Face ``config.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flce_tune.kernels.problem import Mode, Problem

DEFAULT_TOKENS = (4096, 16384)


@dataclass(frozen=True, slots=True)
class Preset:
    """The output layer of one model."""

    name: str
    hidden: int  # D
    vocab: int  # V, padded as in the checkpoint
    softcap: float | None = None  # z = softcap·tanh(logits / softcap)
    logit_scale: float | None = None  # the logits are multiplied by this
    tokens: tuple[int, ...] = DEFAULT_TOKENS  # token counts tuned unless others are asked for
    dtype: str = "bfloat16"

    @property
    def features(self) -> tuple[str, ...]:
        """The problem features this model needs."""
        return () if self.softcap is None else ("softcap",)


PRESETS: Mapping[str, Preset] = {
    preset.name: preset
    for preset in (
        Preset("llama3-8b", 4096, 128256),
        Preset("llama3-70b", 8192, 128256),
        Preset("llama2-7b", 4096, 32000),
        Preset("qwen3-0.6b", 1024, 151936),
        Preset("qwen3-8b", 4096, 151936),
        Preset("gemma2-2b", 2304, 256000, softcap=30.0),
        Preset("gemma2-9b", 3584, 256000, softcap=30.0),
        Preset("gemma3-270m", 640, 262144),
        Preset("gemma3-1b", 1152, 262144),
        Preset("gemma3-4b", 2560, 262208),
        Preset("mistral-7b", 4096, 32768),
        Preset("phi-3-mini", 3072, 32064),
        Preset("phi-4", 5120, 100352),
        Preset("gpt-oss-20b", 2880, 201088),
        Preset("gpt-oss-120b", 2880, 201088),
        Preset("deepseek-v3", 7168, 129280),
        Preset("gpt2", 768, 50257),
        Preset("demo", 256, 8192, tokens=(1024,), dtype="float32"),
    )
}


def get_preset(name: str) -> Preset:
    """Look up a preset by name.

    Raises:
        ValueError: nobody has that name; the message lists the names there are.
    """
    try:
        return PRESETS[name]
    except KeyError:
        raise ValueError(
            f"unknown preset {name!r}; known are {', '.join(PRESETS)}. Other models: pass their"
            " config.json, or hidden size and vocabulary."
        ) from None


def problems_for(
    preset: Preset | str,
    tokens: Sequence[int] | None = None,
    dtype: str | None = None,
    mode: Mode = "train",
) -> list[Problem]:
    """List the problems of a preset, one for each token count (the preset's own by default)."""
    if isinstance(preset, str):
        preset = get_preset(preset)
    return [
        Problem(
            tokens=count,
            hidden=preset.hidden,
            vocab=preset.vocab,
            dtype=dtype or preset.dtype,
            mode=mode,
            features=preset.features,
        )
        for count in tokens or preset.tokens
    ]


def from_model_config(path: str | Path) -> Preset:
    """Read the output layer of a model from its Hugging Face ``config.json``.

    ``path`` is the file or the folder that holds it. Multimodal models keep the language model's
    fields under ``text_config`` (some under ``llm_config`` or ``language_config``).

    Raises:
        ValueError: the file cannot be read, is not JSON, or says nothing about the output layer.
    """
    path = Path(path)
    file = path / "config.json" if path.is_dir() else path
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read the model config {file}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise ValueError(f"{file} must hold a JSON object, got {type(data).__name__}")
    fields = _language_model_fields(data)
    scale = _number(file, fields, "logit_scale")
    divisor = _number(file, fields, "logits_scaling")
    if scale is None and divisor is not None:
        scale = 1.0 / divisor
    return Preset(
        name=_name(file, data),
        hidden=_size(file, fields, "hidden_size", "n_embd", "d_model"),
        vocab=_size(file, fields, "vocab_size"),
        softcap=_number(file, fields, "final_logit_softcapping"),
        logit_scale=None if scale == 1.0 else scale,
    )


def _language_model_fields(data: dict[str, Any]) -> dict[str, Any]:
    for key in ("text_config", "llm_config", "language_config"):
        if isinstance(data.get(key), dict):
            return {**data, **data[key]}
    return data


def _name(file: Path, data: Mapping[str, Any]) -> str:
    stored = data.get("_name_or_path")
    if isinstance(stored, str) and stored:
        return Path(stored).name
    return file.resolve().parent.name if file.name == "config.json" else file.stem


def _size(file: Path, fields: Mapping[str, Any], *names: str) -> int:
    for name in names:
        value = fields.get(name)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{file}: {name} must be a positive integer, got {value!r}")
        return value
    raise ValueError(
        f"{file} has no {' or '.join(names)}; it must be the config.json of a language model"
    )


def _number(file: Path, fields: Mapping[str, Any], name: str) -> float | None:
    """Read an optional positive number; absent, null and 0 all mean that it is not used."""
    value = fields.get(name)
    if value is None or value == 0:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise ValueError(f"{file}: {name} must be a positive number, got {value!r}")
    return float(value)
