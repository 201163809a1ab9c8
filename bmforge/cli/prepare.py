"""`bmforge prepare`: tokenizes text files for training and trains a tokenizer if needed."""

from __future__ import annotations

from bmforge.cli.data_options import PrepareCommand
from bmforge.data import prepare, show_preparation
from bmforge.data.prepare.funnel import REPLACED
from bmforge.logging import get_logger

__all__ = ["run_prepare"]


def run_prepare(command: PrepareCommand) -> None:
    """Tokenize text files for training, and train a tokenizer if none is given."""
    inputs = list(command.input) or None
    if command.dry_run:
        states = show_preparation(inputs, command.out, command.config, overwrite=command.overwrite)
        for state in states:
            get_logger().info("%s: %d of %d parts done", state.stage, state.done, state.parts)
        return
    report = prepare(inputs, command.out, command.config, overwrite=command.overwrite)
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
    for step, counts in sorted(report.funnel.changed.items() if report.funnel else ()):
        documents, characters = counts
        if step == REPLACED and report.funnel:
            read_bytes = max(report.funnel.read.text_bytes, 1)
            get_logger().info(
                "changed by %s: %d documents, %d characters (%.3g %% of the bytes read)",
                step,
                documents,
                characters,
                100 * characters / read_bytes,
            )
        elif step != "normalise":
            get_logger().info("changed by %s: %d documents", step, documents)
    counted = {"duplicate", "unreadable"}
    for rule, amount in sorted(report.funnel.dropped.items() if report.funnel else ()):
        if rule not in counted:
            get_logger().info(
                "dropped by %s: %d documents, %d bytes", rule, amount.documents, amount.text_bytes
            )
