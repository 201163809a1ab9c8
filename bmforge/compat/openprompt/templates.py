"""OpenPrompt's templates, each of which wraps a bmforge template.

A template without trained embeddings can be created without a model. The data loader or the prompt
model later binds it to a masked, causal or encoder-decoder model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, Self

from torch import nn

from bmforge.compat.openprompt.wrappers import wrap_tokenizer
from bmforge.errors import ConfigError
from bmforge.tune.delta import Prefix
from bmforge.tune.prompt import Template, read_template
from bmforge.tune.prompt.prompt_formats import find_prompt_format
from bmforge.tune.prompt.soft import drop_rows_, token_table

__all__ = [
    "ManualTemplate", "MixedTemplate", "PTRTemplate", "PrefixTuningTemplate", "PtuningTemplate",
    "SoftTemplate", "Wrapped",
]  # fmt: skip


class Wrapped(list[Any]):
    """Result of `wrap_one_example`: [list of text pieces, dict of the example's other values].

    Attributes:
        template: template that wrapped the example.
        example: the example, with the template's fields added.
    """

    template: Any
    example: Any


class _OfWrapper(Template):
    """Template with the mask tokens, and the start of the decoder, of a tokenizer wrapper."""

    def __init__(self, wrapper: Any, *args: Any, **options: Any) -> None:
        self._mask_token = getattr(wrapper, "mask_token", super().sentinel)
        super().__init__(*args, **options)
        if self.blanks and not wrapper.starts_with_pad:
            self.prompt_format = replace(self.prompt_format, start_is_blank=True)
            self._begun = self.blanks

    def sentinel(self, number: int) -> str:
        """Return the token that the tokenizer wrapper uses for mask `number`."""
        return str(self._mask_token(number))


class ManualTemplate(nn.Module):
    """Template without trained parameters.

    Args:
        tokenizer: tokenizer of bmforge or transformers.
        text: template text.
        options: further arguments of OpenPrompt's class; accepted and ignored.
    """

    def __init__(self, tokenizer: Any = None, text: str | None = None, **options: Any) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        self._model: Any = None
        self._options: dict[str, Any] = {}
        self._bound: dict[str, Template] = {}
        self._wrapper: tuple[str, bool] = ("", True)
        self._make: Callable[..., Template] = Template
        self._text: str | None = None
        if text is not None:
            self.text = text

    @property
    def text(self) -> str:
        """Template text."""
        if self._text is None:
            raise ConfigError("the template has no text yet. Pass text=, or call from_file.")
        return self._text

    @text.setter
    def text(self, text: str) -> None:
        self._text, self._bound = text, {}
        if self._model is not None:
            core = self.bind("")
            if core.rows:
                self.soft_embedding = core._prompt

    def from_file(self, path: str, choice: int = 0) -> Self:
        """Read the template text from line `choice` of a file; return the template."""
        self.text = read_template(path, choice)
        return self

    def bind_wrapper(self, wrapper: Any) -> Template:
        """Build the bmforge template for a tokenizer wrapper.

        A wrapper class that a program defines may have a method `mask_token`, which returns the
        token of a mask.
        """
        mask = wrapper.mask_token(0) if hasattr(wrapper, "mask_token") else ""
        if self._wrapper != (settings := (mask, wrapper.starts_with_pad)):
            self._wrapper, self._bound = settings, {}
            self._make = partial(_OfWrapper, wrapper)
        return self.bind(wrapper.prompt_format)

    def bind(self, prompt_format: str, model: Any = None) -> Template:
        """Build the equivalent bmforge template.

        Args:
            prompt_format: prompting mode; if "", the mode of the model.
            model: model that reads the prompts; only needed for soft tokens or without
                `prompt_format`.
        """
        if self._bound and (not prompt_format or self._model is not None):
            core = next(iter(self._bound.values()))
            if core.rows and token_table(self._model).prompt is not core._prompt:
                raise ConfigError(
                    "a later template of the same model replaced the soft tokens of this template. "
                    "Build this template again to use it."
                )
            return core
        if self._model is not None:
            drop_rows_(self._model)
        model = model or self._model
        if model is not None and not prompt_format:
            prompt_format = find_prompt_format(model).kind
        if prompt_format not in self._bound:
            stand_in = model or SimpleNamespace(config=None)
            self._bound[prompt_format] = self._make(
                self.text, wrap_tokenizer(self.tokenizer), stand_in,
                behind="refuse", prompt_format=prompt_format, **self._options,
            )  # fmt: skip
        return self._bound[prompt_format]

    def fill(self, example: Any) -> Any:
        """Return the example unchanged, as this template adds no fields."""
        return example

    def wrap_one_example(self, example: Any) -> Wrapped:
        """Fill the template; return the text pieces and the example's other values."""
        example = self.fill(example)
        core = next(iter(self._bound.values()), None) or self.bind("masked")
        pieces = [
            {
                "text": piece.text,
                "loss_ids": int(piece.kind == "mask"),
                "shortenable_ids": int(piece.shortenable),
                **({"soft_token_ids": piece.soft} if core.rows else {}),
            }
            for piece in core.wrap(example)
        ]
        values = {name: getattr(example, name) for name in ("guid", "label", "tgt_text")}
        wrapped = Wrapped([pieces, {k: v for k, v in values.items() if v is not None}])
        wrapped.template, wrapped.example = self, example
        return wrapped


class MixedTemplate(ManualTemplate):
    """Template with soft (trained) tokens.

    Args:
        model: model whose embedding the soft tokens extend.
        tokenizer, text, options: as in `ManualTemplate`.
    """

    def __init__(self, model: Any, tokenizer: Any, text: str | None = None, **options: Any) -> None:
        super().__init__(tokenizer)
        # Not registered as a submodule, so that `parameters` has only those of the template.
        self.__dict__["_model"] = model
        self._options = self._soft_options(options)
        if text is not None:
            self.text = text

    def _soft_options(self, options: dict[str, Any]) -> dict[str, Any]:
        """Convert OpenPrompt's template options to bmforge's."""
        return {}


class SoftTemplate(MixedTemplate):
    """Template preceded by `num_tokens` soft tokens.

    The tokens are initialized randomly with the standard deviation of the embedding, or from the
    words given in soft pieces of the template text.
    """

    def _soft_options(self, options: dict[str, Any]) -> dict[str, Any]:
        return {"front": options.get("num_tokens", 20)}


class PtuningTemplate(MixedTemplate):
    """Template with soft tokens computed by an LSTM or an MLP (`prompt_encoder_type`)."""

    def _soft_options(self, options: dict[str, Any]) -> dict[str, Any]:
        return {"encoder": options.get("prompt_encoder_type", "lstm")}


class PTRTemplate(MixedTemplate):
    """Template with several masks and soft tokens, for a `PTRVerbalizer`."""


class PrefixTuningTemplate(MixedTemplate):
    """Template with trained prefix keys and values in every attention layer.

    Args:
        model, tokenizer, text: as in `MixedTemplate`.
        num_token: length of the prefix.
        mid_dim: hidden size of the MLP that computes the prefix; 0 to train the prefix directly.
        options: further arguments of OpenPrompt's class, which are ignored: every attention layer
            has a prefix.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        text: str | None = None,
        num_token: int = 5,
        mid_dim: int = 512,
        **options: Any,
    ) -> None:
        super().__init__(model, tokenizer, text, **options)
        self.delta = Prefix(
            model, name="prefix_tuning", length=num_token, inner=mid_dim, shift_positions=False
        )
        self.prefix = nn.ParameterList(self.delta.parameters())
