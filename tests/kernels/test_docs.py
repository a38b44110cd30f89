"""docs/loss.md names every argument, default and output."""

import dataclasses
import inspect
import re
from pathlib import Path

from flce_tune.kernels.given_logits import cross_entropy
from flce_tune.kernels.op import LossOutputs, linear_cross_entropy, linear_logprobs

PAGE = (Path(__file__).parents[2] / "docs" / "loss.md").read_text()


def section(title):
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def test_every_argument_and_its_default_is_in_the_table():
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \|", section("Arguments"), re.MULTILINE)
    documented = {name: default.strip("`") for name, default in rows}
    actual = {}
    for name, parameter in inspect.signature(linear_cross_entropy).parameters.items():
        default = parameter.default
        text = f'"{default}"' if isinstance(default, str) else repr(default)
        actual[name] = "–" if default is inspect.Parameter.empty else text
    assert documented == actual


def test_every_output_is_in_the_table():
    documented = set(re.findall(r"^\| `(\w+)` \|", section("Results"), re.MULTILINE))
    assert documented | {"loss"} == {field.name for field in dataclasses.fields(LossOutputs)}


def test_every_argument_of_linear_logprobs_is_named():
    for name in inspect.signature(linear_logprobs).parameters:
        assert f"`{name}" in PAGE or f"{name}=" in section("`linear_logprobs`"), name


def test_every_argument_of_cross_entropy_is_named():
    for name in inspect.signature(cross_entropy).parameters:
        text = section("`cross_entropy`")
        assert f"`{name}`" in text or f"`{name}=" in text or name == "target", name
