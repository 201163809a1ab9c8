"""What a template is made of, and the error that says where in its text something is wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from bmforge.errors import ConfigError

__all__ = ["SPECIALS", "Piece", "TemplateError", "Wrapped"]

Kind = Literal["text", "placeholder", "meta", "mask", "special", "soft"]
# What a special piece may name -> the role of the token it stands for.
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
    """A template's text is not one.

    Args:
        problem: what was found, what is needed.
        text: of the template.
        at: the character where it is.

    Attributes:
        line, column: where it is, from 1.
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
    """One part of a template.

    Args:
        kind: what it is.
        value: the text, the field's or meta entry's name, the special token, a soft piece's words.
        spaced: a blank stands before it.
        shortenable: what it brings may be cut where the whole is too long.
        soft_id: pieces with the same share their rows; 0 for none.
        duplicate: how many times a soft piece stands here.
        same: all of them with the same rows.
        process: what is done with the example's text; None for nothing.
        at: the character of the template's text where it begins.
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
    """A piece with an example's text in it.

    Args:
        text: to be read by the tokenizer; of a soft row, the word it began as.
        kind: "text" for whatever the tokenizer reads.
        soft: number of the row, from 1; 0 for none.
        shortenable: whether it may be cut.
    """

    text: str
    kind: Literal["text", "mask", "special", "soft"] = "text"
    soft: int = 0
    shortenable: bool = False
