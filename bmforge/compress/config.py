"""Configuration of compression: the settings of all methods in one dataclass."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from bmforge.compress.distill import DistillConfig
from bmforge.compress.moefy import MoEfyConfig
from bmforge.compress.prune import PruneConfig
from bmforge.compress.prune.structure_config import StructureConfig
from bmforge.compress.quantize import QuantizeConfig

__all__ = ["CompressConfig"]


@dataclass(frozen=True, kw_only=True)
class CompressConfig:
    """Compression methods in order of application; None disables a method.

    Distillation runs during the training steps of all methods.

    Args:
        structure: structured pruning to smaller shapes.
        moefy: splitting MLPs into experts.
        prune: unstructured or 2:4 sparsity.
        quantize: weight quantization.
        distill: distillation from a teacher.
    """

    structure: StructureConfig | None = None
    moefy: MoEfyConfig | None = None
    prune: PruneConfig | None = None
    quantize: QuantizeConfig | None = None
    distill: DistillConfig | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the enabled methods, without distillation."""
        enabled = [f.name for f in fields(self) if getattr(self, f.name) is not None]
        return tuple(name for name in enabled if name != "distill")

    def needs_calibration(self, name: str) -> bool:
        """Return True if the method `name` is enabled and needs calibration batches."""
        part: Any = getattr(self, name)
        if name == "structure":
            return part is not None and not part.gates and part.by != "size"
        if name == "moefy":
            return part is not None
        return bool(getattr(part, "is_calibrated", False))

    @property
    def is_calibrated(self) -> bool:
        """True if any enabled method needs calibration batches."""
        return any(self.needs_calibration(name) for name in self.names)
