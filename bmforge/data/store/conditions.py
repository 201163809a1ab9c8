"""Selects documents by metadata conditions such as ``language=zh`` or ``quality>=0.5``."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bmforge.data.store.columns import NAMED, Columns, number_of_date, read_columns
from bmforge.data.store.selected import SelectedStore
from bmforge.data.store.token_store import TokenStore
from bmforge.errors import ConfigError, DataError, suggest

__all__ = ["Condition", "parse_conditions", "select_documents", "select_store"]

_FORM = re.compile(r"\s*([a-z]+)\s*(>=|<=|!=|=|<|>)\s*(.+?)\s*")
_DATE_FORM = re.compile(r"\d{4}(-\d\d(-\d\d)?)?")
_NUMBERS = ("date", "quality")
_COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "=": operator.eq,
    "!=": operator.ne,
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}


@dataclass(frozen=True)
class Condition:
    """One condition on the metadata of a document.

    Attributes:
        column: source, language, license, date or quality.
        sign: ``=``, ``!=``; for dates and qualities also ``<``, ``<=``, ``>``, ``>=``.
        value: one or more names, separated by commas, with the wildcards ``*`` and ``?``; a full or
            partial date; or a number.
    """

    column: str
    sign: str
    value: str

    def mask(self, columns: Columns) -> NDArray[np.bool_]:
        """Return a mask of the matching documents; an unknown value matches only ``!=``."""
        values = columns.rows[self.column]
        if self.column in NAMED:
            patterns = self.value.split(",")
            fits = [
                any(fnmatchcase(name, pattern) for pattern in patterns)
                for name in columns.names[self.column]
            ]
            mask: NDArray[np.bool_] = np.array(fits, dtype=np.bool_)[values]
            return ~mask if self.sign == "!=" else mask
        if self.column == "quality":
            with np.errstate(invalid="ignore"):
                mask = _COMPARE[self.sign](values, np.float32(self.value))
            return mask
        low, high = _dates(self.value)
        inside = (values >= low) & (values < high)
        by_sign = {
            "=": inside,
            "!=": ~inside,
            ">=": values >= low,
            "<": (values < low) & (values > 0),
            ">": values >= high,
            "<=": (values < high) & (values > 0),
        }
        return by_sign[self.sign]


def _dates(value: str) -> tuple[int, int]:
    """Convert a full or partial date to a range of date numbers: first, and one past the last."""
    low = number_of_date(value)
    return low, low + {4: 10000, 7: 100, 10: 1}[len(value)]


def parse_conditions(conditions: Sequence[str]) -> tuple[Condition, ...]:
    """Parse condition strings; a document must match all conditions.

    Raises:
        ConfigError: a condition has an unknown form.
    """
    return tuple(map(_parse, conditions))


def _parse(text: str) -> Condition:
    match = _FORM.fullmatch(text)
    columns = (*NAMED, *_NUMBERS)
    if match is None or match[1] not in columns:
        hint = suggest(match[1], columns) if match else ""
        raise ConfigError(
            f"where={text!r} is not a condition.{hint} Write NAME=VALUE, such as language=zh, "
            f"date>=2020 or quality>=0.5 (names: {', '.join(columns)})."
        )
    condition = Condition(*match.groups())
    if condition.column in NAMED and condition.sign not in ("=", "!="):
        raise ConfigError(
            f"where={text!r} is not supported (allowed for {condition.column}: = and !=). Use "
            "one of these operators."
        )
    if condition.column == "date" and not _DATE_FORM.fullmatch(condition.value):
        raise ConfigError(
            f"the date in where={text!r} is not valid (allowed: the forms 2024, 2024-05 and "
            "2024-05-01). Correct the date."
        )
    if condition.column == "quality":
        try:
            float(condition.value)
        except ValueError:
            raise ConfigError(
                f"the quality in where={text!r} must be compared with a number, such as "
                "quality>=0.5."
            ) from None
    return condition


def select_documents(columns: Columns, conditions: Sequence[Condition]) -> NDArray[np.bool_]:
    """Return a mask of the documents that match all conditions."""
    mask = np.ones(len(columns), dtype=np.bool_)
    for condition in conditions:
        mask &= condition.mask(columns)
    return mask


def select_store(store: TokenStore, conditions: Sequence[Condition]) -> TokenStore:
    """Return a view of the documents that match all conditions; without conditions, `store`.

    Raises:
        DataError: the store has no metadata, or no document matches.
    """
    if not conditions:
        return store
    columns = read_columns(store)
    mask = select_documents(columns, conditions)
    if not mask.any():
        conditions_text = " ".join(
            f"{condition.column}{condition.sign}{condition.value}" for condition in conditions
        )
        listing = "; ".join(
            f"{name}: {', '.join(columns.names[name][1:9]) or 'not known for any document'}"
            for name in NAMED
        )
        raise DataError(
            f"no document of {str(store.prefix)!r} satisfies {conditions_text}. Existing "
            f"values: {listing}."
        )
    return SelectedStore(store, mask)
