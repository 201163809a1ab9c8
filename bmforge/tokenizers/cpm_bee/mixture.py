"""Tasks mixed by weight: which instance the global sample number n is, without any state.

An epoch takes round(weight * lines) samples of every source, in an order that depends on the seed
and the epoch. A source goes through all its lines, shuffled anew each time, before one comes again.
Transform, number of in-context examples and the examples themselves are drawn from (seed, n).

Source of the mixture file's form: ``MixedDataset`` of OpenBMB/CPM-Bee. There a transform could be a
Python script; here it is a map only (`cpm_bee_transform.py`).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bmforge.errors import ConfigError, DataError, suggest
from bmforge.tokenizers.cpm_bee.batch import Instance, build_instance
from bmforge.tokenizers.cpm_bee.document import TooLongError, UnwritableError
from bmforge.tokenizers.cpm_bee.lines import parse_document
from bmforge.tokenizers.cpm_bee.tokenizer import CPMBeeTokenizer
from bmforge.tokenizers.cpm_bee.transform import Transform

__all__ = ["DocumentFile", "TaskMixture", "TaskSource", "load_mixture", "reason_of"]

# Why a document is left out.
_REASONS: dict[type[DataError], str] = {
    TooLongError: "longer than the window",
    UnwritableError: "with an answer that the vocabulary cannot spell",
}
_OTHER = "not of a document's form"
_SOURCE_KEYS = ("dataset_name", "task_name", "weight", "path", "transforms", "incontext_weight")


class DocumentFile(Sequence[dict[str, Any]]):
    """The documents of a .jsonl file, one JSON object a line, read when asked for.

    Args:
        path: UTF-8 text; empty lines do not count.

    Raises:
        DataError: the file cannot be read or has no line.

    Memory: 16 bytes a line.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        digest, starts, numbers, at = blake2b(digest_size=16), [], [], 0
        try:
            with self.path.open("rb") as file:
                for number, line in enumerate(file, 1):
                    digest.update(line)
                    if line.strip():
                        starts.append(at)
                        numbers.append(number)
                    at += len(line)
        except OSError as error:
            raise DataError(
                f"cannot read {str(self.path)!r} ({error}): give a .jsonl file"
            ) from error
        if not starts:
            raise DataError(f"{str(self.path)!r} has no document: write one JSON object a line")
        self._starts, self._numbers = np.array(starts), np.array(numbers)
        self.fingerprint = digest.hexdigest()

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: Any) -> Any:
        """Return the document of non-empty line `index`, from 0 on.

        Raises:
            DataError: the line is not a JSON object; see `parse_document`.
        """
        try:
            with self.path.open("rb") as file:
                file.seek(int(self._starts[index]))
                return parse_document(file.readline(), self.where(index))
        except OSError as error:
            raise DataError(f"{self.where(index)} cannot be read ({error})") from error

    def where(self, index: int) -> str:
        """Return the file and the line number, from 1 on, of document `index`."""
        return f"{self.path}, line {self._numbers[index]}"


