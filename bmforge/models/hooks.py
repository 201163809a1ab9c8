"""Hooks of a model for initialization, loading and planning, with the families' defaults."""

from __future__ import annotations

from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from bmforge.models.init import NoDrawing
from bmforge.surgery import match_glob

__all__ = ["ModelHooks"]


class ModelHooks:
    """Default hooks, which models of other libraries override.

    Attributes:
        hf_unused: globs of published weights that no head of bmforge uses, such as a
            next-sentence head.
        traces_memory: whether the model can run on the meta device, where its memory is measured.
        keeps_foreign_cache: whether the model uses its own library's KV cache; see
            `transformers.ForeignCache`.
    """

    config: Any
    hf_unused: ClassVar[tuple[str, ...]] = ()
    traces_memory: ClassVar[bool] = True
    keeps_foreign_cache: ClassVar[bool] = False

    @classmethod
    def describe(cls, config: Any, dtype: torch.dtype) -> Self:
        """Build the model of a config on the meta device, without adapters and other changes."""
        with torch.device("meta"), NoDrawing():
            model: Any = cls(config)  # type: ignore[call-arg]
        return model.to(dtype)

    @classmethod
    def separates_documents(cls, config: Any) -> bool:
        """Return True if the texts of a packed row do not influence each other."""
        return True

    def initial_value(self, name: str) -> Tensor | None:
        """Return the fixed initial value of a tensor; None if it is initialized at random."""
        return None

    def is_of_head(self, name: str) -> bool:
        """Return True for a tensor of the head, including those that an adapter added to it."""
        names = self.config.heads[self.config.head].names
        owners = {own_name.rpartition(".")[0] for own_name in names}
        return name in names or any(name.startswith(f"{owner}.") for owner in owners if owner)

    def is_unused(self, name: str) -> bool:
        """Return True for a published tensor that no head uses."""
        return any(match_glob(name, glob) for glob in self.hf_unused)
