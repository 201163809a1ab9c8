"""`bmforge prepare`: text files to a token store and a tokenizer."""

from __future__ import annotations

from bmforge.cli.options import PrepareCommand
from bmforge.data import prepare
from bmforge.logging import get_logger

__all__ = ["run_prepare"]


def run_prepare(command: PrepareCommand) -> None:
    """Text files to a token store and a tokenizer."""
    report = prepare(
        list(command.input) or None, command.out, command.config, overwrite=command.overwrite
    )
    get_logger().info(
        "%s %s: %d documents, %d duplicates, %d bad entries skipped, %d + %d tokens "
        "(%.1f %% of the bytes held out), vocabulary %d",
        "already prepared:" if report.reused else "prepared",
        command.out,
        report.documents,
        report.duplicates,
        report.skipped,
        report.train.tokens,
        report.validation.tokens,
        100 * report.held_out_ratio,
        report.vocab_size,
    )
