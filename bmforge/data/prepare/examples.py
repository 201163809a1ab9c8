"""Test examples that may not be in a corpus: which sets are meant, and the step that finds them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from bmforge.data.clean.drop import Drop
from bmforge.data.dedup.overlap import Decontaminate, OverlapIndex, examples_of
from bmforge.data.sources.document import Document
from bmforge.data.tasks import find_task, read_task
from bmforge.errors import ConfigError, DataError

__all__ = ["DropExamples", "read_examples"]


def read_examples(sets: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Yield name and text of every example of test sets.

    Args:
        sets: paths of .jsonl files, of which all strings count, or ``TASK=FOLDER``.

    Raises:
        ConfigError: no such task or file.
        DataError: a file cannot be read, or is not of its task's form.
    """
    for one in sets:
        name, mark, folder = one.partition("=")
        if mark and not Path(one).exists():
            yield from _read_task(find_task(name).name, folder)
        elif Path(one).is_file():
            yield from examples_of(one)
        else:
            raise ConfigError(
                f"decontaminate={one!r} is no file: give .jsonl files, or TASK=FOLDER such as "
                "BoolQ=superglue"
            )


def _read_task(name: str, folder: str) -> Iterator[tuple[str, str]]:
    """Yield the texts of all splits that are there."""
    found, errors = False, []
    for split in find_task(name).files:
        try:
            examples = read_task(name, folder, split)
        except DataError as error:
            errors.append(str(error))
            continue
        found = True
        for number, example in enumerate(examples, 1):
            texts = [*example.fields.items(), *(("choice", one) for one in example.choices)]
            yield from ((f"{name}.{split}:{number}.{field}", text) for field, text in texts)
    if not found:
        raise DataError("; ".join(errors))


@dataclass(frozen=True)
class DropExamples:
    """A step that drops documents containing test examples, or cuts the examples out.

    A worker opens the sets itself; what it needs to be told is small.

    Attributes:
        sets: as `read_examples` takes them.
        cut: cut the examples out.
        digest: of the examples, as they were when the work began.
    """

    sets: tuple[str, ...]
    cut: bool
    digest: str = ""

    def opened(self) -> DropExamples:
        """Return a copy of the step with the digest of the current test sets.

        Raises:
            ConfigError: they hold no example that is long enough to be found.
        """
        index = _open(self.sets)
        if not index.names:
            raise ConfigError(
                f"decontaminate={list(self.sets)}: none of {index.too_short} texts is long enough "
                "to be told from chance (8 words, or 15 Chinese characters)"
            )
        return DropExamples(self.sets, self.cut, index.digest())

    @property
    def version(self) -> str:
        """What changes whenever a document may be judged differently."""
        return f"overlap=1 cut={self.cut} {self.digest}"

    def __call__(self, document: Document) -> Document | Drop:
        """Return the document, perhaps without examples, or which one it holds."""
        return _step(self.sets, self.cut, self.digest)(document)


@lru_cache(maxsize=1)
def _step(sets: tuple[str, ...], cut: bool, digest: str) -> Decontaminate:
    index = _open(sets)
    if index.digest() != digest:
        raise DataError(f"decontaminate={list(sets)} changed while they were read: prepare again")
    return Decontaminate(index, cut)


def _open(sets: tuple[str, ...]) -> OverlapIndex:
    return OverlapIndex(read_examples(sets))
