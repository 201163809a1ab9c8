"""Strict JSON parser for request bodies, with limits on size and depth."""

from __future__ import annotations

import json
import math
import re
from typing import Any, NoReturn

from bmforge.serve.errors import RequestError
from bmforge.serve.settings import BodyLimits

__all__ = ["json_depth", "parse_json"]

# Matches whole strings, so that their contents are not counted, and structural characters. An
# unterminated string matches to the end, because searching from each of its quotes would take
# quadratic time. Runs of plain characters match as a whole: one alternative per character takes
# five times longer, and `re` holds Python's global lock meanwhile.
_MARKS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[\]{},:]', re.DOTALL)
_SURROGATE = re.compile("[\ud800-\udfff]")
_MOST_DIGITS = 19  # digits of a 64-bit integer


def parse_json(body: bytes, limits: BodyLimits) -> Any:
    """Parse a request body.

    Raises:
        RequestError: the body is not UTF-8 or not JSON, is nested too deeply, or has too many
            values; or it contains NaN, an infinity, an integer of more than 19 digits, a duplicate
            key, or half of a surrogate pair.
    """
    _check_size(body, limits)
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(
            f"the body is not valid UTF-8 (position of the first invalid byte: {error.start}). "
            "Encode the body as UTF-8."
        ) from None
    try:
        value = json.loads(
            text,
            object_pairs_hook=_object,
            parse_constant=_refuse_constant,
            parse_int=_integer,
            parse_float=_float,
        )
    except json.JSONDecodeError as error:
        raise RequestError(
            f"the body is not valid JSON ({error.msg} at character {error.pos}). Correct the body."
        ) from None
    # Surrogates can only come from escapes, because their bytes are not valid UTF-8.
    if "\\ud" in text or "\\uD" in text:
        _refuse_surrogates(value)
    return value


def _check_size(body: bytes, limits: BodyLimits) -> None:
    """Count values and nesting before parsing, since deep nesting can overflow Python's stack."""
    depth = values = keys = 0
    for mark in _MARKS.finditer(body):
        kind = body[mark.start()]
        if kind in b"[{":
            depth += 1
            values += 1
            if depth > limits.max_json_depth:
                raise RequestError(
                    f"the body is nested too deeply (allowed: {limits.max_json_depth} levels). "
                    "Send a flatter object."
                )
        elif kind in b"]}":
            depth -= 1
        elif kind in b",":
            values += 1
        elif kind in b":":
            keys += 1
        if values > limits.max_json_values:
            raise RequestError(
                f"the body has too many values (allowed: {limits.max_json_values}). Send a "
                "smaller request."
            )
        if keys > limits.max_json_keys:
            raise RequestError(
                f"the body has too many field names (allowed: {limits.max_json_keys}). Send a "
                "smaller request."
            )


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        shown = twice.encode("utf-8", "replace").decode()[:60]
        raise RequestError(
            f"the key {shown!r} occurs twice in one object of the body. Send the key once.",
            code="duplicate_key",
        )
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise RequestError(
        f"the body is not valid JSON, because {name} is not a JSON number. Send null or a "
        "finite number."
    )


def _integer(digits: str) -> int:
    if len(digits.lstrip("-")) > _MOST_DIGITS:
        raise RequestError(
            f"the body contains an integer with too many digits (allowed: {_MOST_DIGITS}). Send "
            "a smaller number."
        )
    return int(digits)


def _float(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise RequestError(
            "the body contains a number that is too large for a 64-bit float. Send a smaller "
            "number."
        )
    return value


def _refuse_surrogates(value: Any) -> None:
    remaining = [value]
    while remaining:
        item = remaining.pop()
        if isinstance(item, dict):
            remaining += [*item.keys(), *item.values()]
        elif isinstance(item, list):
            remaining += item
        elif isinstance(item, str) and _SURROGATE.search(item):
            raise RequestError(
                "the body contains a string with an unpaired surrogate. Write the character "
                "itself, or both surrogates."
            )


def json_depth(value: Any) -> int:
    """Return the nesting depth of objects and lists; 0 for other values."""
    depth, level = 0, [value]
    while True:
        level = [item for item in level if isinstance(item, dict | list)]
        if not level:
            return depth
        depth += 1
        level = [
            inner for item in level for inner in (item.values() if isinstance(item, dict) else item)
        ]
