"""Declarative transforms of records to CPM-Bee documents; they contain no code.

A transform is a nested dict with the structure of the document. Each text in it is a constant, or a
source such as ``$a.b``, the value (text or dict) at ``record["a"]["b"]``. A ``*`` in a source
matches every key at its position; the keys of the target contain the same number of ``*``, which
are replaced with the matched keys.

    {"input": "$text", "options": {"*": "$choices.*.label"}, "question": "?", "<ans>": "$answer"}

Source: ``apply_transform`` of OpenBMB/CPM-Bee, ``cpm_live/training_tasks/bee/pretrain.py``. There
the parent dict of a target must exist already; here it is created. A constant that begins with
``$`` is written with ``$$``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from bmforge.errors import ConfigError, DataError
from bmforge.tokenizers.cpm_bee.segments import MAX_NESTING

__all__ = ["Transform"]

_STAR = "*"


class _Rule(NamedTuple):
    target: tuple[str, ...]
    source: tuple[str, ...] | None
    constant: str = ""


class Transform:
    """Transform that converts records to documents.

    Args:
        shape: nested dict of texts; dots in keys separate nested keys.

    Raises:
        ConfigError: `shape` is not a nested dict of texts, or a source and its target have
            different numbers of wildcards (`*`).
    """

    def __init__(self, shape: Mapping[str, Any]) -> None:
        if not isinstance(shape, Mapping) or not shape:
            raise ConfigError(
                f"transform={shape!r} must be a mapping such as {{'input': '$text', '<ans>': "
                "'$label'} (transform programs are not supported)."
            )
        self._rules: list[_Rule] = []
        self._add_rules(shape, ())

    def __call__(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Transform a record into a document.

        Raises:
            DataError: the record has no value for a source, or two values have the same target.
        """
        document: dict[str, Any] = {}
        for rule in self._rules:
            if rule.source is None:
                _put(document, rule.target, rule.constant)
                continue
            for stars, value in _find(record, rule.source, 0, ()):
                names = iter(stars)
                target = tuple(next(names) if key == _STAR else key for key in rule.target)
                _put(document, target, value)
        return document

    def _add_rules(self, shape: Any, target: tuple[str, ...]) -> None:
        where = ".".join(target)
        if len(target) > MAX_NESTING:
            raise ConfigError(
                f"the transform's target {where!r} is nested deeper than {MAX_NESTING} levels. Use "
                "fewer levels."
            )
        if isinstance(shape, Mapping):
            for key, value in shape.items():
                self._add_rules(value, (*target, *str(key).split(".")))
            return
        if not isinstance(shape, str):
            raise ConfigError(
                f"the transform sets {where!r} to {shape!r} (allowed: a constant string, or a "
                "source such as '$a.b')."
            )
        source = None
        if shape.startswith("$") and not shape.startswith("$$"):
            source = tuple(shape[1:].split("."))
            if "" in source:
                raise ConfigError(
                    f"the transform's source {shape!r} of {where!r} has an empty key. Write keys "
                    "of the record, separated by dots, such as '$a.b'."
                )
        stars = 0 if source is None else source.count(_STAR)
        if stars != target.count(_STAR):
            raise ConfigError(
                f"the transform's target {where!r} has {target.count(_STAR)} stars, but its source "
                f"{shape!r} has {stars}. Use the same number of stars."
            )
        self._rules.append(_Rule(target, source, shape[1:] if shape.startswith("$$") else shape))


def _find(
    data: Any, source: tuple[str, ...], at: int, stars: tuple[str, ...]
) -> list[tuple[tuple[str, ...], Any]]:
    """Return (keys matched by its wildcards, value) for each match of `source` in a record."""
    if at == len(source):
        return [(stars, data)]
    if not isinstance(data, Mapping):
        raise DataError(
            f"the transform's source ${'.'.join(source)} does not match the record, because "
            f"{'.'.join(source[:at]) or 'the record'} is {data!r}, which has no keys. Use a "
            "transform that matches the record."
        )
    if source[at] == _STAR:
        return [
            match
            for key, value in data.items()
            for match in _find(value, source, at + 1, (*stars, key))
        ]
    if source[at] not in data:
        raise DataError(
            f"the transform's source ${'.'.join(source)} does not match the record, which has no "
            f"{'.'.join(source[: at + 1])!r} (existing keys: {list(data)}). Use a transform that "
            "matches the record."
        )
    return _find(data[source[at]], source, at + 1, stars)


def _put(document: dict[str, Any], target: tuple[str, ...], value: Any) -> None:
    parent: Any = document
    for key in target[:-1]:
        parent = parent.setdefault(key, {}) if isinstance(parent, dict) else None
    if not isinstance(parent, dict) or target[-1] in parent:
        raise DataError(f"the transform sets {'.'.join(target)!r} twice. Remove one of the two.")
    parent[target[-1]] = _copy(value)


def _copy(value: Any) -> Any:
    return {k: _copy(v) for k, v in value.items()} if isinstance(value, Mapping) else value
