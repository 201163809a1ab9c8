"""How models of each kind are asked: what a mask becomes in their input, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bmforge.errors import ConfigError
from bmforge.tokenizers import Tokenizer
from bmforge.tune.prompt.pieces import SPECIALS

__all__ = ["ASKINGS", "Asking", "find_asking", "role_token"]


@dataclass(frozen=True)
class Asking:
    """How one kind of model reads a prompt.

    Args:
        kind: its name.
        about: what a mask is there.
        begins: roles of the token that stands before all; () for none.
        ends: roles of the token that stands behind all; () for none.
        reads_behind: whether what stands behind the mask is read.
        writes_apart: the answer is written by a decoder of its own.
        shows_mask: the mask itself stands in what is read.
    """

    kind: str
    about: str
    begins: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    reads_behind: bool = True
    writes_apart: bool = False
    shows_mask: bool = True


ASKINGS = {
    asking.kind: asking
    for asking in (
        Asking("masked", "the mask token", ("cls", "bos"), ("sep", "eos")),
        Asking("causal", "the next token", reads_behind=False, shows_mask=False),
        Asking("spans", "a sentinel in the source", (), ("eos",), writes_apart=True),
        Asking("prefix spans", "what the decoder writes", (), ("eos",), False, True, False),
    )
}


def find_asking(model: Any) -> Asking:
    """Return how a model is asked: by its traits, or what transformers says of it.

    Raises:
        ConfigError: it is of a kind that no prompt is made for.
    """
    traits = getattr(model, "traits", None)
    if traits is None:
        return _ask_other(model)
    if traits.objective == "masked tokens" and traits.reads == "both" and not traits.has_images:
        return ASKINGS["masked"]
    if (traits.reads, traits.objective) == ("left", "next token"):
        return ASKINGS["causal"]
    if traits.reads == "apart" and traits.answer_sentinel:
        return ASKINGS["spans"]
    raise ConfigError(
        f"{type(model).__name__} ({traits.objective}) cannot be asked with a template. Families "
        "that learned masked tokens, the next token or spans can."
    )


def _ask_other(model: Any) -> Asking:
    """Return how a model of transformers is asked."""
    config = getattr(model, "config", None)
    names = " ".join(getattr(config, "architectures", None) or [type(model).__name__])
    if getattr(config, "is_encoder_decoder", False):
        return ASKINGS["spans"]
    if "MaskedLM" in names:
        return ASKINGS["masked"]
    if "CausalLM" in names or "LMHead" in names:
        return ASKINGS["causal"]
    raise ConfigError(
        f"{type(model).__name__} has no head that predicts tokens. Give a masked or causal "
        "language model, or an encoder-decoder."
    )


def role_token(tokenizer: Tokenizer, roles: tuple[str, ...]) -> int | None:
    """Return the id of the first role that the tokenizer has; None where it has none."""
    found = (tokenizer.role_id(role) for role in roles)
    return next((id for id in found if id is not None), None)


def special_token(tokenizer: Tokenizer, name: str) -> int:
    """Return the id that a template's special token stands for.

    Raises:
        ConfigError: the tokenizer has no such token.
    """
    found = role_token(tokenizer, SPECIALS[name])
    if found is None:
        raise ConfigError(
            f"the tokenizer has no token for {name}: it has {', '.join(tokenizer.special_ids)}."
        )
    return found
