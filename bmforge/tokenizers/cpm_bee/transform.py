"""Declarative transforms from records to CPM-Bee documents; they contain no code.

A transform is a nested dict in the shape of the document. Each text in it is a constant, or
``$a.b`` for the value (text or dict) at key ``b`` of key ``a`` in the record. A ``*`` in the source
matches every key at its position; as many ``*`` in the target's keys are replaced by the matched
names.

    {"input": "$text", "options": {"*": "$choices.*.label"}, "question": "?", "<ans>": "$answer"}

Source: ``apply_transform`` of OpenBMB/CPM-Bee, ``cpm_live/training_tasks/bee/pretrain.py``. There
the dict above a target must exist already; here it is created. ``$$`` begins a constant that begins
with ``$``.
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
        ConfigError: `shape` is not a nested dict of texts, or source and target differ in their
            number of stars.
    """

    def __init__(self, shape: Mapping[str, Any]) -> None:
        if not isinstance(shape, Mapping) or not shape:
            raise ConfigError(
                f"transform={shape!r} must be a map such as {{'input': '$text', '<ans>': "
                "'$label'}; programs are not supported."
            )
        self._rules: list[_Rule] = []
        self._add_rules(shape, ())

    def __call__(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Transform a record into a document.

        Raises:
            DataError: the record lacks the value of a source, or two sources have the same target.
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
            raise ConfigError(f"transform: {where!r} is nested deeper than {MAX_NESTING} levels.")
        if isinstance(shape, Mapping):
            for key, value in shape.items():
                self._add_rules(value, (*target, *str(key).split(".")))
            return
        if not isinstance(shape, str):
            raise ConfigError(
                f"transform: {where!r} is {shape!r}, but it must be a text, a constant or a "
                "source such as '$a.b'."
            )
        source = None
        if shape.startswith("$") and not shape.startswith("$$"):
            source = tuple(shape[1:].split("."))
            if "" in source:
                raise ConfigError(
                    f"transform: the source {shape!r} of {where!r} has an empty key (needed: names "
                    "separated by dots, such as '$a.b')."
                )
        stars = 0 if source is None else source.count(_STAR)
        if stars != target.count(_STAR):
            raise ConfigError(
                f"transform: {where!r} has {target.count(_STAR)} stars, but its source "
                f"{shape!r} {stars}. Use the same number."
            )
        self._rules.append(_Rule(target, source, shape[1:] if shape.startswith("$$") else shape))


def _find(
    data: Any, source: tuple[str, ...], at: int, stars: tuple[str, ...]
) -> list[tuple[tuple[str, ...], Any]]:
    """Return all values that `source` matches, each with the keys that its stars matched."""
    if at == len(source):
        return [(stars, data)]
    if not isinstance(data, Mapping):
        raise DataError(
            f"${'.'.join(source)}: {'.'.join(source[:at]) or 'the record'} is {data!r}, which "
            "has no keys. Use a transform that matches the record."
        )
    if source[at] == _STAR:
        return [
            match
            for key, value in data.items()
            for match in _find(value, source, at + 1, (*stars, key))
        ]
    if source[at] not in data:
        raise DataError(
            f"${'.'.join(source)}: the record has no {'.'.join(source[: at + 1])!r} (its keys: "
            f"{list(data)}). Use a transform that matches the record."
        )
    return _find(data[source[at]], source, at + 1, stars)


def _put(document: dict[str, Any], target: tuple[str, ...], value: Any) -> None:
    parent: Any = document
    for key in target[:-1]:
        parent = parent.setdefault(key, {}) if isinstance(parent, dict) else None
    if not isinstance(parent, dict) or target[-1] in parent:
        raise DataError(f"the transform sets {'.'.join(target)!r} twice. Leave one out.")
    parent[target[-1]] = _copy(value)


def _copy(value: Any) -> Any:
    return {k: _copy(v) for k, v in value.items()} if isinstance(value, Mapping) else value
