"""Data classes for the pieces of a template, and the error that locates a mistake in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from bmforge.errors import ConfigError

__all__ = ["SPECIALS", "Piece", "TemplateError", "Wrapped"]

Kind = Literal["text", "placeholder", "meta", "mask", "special", "soft"]
# Name of a special piece -> tokenizer roles of the token that it inserts.
SPECIALS = {
    "<mask>": ("mask",),
    "<eos>": ("eos",),
    "<bos>": ("bos",),
    "<sep>": ("sep",),
    "<cls>": ("cls",),
    "<pad>": ("pad",),
    "<unk>": ("unk",),
}


class TemplateError(ConfigError):
    """Error about an invalid template text.

    Args:
        problem: description of the mistake and of the expected syntax.
        text: text of the template.
        at: character index of the mistake.

    Attributes:
        line, column: position of the mistake, starting at 1.
    """

    def __init__(self, problem: str, text: str, at: int) -> None:
        at = max(0, min(at, len(text)))
        self.at = at
        self.line = text.count("\n", 0, at) + 1
        begin = text.rfind("\n", 0, at) + 1
        self.column = at - begin + 1
        end = text.find("\n", at)
        shown = text[begin : len(text) if end < 0 else end]
        left = max(0, at - begin - 40)
        excerpt = shown[left : left + 80].encode("utf-8", "replace").decode()
        caret = " " * (at - begin - left) + "^"
        super().__init__(f"template, line {self.line}, column {self.column}: {problem}\n"
                         f"  {excerpt}\n  {caret}")  # fmt: skip


@dataclass(frozen=True)
class Piece:
    """One piece of a template.

    Args:
        kind: type of the piece.
        value: the piece's text, field name, meta entry name, special token, or soft piece's words.
        spaced: True if a space precedes the piece.
        shortenable: True if the piece's text may be truncated when the prompt is too long.
        soft_id: id of the soft tokens; pieces with the same id share their embeddings; 0 for pieces
            without an id.
        duplicate: number of repetitions of a soft piece.
        same: True if all repetitions share the same trained embeddings.
        process: function applied to the example's text; if None, the text is unchanged.
        at: index of the piece's first character in the template's text.
    """

    kind: Kind
    value: str | None = None
    spaced: bool = False
    shortenable: bool = False
    soft_id: int = 0
    duplicate: int = 1
    same: bool = False
    process: Callable[[str], str] | None = None
    at: int = 0


@dataclass(frozen=True)
class Wrapped:
    """A template piece with the text of an example.

    Args:
        text: text to tokenize; for a soft token, the word that initializes its embedding.
        kind: "mask", "special" (a special token), "soft", or "text" for any other piece.
        soft: index of the soft token, starting at 1; 0 if the piece is not a soft token.
        shortenable: True if the text may be truncated.
    """

    text: str
    kind: Literal["text", "mask", "special", "soft"] = "text"
    soft: int = 0
    shortenable: bool = False
