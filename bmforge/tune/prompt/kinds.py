"""Template types of published methods: soft prompts, P-tuning, PTR and prefix tuning."""

from __future__ import annotations

from typing import Any

from bmforge.errors import ConfigError
from bmforge.tokenizers import Tokenizer
from bmforge.tune.delta import Prefix
from bmforge.tune.prompt.template import Template

__all__ = ["PTRTemplate", "PTuning", "PrefixTemplate", "SoftTemplate"]


class SoftTemplate(Template):
    """Template preceded by soft tokens, equivalent to `Template(..., front=num_tokens)`.

    Args:
        text, tokenizer, model: arguments of `Template`.
        num_tokens: number of soft tokens, whose embeddings are randomly initialized and trained.
        options: further options of `Template`.

    Source: Lester et al., "The Power of Scale for Parameter-Efficient Prompt Tuning" (2021).
    """

    def __init__(
        self, text: str, tokenizer: Tokenizer, model: Any, *, num_tokens: int = 20, **options: Any
    ) -> None:
        super().__init__(text, tokenizer, model, front=num_tokens, **options)


class PTuning(Template):
    """Template whose soft tokens are computed by a trained encoder (`Template(..., encoder=...)`).

    Args:
        text: template text with soft tokens.
        tokenizer, model: arguments of `Template`.
        encoder: "lstm" or "mlp".
        options: further options of `Template`.

    Raises:
        ConfigError: the text has no soft token.

    Source: Liu et al., "GPT Understands, Too" (2021).
    """

    def __init__(
        self, text: str, tokenizer: Tokenizer, model: Any, *, encoder: str = "lstm", **options: Any
    ) -> None:
        super().__init__(text, tokenizer, model, encoder=encoder, **options)
        if not self.rows:
            raise ConfigError(f'the template {text!r} has no soft token. Add {{"soft"}} to it.')


class PTRTemplate(Template):
    """Template with several masks, one for each word in the rules of a `PTRVerbalizer`.

    Args:
        text, tokenizer, model, options: arguments of `Template`.

    Raises:
        ConfigError: the text has only one mask, or the model does not read text after the first
            mask.

    Source: Han et al., "PTR: Prompt Tuning with Rules for Text Classification" (2021).
    """

    def __init__(self, text: str, tokenizer: Tokenizer, model: Any, **options: Any) -> None:
        super().__init__(text, tokenizer, model, **options)
        if self.num_masks < 2:
            raise ConfigError(
                f"the template has {self.num_masks} mask token(s), but rules need at least 2. "
                "Add mask tokens to the template."
            )


class PrefixTemplate(Template):
    """Template that attaches a `tune.delta.Prefix` to its model; the base model is frozen.

    Args:
        text, tokenizer, model: arguments of `Template`.
        length: number of trained keys and values per attention layer.
        inner: hidden size of the MLP that computes the prefix in training; 0 to train the prefix
            directly.
        options: further options of `Template`.

    Attributes:
        delta: the `Prefix` adapter, which can be saved and removed.

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
        """Parameters of the prefix and of the soft tokens."""
        return [*super().soft_parameters, *self.delta.parameters()]
