"""The options that several commands share. Importing this imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from flce_tune.cli.units import parse_bytes

ModeName = Literal["train", "train_frozen_weight", "eval"]
AccumulateName = Literal["fp32", "weight_dtype"]
DtypeName = Literal["bfloat16", "float16", "float32", "float64"]
StatusName = Literal[
    "ok",
    "compile_error",
    "out_of_resources",
    "wrong_result",
    "timeout",
    "crash",
    "out_of_memory",
    "error",
]

_PROBLEM = "Problem"

PresetOption = Annotated[
    str | None,
    typer.Option(
        "--preset",
        metavar="NAME",
        help="A model by name; see flce-tune presets.",
        rich_help_panel=_PROBLEM,
    ),
]
FromModelOption = Annotated[
    Path | None,
    typer.Option(
        "--from-model",
        metavar="FILE",
        help="A Hugging Face config.json on disk, or the folder that holds it.",
        rich_help_panel=_PROBLEM,
    ),
]
TokensOption = Annotated[
    list[str] | None,
    typer.Option(
        "--tokens",
        metavar="N",
        help="Tokens per step; several: repeat, or separate with commas.",
        rich_help_panel=_PROBLEM,
    ),
]
HiddenOption = Annotated[
    int | None,
    typer.Option("--hidden", metavar="D", min=1, help="Hidden size.", rich_help_panel=_PROBLEM),
]
VocabOption = Annotated[
    int | None,
    typer.Option("--vocab", metavar="V", min=1, help="Vocabulary size.", rich_help_panel=_PROBLEM),
]
DtypeOption = Annotated[
    DtypeName | None,
    typer.Option(
        "--dtype",
        metavar="NAME",
        help="bfloat16, float16, float32 or float64, of x and weight. Default: the preset's.",
        rich_help_panel=_PROBLEM,
    ),
]
ModeOption = Annotated[
    ModeName,
    typer.Option(
        "--mode",
        metavar="NAME",
        help="Gradients wanted: train, train_frozen_weight or eval.",
        rich_help_panel=_PROBLEM,
    ),
]
AccumulateOption = Annotated[
    AccumulateName,
    typer.Option(
        "--accumulate",
        metavar="NAME",
        help="How the weight's gradient is summed: fp32 or weight_dtype.",
        rich_help_panel=_PROBLEM,
    ),
]
ModesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--mode",
        metavar="NAME",
        help="Gradients wanted: train (the default), train_frozen_weight or eval; several: repeat, "
        "or separate with commas.",
        rich_help_panel=_PROBLEM,
    ),
]
AccumulatesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--accumulate",
        metavar="NAME",
        help="How the weight's gradient is summed: fp32 (the default) or weight_dtype; several: "
        "repeat, or separate with commas. Evaluation sums nothing.",
        rich_help_panel=_PROBLEM,
    ),
]
FeaturesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--features",
        metavar="NAMES",
        help="Parts of the loss that change the kernels: bias, softcap, label_smoothing, "
        "class_weight, per_token, statistics. Comma-separated.",
        rich_help_panel=_PROBLEM,
    ),
]
DeviceOption = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="NAME",
        help="cuda, cuda:1, cpu, or part of the name of a device with stored results. "
        "Default: the first GPU, else the CPU.",
    ),
]
LocalDeviceOption = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="NAME",
        help="cuda, cuda:1 or cpu. Default: the first GPU, else the CPU.",
    ),
]
DevicesOption = Annotated[
    str | None,
    typer.Option(
        "--devices",
        metavar="NAMES",
        help="Several GPUs of this machine, each with problems of its own: "
        "all, or e.g. cuda:0,cuda:1.",
    ),
]
ExecutorOption = Annotated[
    Literal["local", "ray"],
    typer.Option("--executor", help="Measure on this machine, or in a Ray cluster."),
]
AcceleratorOption = Annotated[
    list[str] | None,
    typer.Option(
        "--accelerator",
        metavar="TYPE",
        help="With --executor ray: only GPUs of this type, as Ray calls it, e.g. H200.",
    ),
]
WorkspaceLimitOption = Annotated[
    int | None,
    typer.Option(
        "--workspace-limit",
        parser=parse_bytes,
        metavar="SIZE",
        help="Bytes the op may hold beyond inputs and gradients, e.g. 256MiB.",
    ),
]
StrategyOption = Annotated[
    list[str] | None,
    typer.Option(
        "--strategy",
        metavar="NAME",
        help="Only this strategy; several: repeat, or separate with commas.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Write JSON to stdout.")]
