"""Parser of the template language: text, and pieces in braces, each a literal dict or set.

The text is never evaluated. A scanner that handles quotes and braces finds the pieces, and each
piece is parsed as a literal; a mistake raises a `TemplateError` with its position.
Source: the language is OpenPrompt's (Ding et al., "OpenPrompt: An Open-source Framework for
Prompt-learning", 2022).
"""

from __future__ import annotations

import ast
import difflib
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from bmforge.tune.prompt.lambdas import read_lambda
from bmforge.tune.prompt.pieces import SPECIALS, Piece, TemplateError
from bmforge.tune.prompt.post_processing import (
    list_post_processing,
    take_post_processing,
)

__all__ = ["parse_template"]

_KINDS = ("placeholder", "meta", "mask", "special", "text", "soft", "soft_id")
_KEYS = {*_KINDS, "shortenable", "post_processing", "duplicate", "same", "add_prefix_space"}
# Keys that are allowed only for some kinds of pieces.
_ONLY = {
    "duplicate": ("soft",),
    "same": ("soft",),
    "soft_id": ("soft",),
    "post_processing": ("placeholder", "meta"),
}
_MAX_CHARS, _MAX_DEPTH, _MAX_DUPLICATE = 100_000, 16, 10_000


def parse_template(text: str, needs_mask: bool = True) -> tuple[Piece, ...]:
    """Parse a template into its pieces.

    Args:
        text: text in the template language.
        needs_mask: True to raise an error if the template has no mask.

    Raises:
        TemplateError: the template is invalid; the message has line, column and expected syntax.
    """
    _check_characters(text)
    pieces: list[Piece] = []
    at, spaced = 0, False
    while at < len(text):
        if text[at] == " ":
            spaced, at = True, at + 1
            continue
        if text[at] == "{":
            end = _find_end(text, at)
            pieces.append(_read_piece(text, at, end, spaced))
        else:
            end = text.find("{", at)
            end = len(text) if end < 0 else end
            plain = text[at:end]
            pieces.append(Piece("text", plain.rstrip(" "), spaced, at=at))
            end = at + len(plain.rstrip(" "))
        at, spaced = end, False
    if needs_mask and not any(piece.kind == "mask" for piece in pieces):
        raise TemplateError(
            'the template has no {"mask"}. Add {"mask"} where the model is to predict.',
            text,
            len(text),
        )
    return tuple(pieces)


def _check_characters(text: str) -> None:
    if not isinstance(text, str):
        raise TemplateError(f"the template must be a string, not a {type(text).__name__}.", "", 0)
    if len(text) > _MAX_CHARS:
        raise TemplateError(
            f"the template has {len(text)} characters (allowed: at most {_MAX_CHARS}).", text, 0
        )
    for at, character in enumerate(text):
        if character == "\0" or "\ud800" <= character <= "\udfff":
            raise TemplateError(
                f"the character {ord(character):#x} is not allowed in a template. Remove the "
                "character.",
                text,
                at,
            )


def _find_end(text: str, begin: int) -> int:
    """Return the index after the brace that closes the brace at `begin`."""
    depth, quote, at = 0, "", begin
    while at < len(text):
        character = text[at]
        if quote:
            if character == "\\":
                at += 1
            elif character == quote:
                quote = ""
        elif character in "\"'":
            quote = character
        elif character in "{[(":
            depth += 1
            if depth > _MAX_DEPTH:
                raise TemplateError(
                    (
                        f"braces are nested too deeply (allowed: {_MAX_DEPTH} levels). "
                        "Simplify the template."
                    ),
                    text,
                    at,
                )
        elif character in "}])":
            depth -= 1
            if depth == 0:
                return at + 1
        at += 1
    kind = f"the quote {quote}" if quote else "the opening brace"
    raise TemplateError(f"{kind} is not closed. Add {quote or '}'} to close it.", text, begin)


