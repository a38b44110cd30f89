"""From the options that describe a problem to problems."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import typer

from flce_tune.cli.units import parse_counts, split_commas
from flce_tune.kernels.problem import Accumulate, Mode, Problem
from flce_tune.sweep.presets import Preset, from_model_config, get_preset, problems_for


@dataclass(frozen=True, slots=True)
class Selection:
    """What the user said about the problem, as it came from the command line."""

    preset: str | None
    from_model: Path | None
    tokens: list[str] | None
    hidden: int | None
    vocab: int | None
    dtype: str | None
    mode: Mode
    accumulate: Accumulate
    features: list[str] | None

    def problems(self) -> list[Problem]:
        """Every problem meant, one for each token count.

        Raises:
            typer.BadParameter: too much, too little or impossible values were given.
        """
        model = self._model()
        try:
            return [
                replace(
                    problem,
                    accumulate=self.accumulate,
                    features=tuple({*problem.features, *split_commas(self.features)}),
                )
                for problem in problems_for(
                    model, parse_counts(self.tokens or []), self.dtype, self.mode
                )
            ]
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error

    def variants(self, modes: list[str] | None, accumulates: list[str] | None) -> list[Selection]:
        """The same in each mode with each accumulation; None: as it is.

        Evaluation sums no gradient, so it comes once.

        Raises:
            typer.BadParameter: a name is none of theirs.
        """
        chosen_modes = _among(get_args(Mode), modes, "--mode") or [self.mode]
        chosen = _among(get_args(Accumulate), accumulates, "--accumulate") or [self.accumulate]
        return [
            replace(self, mode=mode, accumulate=accumulate)
            for mode in chosen_modes
            for accumulate in (chosen[:1] if mode == "eval" else chosen)
        ]

    def problem(self) -> Problem:
        """The one problem meant.

        Raises:
            typer.BadParameter: as ``problems``, or several were given.
        """
        problems = self.problems()
        if len(problems) > 1:
            raise typer.BadParameter("say one token count with --tokens, e.g. --tokens 16384")
        return problems[0]

    def _model(self) -> Preset:
        sizes = self.hidden is not None or self.vocab is not None
        if (self.preset is not None) + (self.from_model is not None) + sizes != 1:
            raise typer.BadParameter(
                "say which problem in one of three ways: --preset NAME, --from-model config.json, "
                "or --hidden D --vocab V --tokens N"
            )
        try:
            if self.preset is not None:
                return get_preset(self.preset)
            if self.from_model is not None:
                return from_model_config(self.from_model)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
        if self.hidden is None or self.vocab is None or not self.tokens:
            raise typer.BadParameter("--hidden, --vocab and --tokens go together")
        return Preset("custom", self.hidden, self.vocab)


NO_SELECTION = Selection(None, None, None, None, None, None, "train", "fp32", None)
"""Nothing was said."""


def _among(known: Sequence[str], given: list[str] | None, option: str) -> list[Any]:
    names = list(dict.fromkeys(split_commas(given)))
    for name in names:
        if name not in known:
            raise typer.BadParameter(f"{name!r} is none of {', '.join(known)}", param_hint=option)
    return names
