"""Hooks with which a model customizes its initialization, loading and memory planning."""

from __future__ import annotations

import math
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from bmforge.models.init import SkipInit
from bmforge.surgery import match_glob

__all__ = ["ModelHooks"]


class ModelHooks:
    """Default hooks for bmforge's families, some of which `TransformersModel` overrides.

    Attributes:
        hf_unused: name globs of checkpoint tensors that no head of bmforge uses, such as a
            next-sentence head.
        traces_memory: True if the model can run on the meta device, to measure its memory use.
        keeps_foreign_cache: True if the model uses the KV cache of another library; see
            `transformers.ForeignCache`.
        takes_images: True if prompts of the model may contain images.
        scales_residuals: True if the standard deviation of the initialization is divided by
            sqrt(2 L) for the output projections of the L layers' sublayers.
    """

    config: Any
    hf_unused: ClassVar[tuple[str, ...]] = ()
    traces_memory: ClassVar[bool] = True
    keeps_foreign_cache: ClassVar[bool] = False
    takes_images: bool = False
    scales_residuals: ClassVar[bool] = False

    @classmethod
    def describe(cls, config: Any, dtype: torch.dtype) -> Self:
        """Build the model of a config on the meta device, without adapters and other changes."""
        with torch.device("meta"), SkipInit():
            model: Any = cls(config)  # type: ignore[call-arg]
        return model.to(dtype)

    @classmethod
    def separates_documents(cls, config: Any) -> bool:
        """Return True if texts packed into one sequence do not influence each other."""
        return True

    def is_computed(self, name: str) -> bool:
        """Return True for a tensor that checkpoints need not contain, as its value is computed."""
        return False

    def initial_value(self, name: str) -> Tensor | None:
        """Return the fixed initial value of a tensor; None if it is initialized at random."""
        return None

    def init_std(self, name: str) -> float:
        """Return the standard deviation with which a parameter is initialized."""
        scaled = self.scales_residuals and name.endswith(("o_proj.weight", "down_proj.weight"))
        divisor = math.sqrt(2 * self.config.num_layers) if scaled else 1.0
        return float(self.config.init_std / divisor)

    def is_of_head(self, name: str) -> bool:
        """Return True for a tensor of the head or of an adapter on the head."""
        names = self.config.heads[self.config.head].names
        owners = {own_name.rpartition(".")[0] for own_name in names}
        return name in names or any(name.startswith(f"{owner}.") for owner in owners if owner)

    def is_unused(self, name: str) -> bool:
        """Return True for a checkpoint tensor that no head uses."""
        return any(match_glob(name, glob) for glob in self.hf_unused)
