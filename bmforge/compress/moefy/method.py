"""MoEfication as a compression method; see `compress.method`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from bmforge.compress.method import MethodBase
from bmforge.compress.moefy.config import MoEfyConfig
from bmforge.compress.moefy.convert import MoEfyReport, moefy

__all__ = ["ExpertsMethod"]


class ExpertsMethod(MethodBase):
    """Splits MLPs into experts when attached; training then continues with the experts.

    Args:
        config: MoEfication settings.
        batches: calibration batches for grouping features and training routers.
    """

    name = "experts"

    def __init__(self, config: MoEfyConfig, batches: Iterable[Mapping[str, Any]] = ()) -> None:
        self.config, self.batches = config, batches
        self.report: MoEfyReport | None = None

    def attach_(self, model: nn.Module) -> None:
        """Split the model's MLPs."""
        self.report = moefy(model, self.config, self.batches)

    def finish_(self, model: nn.Module) -> dict[str, Any]:
        """Return the report of `moefy` as JSON values."""
        return {} if self.report is None else {"experts": self.report.to_json()}
