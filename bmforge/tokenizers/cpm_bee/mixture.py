"""Weighted mixture of tasks: a stateless mapping from global sample indices to instances.

An epoch contains round(weight * lines) samples from each source, in an order that depends on the
seed and the epoch. All lines of a source are used, in shuffled order, before a line is repeated.
Transform and in-context examples are sampled with a seed that depends on the sample index.
Source of the mixture file's format: ``MixedDataset`` of OpenBMB/CPM-Bee, which also accepts Python
scripts as transforms. Only field mappings are supported here (`transform.py`).
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

# Error class -> reason why a document is skipped.
_REASONS: dict[type[DataError], str] = {
    TooLongError: "longer than the window",
    UnwritableError: "with an answer that the vocabulary cannot encode",
}
_OTHER = "not a valid document"
_SOURCE_KEYS = ("dataset_name", "task_name", "weight", "path", "transforms", "incontext_weight")


class DocumentFile(Sequence[dict[str, Any]]):
    """Documents of a .jsonl file, one JSON object per line, read on demand.

    Args:
        path: UTF-8 file; empty lines are skipped.

    Raises:
        DataError: the file cannot be read or is empty.

    Memory: 16 bytes per line of the file.
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
                f"cannot read {str(self.path)!r} ({error}). Pass the path of a .jsonl file."
            ) from error
        if not starts:
            raise DataError(
                f"{str(self.path)!r} contains no document. Write one JSON object per line."
            )
        self._starts, self._numbers = np.array(starts), np.array(numbers)
        self.fingerprint = digest.hexdigest()

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: Any) -> Any:
        """Return the document in the non-empty line with this index, counted from 0.

        Raises:
            DataError: the line is not a JSON object; see `parse_document`.
        """
        try:
            with self.path.open("rb") as file:
                file.seek(int(self._starts[index]))
                return parse_document(file.readline(), self.where(index))
        except OSError as error:
            raise DataError(
                f"{self.where(index)} cannot be read ({error}). Check whether the file exists."
            ) from error

    def where(self, index: int) -> str:
        """Return the location of a document as text: file and line number, counted from 1."""
        return f"{self.path}, line {self._numbers[index]}"


