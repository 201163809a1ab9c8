"""Turn a record into a CPM-Bee document by a map: data, never a program.

A transform is a nested dict in the shape of the wanted document. Each text in it is a constant, or
``$a.b`` for what the record has at key ``b`` of key ``a``, text or dict. A ``*`` in the source
stands for every key there; the same number of ``*`` in the target's keys take their names.

    {"input": "$text", "options": {"*": "$choices.*.label"}, "question": "?", "<ans>": "$answer"}

Source: ``apply_transform`` of OpenBMB/CPM-Bee, ``cpm_live/training_tasks/bee/pretrain.py``. There
the dict above a target must have been copied before; here it is made. ``$$`` begins a constant that
begins with ``$``.
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
    """A map from records to documents.

    Args:
        shape: nested dict of texts; keys with dots are keys one below the other.

    Raises:
        ConfigError: it is no such dict, or the stars of a source and its target differ in number.
    """

    def __init__(self, shape: Mapping[str, Any]) -> None:
        if not isinstance(shape, Mapping) or not shape:
            raise ConfigError(
                f"transform={shape!r}: needed is a map such as {{'input': '$text', '<ans>': "
                "'$label'}; a program is never run"
            )
        self._rules: list[_Rule] = []
        self._add_rules(shape, ())

    def __call__(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Return the document that `record` becomes.

        Raises:
            DataError: the record lacks what a source names, or two rules write to one place.
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
            raise ConfigError(f"transform: nested deeper than {MAX_NESTING} at {where!r}")
        if isinstance(shape, Mapping):
            for key, value in shape.items():
                self._add_rules(value, (*target, *str(key).split(".")))
            return
        if not isinstance(shape, str):
            raise ConfigError(
                f"transform: {where!r} is {shape!r}: needed is a text, constant or a source such "
                "as '$a.b'"
            )
        source = None
        if shape.startswith("$") and not shape.startswith("$$"):
            source = tuple(shape[1:].split("."))
            if "" in source:
                raise ConfigError(f"transform: {where!r} takes {shape!r}, which names no key")
        stars = 0 if source is None else source.count(_STAR)
        if stars != target.count(_STAR):
            raise ConfigError(
                f"transform: {where!r} has {target.count(_STAR)} stars and its source {shape!r} "
                f"{stars}: give both the same number"
            )
        self._rules.append(_Rule(target, source, shape[1:] if shape.startswith("$$") else shape))


def _find(
    data: Any, source: tuple[str, ...], at: int, stars: tuple[str, ...]
) -> list[tuple[tuple[str, ...], Any]]:
    """Return (what the stars stand for, value) for everything that `source` names."""
    if at == len(source):
        return [(stars, data)]
    if not isinstance(data, Mapping):
        raise DataError(
            f"${'.'.join(source)}: {'.'.join(source[:at]) or 'the record'} is {data!r}, which has "
            f"no keys: the transform does not fit this record"
        )
    if source[at] == _STAR:
        return [
            found
            for key, value in data.items()
            for found in _find(value, source, at + 1, (*stars, key))
        ]
    if source[at] not in data:
        raise DataError(
            f"${'.'.join(source)}: the record has no {'.'.join(source[: at + 1])!r} (there are "
            f"{list(data)}): the transform does not fit this record"
        )
    return _find(data[source[at]], source, at + 1, stars)


def _put(document: dict[str, Any], target: tuple[str, ...], value: Any) -> None:
    place: Any = document
    for key in target[:-1]:
        place = place.setdefault(key, {}) if isinstance(place, dict) else None
    if not isinstance(place, dict) or target[-1] in place:
        raise DataError(f"the transform writes twice to {'.'.join(target)!r}: leave one out")
    place[target[-1]] = _copy(value)


def _copy(value: Any) -> Any:
    return {k: _copy(v) for k, v in value.items()} if isinstance(value, Mapping) else value