def _read_piece(text: str, begin: int, end: int, spaced: bool) -> Piece:
    """Parse one piece in braces."""

    def fail(problem: str) -> TemplateError:
        return TemplateError(f"{text[begin:end]!r:.80}: {problem}", text, begin)

    values = _read_literal(text[begin:end], fail)
    unknown = [key for key in values if key not in _KEYS]
    if unknown:
        near = difflib.get_close_matches(str(unknown[0]), _KEYS, 1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        keys = ", ".join(sorted(_KEYS))
        raise fail(f"unknown key {unknown[0]!r} (supported: {keys}).{hint}")
    kinds = [key for key in _KINDS if key in values]
    kinds = [key for key in kinds if key != "soft_id"] or ["soft"] * ("soft_id" in values)
    if len(kinds) != 1:
        raise fail(
            f"a piece must have exactly one of the keys {', '.join(_KINDS)}, not "
            f"{', '.join(kinds) or 'none'}."
        )
    kind: Any = kinds[0]
    for key, allowed in _ONLY.items():
        if key in values and kind not in allowed:
            raise fail(
                f"{key} is only allowed in {' and '.join(allowed)} pieces, not in {kind} pieces."
            )
    _check_value(kind, values.get(kind), fail)
    soft_id, duplicate = values.get("soft_id", 0), values.get("duplicate", 1)
    if "soft_id" in values and (not _is_count(soft_id)):
        raise fail(f"soft_id={soft_id!r} must be an integer of at least 1.")
    if not _is_count(duplicate) or duplicate > _MAX_DUPLICATE:
        raise fail(f"duplicate={duplicate!r} must be an integer from 1 to {_MAX_DUPLICATE}.")
    for key in ("shortenable", "same"):
        if not isinstance(values.get(key, False), bool):
            raise fail(f"{key}={values[key]!r} must be True or False.")
    return Piece(
        kind,
        values.get(kind),
        bool(values["add_prefix_space"]) if "add_prefix_space" in values else spaced,
        values.get("shortenable", kind == "placeholder"),
        soft_id,
        duplicate,
        values.get("same", False),
        _read_process(values.get("post_processing"), fail),
        begin,
    )


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _read_literal(piece: str, fail: Callable[[str], TemplateError]) -> Mapping[Any, Any]:
    """Parse a piece as a dict; a lambda in it remains an AST node."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escape sequences in the text
            node = ast.parse(piece, mode="eval").body
            if isinstance(node, ast.Set):
                return {ast.literal_eval(item): None for item in node.elts}
            if isinstance(node, ast.Dict) and None not in node.keys:
                keys = [ast.literal_eval(key) for key in node.keys if key is not None]
                pairs = list(zip(keys, node.values, strict=True))
                return {
                    key: value if isinstance(value, ast.Lambda) else ast.literal_eval(value)
                    for key, value in pairs
                }
    except SyntaxError as error:
        raise fail(
            f"a value is not a Python literal ({error.msg}). Put strings in quotes."
        ) from None
    except (ValueError, TypeError, RecursionError, MemoryError) as error:
        raise fail(f"a value is not a Python literal ({error!s:.60}).") from None
    raise fail('a piece must have the form {"key": value, ...} or {"key"}.')


def _check_value(kind: str, value: Any, fail: Callable[[str], TemplateError]) -> None:
    """Raise a `TemplateError` if the value of the key that determines a piece's type is invalid."""
    if kind in ("placeholder", "meta", "special", "text") and not isinstance(value, str):
        raise fail(f"{kind}={value!r} must be a string.")
    if kind == "soft" and not isinstance(value, (str, type(None))):
        raise fail(f"soft={value!r} must be None or the text that initializes the soft tokens.")
    if kind == "mask" and value is not None:
        raise fail(f'mask={value!r} is not allowed, because a mask has no value. Write {{"mask"}}.')
    if kind == "special" and value not in SPECIALS:
        near = difflib.get_close_matches(value, SPECIALS, 1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise fail(f"unknown special token {value!r} (supported: {', '.join(SPECIALS)}).{hint}")


def _read_process(value: Any, fail: Callable[[str], TemplateError]) -> Callable[[str], str] | None:
    """Return the text function that the `post_processing` key names or contains as a lambda."""
    if value is None:
        return None
    if isinstance(value, str) and value.lstrip().startswith("lambda"):
        try:
            value = ast.parse(value.strip(), mode="eval").body
        except SyntaxError as error:
            raise fail(f"{value!r:.40} is not a lambda ({error.msg}).") from error
    if isinstance(value, ast.Lambda):
        try:
            return read_lambda(value)
        except ValueError as error:
            raise fail(
                f"the lambda is not supported ({error}). Register the function with "
                "register_post_processing, and use its name."
            ) from None
    process = take_post_processing(value) if isinstance(value, str) else None
    if process is None:
        raise fail(
            f"post_processing={value!r:.40} is unknown (supported: "
            f"{', '.join(list_post_processing())})."
        )
    return process
