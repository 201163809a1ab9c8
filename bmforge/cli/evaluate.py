"""`bmforge evaluate MODEL`: computes metrics on texts and tasks, prints and stores them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bmforge.cli import parse
from bmforge.cli.options import EvaluateCommand
from bmforge.logging import log_loading, process_rank
from bmforge.model_names import check_model_path

__all__ = ["run_evaluate"]

_LAYOUT = "--layout."


def run_evaluate(arguments: Sequence[str]) -> None:
    """Evaluate a model and print the metrics on one process."""
    plain, laid = _split_arguments(arguments)
    command = parse.parse_options(EvaluateCommand, plain, "evaluate")
    check_model_path(command.model)
    command.config.check()
    log_loading()
    # Imported lazily: help and argument errors do not need torch.
    from bmforge.parallel import Layout
    from bmforge.recipes.evaluate import evaluate_model

    layout = parse.parse_options(Layout, laid, "evaluate")
    results = evaluate_model(
        command.model, command.config, layout, allow_other_base=command.allow_other_base
    )
    if process_rank() == 0:
        print("\n".join(_draw_table(results)))


def _split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the arguments without `--layout.*`, and the layout's arguments without this prefix."""
    plain: list[str] = []
    laid: list[str] = []
    part = plain
    for argument in arguments:
        if argument.startswith("--"):
            part = laid if argument.startswith(_LAYOUT) else plain
            argument = argument.replace(_LAYOUT, "--", 1) if part is laid else argument
        part.append(argument)
    return plain, laid


def _draw_table(results: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return a table with one line per metric."""
    cells = [(m, n, f"{v:.4f}") for m, values in results.items() for n, v in values.items()]
    widths = [max(len(cell[column]) for cell in cells) for column in range(3)]
    return [f"{m:<{widths[0]}}  {n:<{widths[1]}}  {v:>{widths[2]}}" for m, n, v in cells]
