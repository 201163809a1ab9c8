"""A template with trained keys and values before those of every attention."""

from __future__ import annotations

from typing import Any

from bmforge.tokenizers import Tokenizer
from bmforge.tune.delta import Prefix
from bmforge.tune.prompt.template import Template

__all__ = ["PrefixTemplate"]


class PrefixTemplate(Template):
    """A template whose model has a `tune.delta.Prefix`; the rest of the model is frozen.

    Args:
        text, tokenizer, model: as of a `Template`.
        length: keys and values of every attention.
        inner: width of layers that make them while they are trained; 0 trains themselves.
        options: further ones of a `Template`.

    Attributes:
        delta: the prefix, to be saved and taken away.

    Source: Li and Liang, "Prefix-Tuning" (2021).
    """

    def __init__(
        self,
        text: str,
        tokenizer: Tokenizer,
        model: Any,
        *,
        length: int = 6,
        inner: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(text, tokenizer, model, **options)
        self.delta = Prefix(model, name="prefix_template", length=length, inner=inner)
        for parameter in super().soft_parameters:
            parameter.requires_grad_(True)

    @property
    def soft_parameters(self) -> list[Any]:
        """The prefix's tensors, and those of soft rows."""
        return [*super().soft_parameters, *self.delta.parameters()]
