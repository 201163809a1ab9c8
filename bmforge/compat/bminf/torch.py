"""Differentiable models of BMInf 1.0: `bminf.torch.CPM1` and `CPM2`."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn

from bmforge.compat.bminf.models import CPM1 as _CPM1
from bmforge.compat.bminf.models import CPM2 as _CPM2
from bmforge.compat.bminf.models import open_engine

__all__ = ["CPM1", "CPM2"]


class _Differentiable(nn.Module):
    """Base class of models with streamed int8 layers; gradients flow only to the inputs.

    Args:
        memory_limit: limit on all device memory in bytes (default: free memory).
        version: directory or hub id of the model (default: as in `bminf.models`).

    Raises:
        ConfigError: as in `bminf.models`.
    """

    old: ClassVar[type[_CPM1 | _CPM2]]

    def __init__(self, memory_limit: int | None = None, version: str | None = None) -> None:
        super().__init__()
        self.engine = open_engine(self.old.family, version or self.old.latest, memory_limit)
        self.model = self.engine.model
        self.config = self.model.config

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self.engine.tokenizer

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the bmforge model, so that prompt tuning can access it."""
        own = self.__dict__["_modules"]
        return own[name] if name in own else getattr(own["model"], name)

    def get_input_embeddings(self) -> nn.Module:
        """Return the token embedding."""
        table: nn.Module = self.model.embed
        return table

    def forward(self, input_ids: Tensor | None = None, **options: Any) -> Any:
        """Run the model; return an output with `logits`.

        Args:
            input_ids: token ids.
            options: arguments of the model, such as `inputs_embeds`, `attention_mask`,
                `decoder_input_ids`; masks may be floats.

        Shape:
            input_ids: (B, T); logits: (B, T, V)
        """
        for name in [name for name in options if name.endswith("attention_mask")]:
            if isinstance(options[name], Tensor) and options[name].is_floating_point():
                options[name] = (options[name] > 0.5).long()
        return self.model(input_ids=input_ids, **options)


class CPM1(_Differentiable):
    """Differentiable CPM-1 model."""

    old = _CPM1


class CPM2(_Differentiable):
    """Differentiable CPM-2 model."""

    old = _CPM2