@dataclass(frozen=True)
class TaskSource:
    """Documents of one task.

    Attributes:
        task: its name.
        documents: a `DocumentFile`, or documents in memory.
        weight: how often each of them comes in an epoch.
        transforms: maps to documents, one drawn each time; none leaves them as they are.
        example_weights: relative frequency of 0, 1, 2, ... in-context examples.

    Raises:
        ConfigError: a weight is out of range, or a transform is none.
        DataError: there is no document.
    """

    task: str
    documents: Sequence[Mapping[str, Any]]
    weight: float = 1.0
    transforms: Sequence[Mapping[str, Any]] = ()
    example_weights: Sequence[float] = (1.0,)
    maps: tuple[Transform, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not (math.isfinite(self.weight) and self.weight > 0):
            raise ConfigError(f"weight={self.weight} of task {self.task!r}: needed is one above 0")
        if isinstance(self.transforms, (str, Mapping)):
            raise ConfigError(
                f"transforms={self.transforms!r} of task {self.task!r}: needed is a list of maps; "
                "a program is never run"
            )
        weights = self.example_weights
        sound = len(weights) > 0 and all(math.isfinite(w) and w >= 0 for w in weights)
        if not sound or sum(weights) == 0:
            raise ConfigError(
                f"incontext_weight={list(weights)} of task {self.task!r}: needed are numbers from "
                "0 on, one of them above 0"
            )
        if len(self.documents) == 0:
            raise DataError(f"task {self.task!r} has no document")
        object.__setattr__(self, "maps", tuple(map(Transform, self.transforms)))

    @property
    def samples_per_epoch(self) -> int:
        """How many samples it gives to an epoch, at least one."""
        return max(1, round(self.weight * len(self.documents)))

    def where(self, index: int) -> str:
        """Name document `index` for a message."""
        if isinstance(self.documents, DocumentFile):
            return self.documents.where(index)
        return f"task {self.task!r}, document {index}"

    def fingerprint(self) -> str:
        """Return hex digits that change when its samples would."""
        if isinstance(self.documents, DocumentFile):
            content = self.documents.fingerprint
        else:
            content = _digest(json.dumps(list(self.documents)))
        settings = (self.task, self.weight, list(self.transforms), list(self.example_weights))
        return _digest(repr((content, settings)))


class TaskMixture:
    """Instances by global sample number, a pure function of (seed, number).

    Args:
        sources: tasks.
        tokenizer: CPM-Bee's.
        max_length: the window in tokens; longer documents are left out.
        seed: decides order, transforms, examples and the order of answer keys.
        skip_bad: leave out documents that cannot be encoded, and count them, instead of raising.

    Attributes:
        samples_per_epoch: samples of one epoch.
        skipped: numbers of the samples left out so far, and why.
        instances_of: for every such reason what is said of the first.

    Raises:
        ConfigError: there is no source.

    Memory: 8 bytes a sample of an epoch, and 8 a document.
    """

    def __init__(
        self,
        sources: Sequence[TaskSource],
        tokenizer: CPMBeeTokenizer,
        max_length: int,
        *,
        seed: int = 0,
        skip_bad: bool = False,
    ) -> None:
        if not sources:
            raise ConfigError("TaskMixture: no source was given; name at least one")
        self.sources, self.tokenizer = tuple(sources), tokenizer
        self.max_length, self.seed, self.skip_bad = max_length, seed, skip_bad
        self._counts = np.array([source.samples_per_epoch for source in sources])
        self.samples_per_epoch = int(self._counts.sum())
        self.skipped: dict[int, str] = {}
        self.instances_of: dict[str, str] = {}
        self._epoch = -1
        self._chosen = self._ranks = np.empty(0, dtype=np.int32)
        self._lines: dict[int, tuple[int, NDArray[np.int64]]] = {}

    def locate(self, number: int) -> tuple[int, int]:
        """Return (source, document in it) of global sample `number`."""
        epoch, at = divmod(number, self.samples_per_epoch)
        self._prepare(epoch)
        source = int(self._chosen[at])
        taken = epoch * int(self._counts[source]) + int(self._ranks[at])
        passes, line = divmod(taken, len(self.sources[source].documents))
        if self._lines.get(source, (-1,))[0] != passes:
            count = len(self.sources[source].documents)
            order = _permutation(count, (self.seed, "lines", source, passes))
            self._lines[source] = passes, order
        return source, int(self._lines[source][1][line])

    def instance(self, number: int) -> Instance | None:
        """Return global sample `number`; None if it is left out.

        Raises:
            DataError: its document is bad, see `encode_document`; it says which.
        """
        try:
            return self._build(number)
        except DataError as error:
            if not (self.skip_bad or isinstance(error, TooLongError)):
                raise DataError(self._describe(number, error)) from error
            self.skipped[number] = self._name_reason(number, error)
        return None

    def survey(self, count: int = 500) -> dict[int, str]:
        """Return which of the first `count` samples would be left out, and why."""
        found = {}
        for number in range(min(count, self.samples_per_epoch)):
            try:
                self._build(number)
            except DataError as error:
                found[number] = self._name_reason(number, error)
        return found

    def _name_reason(self, number: int, error: DataError) -> str:
        """Return in a few words why a sample is left out, and keep the first of its kind."""
        reason = reason_of(error)
        self.instances_of.setdefault(reason, self._describe(number, error))
        return reason

    def _describe(self, number: int, error: DataError) -> str:
        index, line = self.locate(number)
        return f"{self.sources[index].where(line)} and its examples: {error}"

    def _build(self, number: int) -> Instance:
        index, line = self.locate(number)
        source = self.sources[index]
        examples = [self._document(number, source, p) for p in self._examples(number, index, line)]
        return build_instance(
            self._document(number, source, line), self.tokenizer, examples,
            max_length=self.max_length, task=source.task,
            order_key=_digest(repr((self.seed, "answers", number))).encode(),
        )  # fmt: skip

    def fingerprint(self) -> str:
        """Return hex digits that change when a sample would."""
        parts = [source.fingerprint() for source in self.sources]
        return _digest(repr((parts, self.max_length, len(self.tokenizer))))

    def _prepare(self, epoch: int) -> None:
        """Make the table of an epoch: for every sample its source, and how many that had before."""
        if epoch == self._epoch:
            return
        slots = _permutation(self.samples_per_epoch, (self.seed, "epoch", epoch))
        bounds = np.cumsum(self._counts)
        self._chosen = np.searchsorted(bounds, slots, side="right").astype(np.int32)
        self._ranks = np.empty(len(slots), dtype=np.int32)
        for i, count in enumerate(self._counts.tolist()):
            self._ranks[self._chosen == i] = np.arange(count)
        self._epoch = epoch

    def _document(self, number: int, source: TaskSource, line: int) -> Mapping[str, Any]:
        document = source.documents[line]
        if not source.maps:
            return document
        drawn = int(_draw(self.seed, "transform", number) * len(source.maps))
        return source.maps[drawn](document)

    def _examples(self, number: int, index: int, line: int) -> list[int]:
        """Draw the lines of the in-context examples, never the sample's own."""
        source = self.sources[index]
        bounds = np.cumsum(np.asarray(source.example_weights, dtype=np.float64))
        drawn = _draw(self.seed, "examples", number) * bounds[-1]
        count, others = int(np.searchsorted(bounds, drawn, "right")), len(source.documents) - 1
        picks = [int(_draw(self.seed, "example", number, i) * others) for i in range(count)]
        return [pick + (pick >= line) for pick in picks] if others else []


def load_mixture(path: str | os.PathLike[str]) -> list[TaskSource]:
    """Read a mixture file: a JSON list of sources.

    Each is an object with ``path`` (a .jsonl file, relative to the mixture file), ``task_name``,
    and optionally ``weight``, ``transforms``, ``incontext_weight`` and ``dataset_name``.

    Raises:
        ConfigError: the file is not of this form.
        DataError: a file of documents cannot be read.
    """
    file = Path(path)
    try:
        entries = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the mixture {str(file)!r} ({error})") from error
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ConfigError(f"{str(file)!r}: needed is a list of objects with 'path' and 'task_name'")
    sources = []
    for i, entry in enumerate(entries):
        for key in entry:
            if key not in _SOURCE_KEYS:
                raise ConfigError(
                    f"{str(file)!r}, source {i}: {key!r} is unknown.{suggest(key, _SOURCE_KEYS)}"
                )
        if not all(isinstance(entry.get(key), str) for key in ("path", "task_name")):
            raise ConfigError(f"{str(file)!r}, source {i}: 'path' and 'task_name' are needed")
        sources.append(
            TaskSource(
                entry["task_name"], DocumentFile(file.parent / entry["path"]),
                entry.get("weight", 1.0), entry.get("transforms", ()),
                entry.get("incontext_weight", (1.0,)),
            )
        )  # fmt: skip
    return sources


def reason_of(error: DataError) -> str:
    """Return in a few words why a document is left out."""
    return next((text for kind, text in _REASONS.items() if isinstance(error, kind)), _OTHER)


def _digest(text: str) -> str:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _draw(*parts: int | str) -> float:
    """Return a number in [0, 1) that depends on `parts` alone."""
    return (int(_digest(repr(parts)), 16) >> 75) / (1 << 53)


def _permutation(count: int, parts: tuple[int | str, ...]) -> NDArray[np.int64]:
    """Return a permutation of [0, count) that depends on `parts` alone, on any NumPy."""
    bits = np.random.Philox(key=int(_digest(repr(parts)), 16)).random_raw(count)
    return np.argsort(bits, kind="stable")
