"""Replaces oneOf by anyOf in JSON schemas where both mean the same.

llguidance supports only anyOf. Schemas of discriminated unions, as pydantic writes them, have a
oneOf whose cases exclude each other, so that an instance never matches two of them.
"""

from __future__ import annotations

from itertools import combinations
from typing import Any

__all__ = ["replace_one_of"]

# Keywords whose values are data.
_DATA = frozenset(("const", "enum", "default", "examples"))
# Limits on the work for schemas of unknown clients; larger schemas keep their oneOf.
_MAX_DEPTH, _MAX_ITEMS, _MAX_PAIRS = 64, 64, 2048


def replace_one_of(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema with anyOf instead of every oneOf whose cases exclude each other."""
    replaced: dict[str, Any] = _Replacer(schema).replace(schema)
    return replaced


class _Replacer:
    """Replaces oneOf in one schema.

    Args:
        root: schema that references refer to.
    """

    def __init__(self, root: dict[str, Any]) -> None:
        self._root, self._pairs = root, 0

    def replace(self, value: Any, depth: int = 0) -> Any:
        """Return a copy of a part of the schema with anyOf where it means the same."""
        if depth > _MAX_DEPTH:
            return value
        if isinstance(value, list):
            return [self.replace(item, depth + 1) for item in value]
        if not isinstance(value, dict):
            return value
        if "anyOf" not in value and self._are_apart(value.get("oneOf")):
            value = {"anyOf" if name == "oneOf" else name: item for name, item in value.items()}
        return {
            name: item if name in _DATA else self.replace(item, depth + 1)
            for name, item in value.items()
        }

    def _are_apart(self, cases: Any) -> bool:
        """Return True if it is certain that no instance matches two of the cases."""
        if not isinstance(cases, list) or len(cases) > _MAX_ITEMS:
            return False
        cases = [self._resolve(case) for case in cases]
        self._pairs += len(cases) * (len(cases) - 1) // 2
        return self._pairs <= _MAX_PAIRS and all(
            self._exclude(first, second) for first, second in combinations(cases, 2)
        )

    def _exclude(self, first: Any, second: Any) -> bool:
        """Return True if no instance matches both schemas, by their values, types or tags."""
        if _are_apart(first, second):
            return True
        types = _types(first), _types(second)
        if not isinstance(first, dict) or not isinstance(second, dict) or {"object"} not in types:
            return False  # properties restrict only objects
        tags = _required(first) & _required(second)
        return any(
            _are_apart(
                self._resolve(first["properties"][tag]), self._resolve(second["properties"][tag])
            )
            for tag in tags
        )

    def _resolve(self, schema: Any) -> Any:
        """Follow references to parts of the same document."""
        for _ in range(8):
            target = schema.get("$ref") if isinstance(schema, dict) else None
            if not isinstance(target, str) or not target.startswith("#/"):
                return schema
            schema = self._root
            for name in target[2:].split("/"):
                name = name.replace("~1", "/").replace("~0", "~")
                schema = schema.get(name) if isinstance(schema, dict) else None
        return schema


def _are_apart(first: Any, second: Any) -> bool:
    """Return True if two schemas have no common value or type."""
    values = _values(first), _values(second)
    if values[0] is not None and values[1] is not None:
        return not values[0] & values[1]
    types = _types(first), _types(second)
    return types[0] is not None and types[1] is not None and not types[0] & types[1]


def _values(schema: Any) -> set[Any] | None:
    """Return the allowed values if the schema lists them; otherwise None."""
    if not isinstance(schema, dict) or not schema.keys() & {"const", "enum"}:
        return None
    values = [schema["const"]] if "const" in schema else schema["enum"]
    if not isinstance(values, list) or len(values) > _MAX_ITEMS:
        return None
    # 1 and 1.0 are equal in JSON schemas and in Python. True equals 1 only in Python, which at
    # worst keeps a oneOf. Lists and objects with numbers are not compared.
    if any(isinstance(value, list | dict) for value in values):
        return None
    return set(values)


def _types(schema: Any) -> set[str] | None:
    """Return the allowed types, with integers as numbers; None if every type is allowed."""
    types = schema.get("type") if isinstance(schema, dict) else None
    names = [types] if isinstance(types, str) else types
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return None
    return {"number" if name == "integer" else name for name in names}


def _required(schema: Any) -> set[str]:
    """Return the first required properties that have a schema."""
    properties, names = schema.get("properties"), schema.get("required")
    if not isinstance(properties, dict) or not isinstance(names, list):
        return set()
    return {name for name in names[:_MAX_ITEMS] if isinstance(name, str) and name in properties}
