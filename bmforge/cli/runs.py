"""`bmforge quickstart` and `bmforge report`: a whole run, and the page of one."""

from __future__ import annotations

from bmforge.cli.options import ReportCommand
from bmforge.logging import get_logger
from bmforge.recipes import QuickstartConfig, quickstart
from bmforge.train import write_report

__all__ = ["run_quickstart", "run_report"]


def run_quickstart(config: QuickstartConfig) -> None:
    """Real text in, a trained model out."""
    get_logger().info("done: open %s", quickstart(config))


def run_report(command: ReportCommand) -> None:
    """Draw a run: curves, config, samples on one page."""
    get_logger().info("%s", write_report(command.run))
