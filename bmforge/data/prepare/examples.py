"""Decontamination step: drops or cuts documents that contain examples of test sets."""

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
    """Yield the name and text of every example in some test sets.

    Args:
        sets: paths of .jsonl, .json or .parquet files, all strings of which are used, or
            ``TASK=FOLDER``.

    Raises:
        ConfigError: the task or the file does not exist.
        DataError: a file cannot be read, or does not have its task's format.
    """
    for option in sets:
        name, mark, folder = option.partition("=")
        if mark and not Path(option).exists():
            yield from _read_task(find_task(name).name, folder)
        elif Path(option).is_file():
            yield from examples_of(option)
        else:
            raise ConfigError(
                f"decontaminate={option!r} is not a file. Pass .jsonl, .json or .parquet files, "
                "or TASK=FOLDER such as BoolQ=superglue."
            )


def _read_task(name: str, folder: str) -> Iterator[tuple[str, str]]:
    """Yield the texts of all existing splits of a task."""
    has_split, errors = False, []
    for split in find_task(name).files:
        try:
            examples = read_task(name, folder, split)
        except DataError as error:
            errors.append(str(error))
            continue
        has_split = True
        for number, example in enumerate(examples, 1):
            texts = [*example.fields.items(), *(("choice", choice) for choice in example.choices)]
            yield from ((f"{name}.{split}:{number}.{field}", text) for field, text in texts)
    if not has_split:
        raise DataError(f"no split of task {name} can be read in {folder!r}. {' '.join(errors)}")


@dataclass(frozen=True)
class DropExamples:
    """A step that drops documents containing test examples, or cuts the examples out.

    Each worker process reads the test sets itself, so the pickled step is small.

    Attributes:
        sets: test sets in the form that `read_examples` accepts.
        cut: True to cut the examples out instead of dropping the document.
        digest: hash of the examples when the `prepare` run started.
    """

    sets: tuple[str, ...]
    cut: bool
    digest: str = ""

    def opened(self) -> DropExamples:
        """Return a copy of the step that contains the digest of the current test sets.

        Raises:
            ConfigError: no example is long enough to be matched.
        """
        index = _open(self.sets)
        if not index.names:
            raise ConfigError(
                f"none of the {index.too_short} texts of decontaminate={list(self.sets)} is long "
                "enough to exclude chance matches (needed: at least 8 words, or 15 Chinese "
                "characters). Remove these sets from decontaminate."
            )
        return DropExamples(self.sets, self.cut, index.digest())

    @property
    def version(self) -> str:
        """Version of the step: a string that changes whenever its results may change."""
        return f"overlap=1 cut={self.cut} {self.digest}"

    def __call__(self, document: Document) -> Document | Drop:
        """Return the document if it contains no test example.

        If it contains any, return the document without them if `cut` is True, else a `Drop` that
        names the test example.
        """
        return _step(self.sets, self.cut, self.digest)(document)


@lru_cache(maxsize=1)
def _step(sets: tuple[str, ...], cut: bool, digest: str) -> Decontaminate:
    index = _open(sets)
    if index.digest() != digest:
        raise DataError(
            f"decontaminate={list(sets)} changed while its files were being read. Run the command "
            "again."
        )
    return Decontaminate(index, cut)


def _open(sets: tuple[str, ...]) -> OverlapIndex:
    return OverlapIndex(read_examples(sets))
