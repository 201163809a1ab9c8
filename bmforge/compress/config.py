"""One recipe: everything that is to be done to a model to make it small, as data."""

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
    """What is done to a model, in this order; None leaves it out. Distillation spans all.

    Args:
        structure: smaller shapes.
        moefy: MLPs become experts.
        prune: weights become zeros.
        quantize: weights become integers.
        distill: a teacher beside the task.
    """

    structure: StructureConfig | None = None
    moefy: MoEfyConfig | None = None
    prune: PruneConfig | None = None
    quantize: QuantizeConfig | None = None
    distill: DistillConfig | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """What is asked for, besides a teacher."""
        found = [f.name for f in fields(self) if getattr(self, f.name) is not None]
        return tuple(name for name in found if name != "distill")

    def looks(self, name: str) -> bool:
        """Tell whether a part of it needs to see real inputs."""
        part: Any = getattr(self, name)
        if name == "structure":
            return part is not None and not part.gates and part.by != "size"
        if name == "moefy":
            return part is not None
        return bool(getattr(part, "is_calibrated", False))

    @property
    def is_calibrated(self) -> bool:
        """Whether anything of it needs to see real inputs."""
        return any(self.looks(name) for name in self.names)
