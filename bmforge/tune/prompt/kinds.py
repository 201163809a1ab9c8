"""Templates by their published names: rows in front, made rows, several masks, a prefix."""

from __future__ import annotations

from typing import Any

from bmforge.errors import ConfigError
from bmforge.tokenizers import Tokenizer
from bmforge.tune.delta import Prefix
from bmforge.tune.prompt.template import Template

__all__ = ["PTRTemplate", "PTuning", "PrefixTemplate", "SoftTemplate"]


class SoftTemplate(Template):
    """A template behind rows that are trained: `Template(..., front=num_tokens)`.

    Args:
        text, tokenizer, model: as of a `Template`.
        num_tokens: of the rows, which are drawn.
        options: further ones of a `Template`.

    Source: Lester et al., "The Power of Scale for Parameter-Efficient Prompt Tuning" (2021).
    """

    def __init__(
        self, text: str, tokenizer: Tokenizer, model: Any, *, num_tokens: int = 20, **options: Any
    ) -> None:
        super().__init__(text, tokenizer, model, front=num_tokens, **options)


class PTuning(Template):
    """A template whose soft pieces are made by trained layers: `Template(..., encoder=...)`.

    Args:
        text: has soft pieces.
        tokenizer, model: as of a `Template`.
        encoder: "lstm" or "mlp".
        options: further ones of a `Template`.

    Raises:
        ConfigError: the text has no soft piece.

    Source: Liu et al., "GPT Understands, Too" (2021).
    """

    def __init__(
        self, text: str, tokenizer: Tokenizer, model: Any, *, encoder: str = "lstm", **options: Any
    ) -> None:
        super().__init__(text, tokenizer, model, encoder=encoder, **options)
        if not self.rows:
            raise ConfigError(f'the template {text!r} has no soft piece: write {{"soft"}} in it.')


class PTRTemplate(Template):
    """A template with several masks, one for every part of a `PTRVerbalizer`'s rules.

    Args:
        text, tokenizer, model, options: as of a `Template`.

    Raises:
        ConfigError: the text has one mask, or the model reads nothing behind the first.

    Source: Han et al., "PTR: Prompt Tuning with Rules for Text Classification" (2021).
    """

    def __init__(self, text: str, tokenizer: Tokenizer, model: Any, **options: Any) -> None:
        super().__init__(text, tokenizer, model, **options)
        if self.num_masks < 2:
            raise ConfigError(
                f"the template has {self.num_masks} mask that the model reads: rules need several."
            )


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
        self.delta = Prefix(
            model, name="prefix_template", length=length, inner=inner, shift_positions=False
        )
        for parameter in super().soft_parameters:
            parameter.requires_grad_(True)

    @property
    def soft_parameters(self) -> list[Any]:
        """The prefix's tensors, and those of soft rows."""
        return [*super().soft_parameters, *self.delta.parameters()]