@dataclass(frozen=True)
class TaskSource:
    """Documents of one task in a mixture.

    Attributes:
        task: name of the task.
        documents: a `DocumentFile`, or documents in memory.
        weight: number of times that each document occurs in an epoch.
        transforms: field mappings; one is sampled for each document; empty for no transform.
        example_weights: relative frequency of 0, 1, 2, ... in-context examples.

    Raises:
        ConfigError: a weight is out of range, or a transform is invalid.
        DataError: the task has no documents.
    """

    task: str
    documents: Sequence[Mapping[str, Any]]
    weight: float = 1.0
    transforms: Sequence[Mapping[str, Any]] = ()
    example_weights: Sequence[float] = (1.0,)
    maps: tuple[Transform, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not (math.isfinite(self.weight) and self.weight > 0):
            raise ConfigError(
                f"weight={self.weight} of task {self.task!r} must be above 0 and finite."
            )
        if isinstance(self.transforms, (str, Mapping)):
            raise ConfigError(
                f"transforms={self.transforms!r} of task {self.task!r} must be a list of mappings "
                "(transform programs are not supported)."
            )
        weights = self.example_weights
        sound = len(weights) > 0 and all(math.isfinite(w) and w >= 0 for w in weights)
        if not sound or sum(weights) == 0:
            raise ConfigError(
                f"incontext_weight={list(weights)} of task {self.task!r} must contain finite "
                "numbers of at least 0, and one of them must be above 0."
            )
        if len(self.documents) == 0:
            raise DataError(
                f"task {self.task!r} has no document. Add a document, or remove the task."
            )
        object.__setattr__(self, "maps", tuple(map(Transform, self.transforms)))

    @property
    def samples_per_epoch(self) -> int:
        """Number of samples per epoch, at least 1."""
        return max(1, round(self.weight * len(self.documents)))

    def where(self, index: int) -> str:
        """Return the location of a document as text, for error messages."""
        if isinstance(self.documents, DocumentFile):
            return self.documents.where(index)
        return f"task {self.task!r}, document {index}"

    def fingerprint(self) -> str:
        """Return a hash of the documents and settings, which changes if the samples change."""
        if isinstance(self.documents, DocumentFile):
            content = self.documents.fingerprint
        else:
            content = _digest(json.dumps(list(self.documents)))
        settings = (self.task, self.weight, list(self.transforms), list(self.example_weights))
        return _digest(repr((content, settings)))


class TaskMixture:
    """Mixture of tasks; an instance depends only on the seed and the global sample index.

    Args:
        sources: tasks.
        tokenizer: CPM-Bee's tokenizer.
        max_length: window in tokens; longer documents are skipped.
        seed: random seed for the order of samples and answers, transforms and examples.
        skip_bad: True to skip and record documents that cannot be encoded; False to raise an error.

    Attributes:
        samples_per_epoch: number of samples per epoch.
        skipped: mapping from the index of a skipped sample to the reason.
        instances_of: mapping from reason to the error message for its first sample.

    Raises:
        ConfigError: the mixture has no sources.

    Memory: 8 bytes per sample of an epoch, and 8 bytes per document.
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
            raise ConfigError("sources=[] of TaskMixture must contain at least one TaskSource.")
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
        """Return (index of the source, index of its document) for a global sample index."""
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
        """Return the instance with a global sample index; None if it is skipped.

        Raises:
            DataError: the document is invalid, see `encode_document`.
        """
        try:
            return self._build(number)
        except DataError as error:
            if not (self.skip_bad or isinstance(error, TooLongError)):
                raise DataError(self._describe(number, error)) from error
            self.skipped[number] = self._name_reason(number, error)
        return None

    def survey(self, count: int = 500) -> dict[int, str]:
        """Check the first `count` samples; return a dict from index to reason for invalid ones."""
        skipped = {}
        for number in range(min(count, self.samples_per_epoch)):
            try:
                self._build(number)
            except DataError as error:
                skipped[number] = self._name_reason(number, error)
        return skipped

    def _name_reason(self, number: int, error: DataError) -> str:
        """Return the reason for skipping a sample; record the first error for each reason."""
        reason = reason_of(error)
        self.instances_of.setdefault(reason, self._describe(number, error).rstrip("."))
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
        """Return a hash of sources, window and vocabulary, which changes if a sample changes."""
        parts = [source.fingerprint() for source in self.sources]
        return _digest(repr((parts, self.max_length, len(self.tokenizer))))

    def _prepare(self, epoch: int) -> None:
        """Compute an epoch's tables: for each sample, its source and its index in the source."""
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
        choice = int(_draw(self.seed, "transform", number) * len(source.maps))
        return source.maps[choice](document)

    def _examples(self, number: int, index: int, line: int) -> list[int]:
        """Return sampled document indices of in-context examples, excluding the sample's own."""
        source = self.sources[index]
        bounds = np.cumsum(np.asarray(source.example_weights, dtype=np.float64))
        point = _draw(self.seed, "examples", number) * bounds[-1]
        count, others = int(np.searchsorted(bounds, point, "right")), len(source.documents) - 1
        picks = [int(_draw(self.seed, "example", number, i) * others) for i in range(count)]
        return [pick + (pick >= line) for pick in picks] if others else []


def load_mixture(path: str | os.PathLike[str]) -> list[TaskSource]:
    """Read a mixture file, which is a JSON list of sources.

    Each source is an object with ``path`` (a .jsonl file, relative to the mixture file),
    ``task_name``, and optionally ``weight``, ``transforms``, ``incontext_weight`` and
    ``dataset_name``.

    Raises:
        ConfigError: the file has a different format.
        DataError: a document file cannot be read.
    """
    file = Path(path)
    try:
        entries = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"cannot read the mixture file {str(file)!r} ({error}). Pass the path of a JSON file."
        ) from error
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ConfigError(
            f"{str(file)!r} must contain a list of objects with 'path' and 'task_name'."
        )
    sources = []
    for i, entry in enumerate(entries):
        for key in entry:
            if key not in _SOURCE_KEYS:
                raise ConfigError(
                    f"source {i} in {str(file)!r} has the unknown key {key!r} (supported: "
                    f"{', '.join(_SOURCE_KEYS)}).{suggest(key, _SOURCE_KEYS)}"
                )
        if not all(isinstance(entry.get(key), str) for key in ("path", "task_name")):
            raise ConfigError(
                f"source {i} in {str(file)!r} needs the string fields 'path' and 'task_name'."
            )
        sources.append(
            TaskSource(
                entry["task_name"], DocumentFile(file.parent / entry["path"]),
                entry.get("weight", 1.0), entry.get("transforms", ()),
                entry.get("incontext_weight", (1.0,)),
            )
        )  # fmt: skip
    return sources


def reason_of(error: DataError) -> str:
    """Return a short text that says why a document is skipped."""
    return next((text for kind, text in _REASONS.items() if isinstance(error, kind)), _OTHER)


def _digest(text: str) -> str:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _draw(*parts: int | str) -> float:
    """Return a pseudorandom number in [0, 1) that depends only on `parts`."""
    return (int(_digest(repr(parts)), 16) >> 75) / (1 << 53)


def _permutation(count: int, parts: tuple[int | str, ...]) -> NDArray[np.int64]:
    """Return a permutation of [0, count) that depends only on `parts`, with any NumPy version."""
    bits = np.random.Philox(key=int(_digest(repr(parts)), 16)).random_raw(count)
    return np.argsort(bits, kind="stable")
