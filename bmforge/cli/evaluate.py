"""`bmforge evaluate MODEL`: figures of texts and tasks, printed, and kept where they belong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

import tyro

from bmforge.logging import process_rank
from bmforge.recipes.evaluate import EvaluateConfig, evaluate_model
from bmforge.recipes.run import Results

__all__ = ["EvaluateCommand", "run_evaluate_command"]


@dataclass(kw_only=True)
class EvaluateCommand:
    """Measure a model: perplexity and bits per byte of texts, and the figures of tasks.

    Args:
        model: directory or hub id of a model, a run's directory, or a preset with --weights.
        config: on what.
    """

    model: Annotated[str, tyro.conf.Positional]
    config: Annotated[EvaluateConfig, tyro.conf.arg(name="")] = field(
        default_factory=EvaluateConfig
    )


def run_evaluate_command(command: EvaluateCommand) -> None:
    """Evaluate, and print the figures once."""
    results = evaluate_model(command.model, command.config)
    if process_rank() == 0:
        print("\n".join(_draw_table(results)))


def _draw_table(results: Results) -> Sequence[str]:
    """Return a line for every figure."""
    cells = [(m, n, f"{v:.4f}") for m, values in results.items() for n, v in values.items()]
    widths = [max(len(cell[place]) for cell in cells) for place in range(3)]
    return [f"{m:<{widths[0]}}  {n:<{widths[1]}}  {v:>{widths[2]}}" for m, n, v in cells]
