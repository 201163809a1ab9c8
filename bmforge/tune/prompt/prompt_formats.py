"""Prompt formats of the kinds of models, which differ in how the input represents a mask."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from bmforge.errors import ConfigError
from bmforge.tokenizers import Tokenizer
from bmforge.tune.prompt.pieces import SPECIALS

__all__ = ["PROMPT_FORMATS", "PromptFormat", "find_prompt_format", "role_token"]

Form = Literal["row", "apart", "behind", "hidden", "document"]


@dataclass(frozen=True)
class PromptFormat:
    """Prompt format of one kind of model.

    Args:
        kind: name of the kind of model.
        about: description, for error messages, of how the input represents a mask.
        form: position of the prediction: "row" (at the mask), "apart" (in the decoder), "behind"
            (after the text in the same sequence), "hidden" (at CPM-Ant's hidden tokens) or
            "document" (in a CPM-Bee document).
        begins: special tokens (such as bos or cls) before the text, in order of preference; () for
            no token.
        ends: special tokens after the text, in order of preference; () for no token.
        reads_after_mask: True if the model reads text after the mask.
        shows_mask: True if the input contains the mask token.
        start_is_blank: True if the decoder's start token is the first sentinel.
        marks: pairs (config field of the model, tokenizer role) that must have the same token id.
    """

    kind: str
    about: str
    form: Form = "row"
    begins: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    reads_after_mask: bool = True
    shows_mask: bool = True
    start_is_blank: bool = False
    marks: tuple[tuple[str, str], ...] = ()

    @property
    def has_decoder(self) -> bool:
        """True if a separate decoder writes the answer."""
        return self.form == "apart"

    @property
    def is_autoregressive(self) -> bool:
        """True if an answer's tokens are predicted one after another, False if in parallel."""
        return self.form != "row" or not self.shows_mask


_GLM = (("sop_token_id", "sop"), ("mask_token_id", "mask"))
PROMPT_FORMATS = {
    prompt_format.kind: prompt_format
    for prompt_format in (
        PromptFormat("masked", "the mask token", "row", ("cls", "bos"), ("sep", "eos")),
        PromptFormat("causal", "the next token", "row", reads_after_mask=False, shows_mask=False),
        PromptFormat("spans", "a sentinel in the source", "apart", (), ("eos",)),
        PromptFormat(
            "prefix spans", "what the decoder writes", "apart", (), ("eos",), False, False
        ),
        PromptFormat("dialogues", "a sentinel in the source", "apart", start_is_blank=True),
        PromptFormat("blanks", "its mask, filled behind", "behind", ("cls",), ("eos",), marks=_GLM),
        PromptFormat("segments", "a hidden token", "hidden", ("bos",), ("eos",)),
        PromptFormat("documents", "a numbered blank, filled under <ans>", "document"),
    )
}
# Traits of a model family (attention pattern, training objective) -> prompt format.
_BY_TRAITS = {
    ("bidirectional", "masked tokens"): "masked",
    ("causal", "next token"): "causal",
    ("encoder-decoder", "spans"): "spans",
    ("encoder-decoder", "dialogues"): "dialogues",
    ("prefix", "blanks"): "blanks",
    ("prefix", "hidden tokens"): "segments",
    ("causal", "documents"): "documents",
}


def find_prompt_format(model: Any) -> PromptFormat:
    """Return the prompt format for a model, from its traits or its transformers config.

    Raises:
        ConfigError: prompts are not supported for this kind of model.
    """
    traits = getattr(model, "traits", None)
    if traits is None:
        return _format_of_other(model)
    kind = _BY_TRAITS.get((traits.attention, traits.objective))
    if kind is None or traits.has_images:
        raise ConfigError(
            f"{type(model).__name__} ({traits.objective}) cannot be used with a "
            "template, because it does not read text. Use another family."
        )
    return PROMPT_FORMATS[kind]


def _format_of_other(model: Any) -> PromptFormat:
    """Return the prompt format for a transformers model."""
    config = getattr(model, "config", None)
    names = " ".join(getattr(config, "architectures", None) or [type(model).__name__])
    names += f" {type(model).__name__}"
    if getattr(config, "is_encoder_decoder", False):
        return PROMPT_FORMATS["spans"]
    if "MaskedLM" in names:
        return PROMPT_FORMATS["masked"]
    if "CausalLM" in names or "LMHead" in names:
        return PROMPT_FORMATS["causal"]
    raise ConfigError(
        f"{type(model).__name__} has no head that predicts tokens. Use a masked or causal "
        "language model, or an encoder-decoder."
    )


def role_token(tokenizer: Tokenizer, roles: tuple[str, ...]) -> int | None:
    """Return the id of the first of `roles` that the tokenizer defines; None if it defines none."""
    ids = (tokenizer.role_id(role) for role in roles)
    return next((id for id in ids if id is not None), None)


def special_token(tokenizer: Tokenizer, name: str) -> int:
    """Return the id of a special token that a template names.

    Raises:
        ConfigError: the tokenizer has no such token.
    """
    id = role_token(tokenizer, SPECIALS[name])
    if id is None:
        raise ConfigError(
            f"the tokenizer has no token for {name} (its special tokens: "
            f"{', '.join(tokenizer.special_ids)}). Use the tokenizer of the model."
        )
    return id


def check_marks(prompt_format: PromptFormat, tokenizer: Tokenizer, model: Any) -> None:
    """Check that the model's config and the tokenizer have the same ids for special tokens.

    Raises:
        ConfigError: the ids of a token in `prompt_format.marks` differ.
    """
    config = getattr(model, "config", None)
    needed = {field: tokenizer.role_id(role) for field, role in prompt_format.marks}
    wrong = [f"{n}={getattr(config, n, None)}" for n, id in needed.items()
             if getattr(config, n, None) != id]  # fmt: skip
    if wrong:
        raise ConfigError(
            f"the model has {', '.join(wrong)}, but the tokenizer has other ids for these "
            f"tokens. Set {', '.join(f'{n}={id}' for n, id in needed.items())} in the model config."
        )
