"""Selects documents from a prepared directory or a token store.

``corpus?language=zh&date>=2020`` reads only the documents that match, so that a mixture can weight
parts of one corpus.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bmforge.data import Condition, TokenStore, open_store, parse_conditions, select_store
from bmforge.data.prepare.record import RECORD_NAME, PrepareReport, read_record
from bmforge.errors import ConfigError, DataError
from bmforge.recipes.inputs.splitting import StorePart

__all__ = ["check_where", "open_text", "place_of", "read_report", "split_path", "train_prefix"]

_MARK, _AND = "?", "&"


def split_path(path: str) -> tuple[str, tuple[Condition, ...]]:
    """Split a path with conditions into the bare path and the conditions.

    Raises:
        ConfigError: a condition is malformed.
    """
    bare_path, mark, conditions = path.partition(_MARK)
    if not mark or Path(path).exists():
        return path, ()
    return bare_path, parse_conditions(conditions.split(_AND))


def place_of(path: str) -> str:
    """Return a data path without its conditions."""
    return split_path(path)[0]


def check_where(where: Sequence[str], paths: Sequence[str], split: Sequence[float]) -> None:
    """Raise `ConfigError` for malformed conditions, or conditions combined with `data.split`."""
    conditions = [
        *parse_conditions(where),
        *(condition for path in paths for condition in split_path(path)[1]),
    ]
    if conditions and split:
        raise ConfigError(
            f"data.split={tuple(split)} divides whole token stores, so it cannot be used "
            "together with data.where, which selects documents. Leave one of them out."
        )


def open_text(path: str, where: Sequence[str] = (), split: Sequence[float] = ()) -> TokenStore:
    """Open the training documents at a path.

    Args:
        path: a prepared directory, or a bare store without ``.bin``, with conditions after ``?``.
        where: further conditions.
        split: relative sizes of the splits of a bare store's documents; the first split is opened.

    Raises:
        DataError: a store is missing or damaged, or no document is left.
    """
    bare_path, own = split_path(path)
    if split:
        return StorePart(bare_path, split, 0)
    return select_store(open_store(train_prefix(bare_path)), (*parse_conditions(where), *own))


def read_report(path: str) -> PrepareReport | None:
    """Return the report of a prepared directory; None for a bare token store."""
    folder = Path(place_of(path))
    return read_record(folder)[0] if (folder / RECORD_NAME).exists() else None


def train_prefix(path: str) -> Path:
    """Return the path prefix of the training split's token store in a prepared directory.

    A path that is itself the prefix of a token store is returned unchanged.

    Raises:
        DataError: the directory was not written by `prepare`, or is a subdirectory of its output.
    """
    directory = Path(place_of(path))
    if not directory.is_dir() or (directory / "train").is_dir():
        return directory / "train" / "tokens" if directory.is_dir() else directory
    above = directory.absolute().parent
    if (above / RECORD_NAME).exists():
        raise DataError(f"{path!r} is inside a prepared directory. Pass {str(above)!r} instead.")
    raise DataError(
        f"{path!r} is not a prepared directory. Pass an output directory of `bmforge "
        "prepare`, or the path of a token store without .bin/.idx."
    )
