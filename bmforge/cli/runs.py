"""`bmforge quickstart` and `bmforge report`: a complete small run, and the report of a run."""

from __future__ import annotations

from bmforge.cli.options import ReportCommand
from bmforge.logging import get_logger
from bmforge.recipes import QuickstartConfig, quickstart
from bmforge.train import write_report

__all__ = ["run_quickstart", "run_report"]


def run_quickstart(config: QuickstartConfig) -> None:
    """Train a small model from raw text."""
    get_logger().info("done: open %s", quickstart(config))


def run_report(command: ReportCommand) -> None:
    """Write the report page of a run, with curves, config and samples."""
    get_logger().info("%s", write_report(command.run))
