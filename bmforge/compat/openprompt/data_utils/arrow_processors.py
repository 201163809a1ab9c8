"""Readers of SuperGLUE and Yahoo! Answers as the `datasets` package saves them.

`load_dataset("super_glue", "boolq").save_to_disk("FOLDER/super_glue.boolq")` writes a folder for
each split with Arrow files, which pyarrow reads here. The hub is not contacted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bmforge.compat.openprompt.data_utils.data_processor import (
    DataProcessor,
    Reader,
    define_processor,
)
from bmforge.data.tasks.sentences import YAHOO_TOPICS
from bmforge.errors import DataError, MissingDependencyError

__all__ = ["ARROW_PROCESSORS"]

Row = dict[str, Any]


def _read_rows(folder: Path) -> Iterator[Row]:
    """Yield the rows of a split's Arrow files."""
    try:
        import pyarrow as pa
    except ImportError as error:
        raise MissingDependencyError("pyarrow", "data", "reading a saved dataset") from error
    files = sorted(folder.glob("*.arrow"))
    if not files:
        raise DataError(f"{str(folder)!r} has no .arrow file. Save the split with save_to_disk().")
    for file in files:
        with pa.memory_map(str(file)) as source:
            try:
                table = pa.ipc.open_stream(source).read_all()
            except pa.ArrowInvalid as error:
                raise DataError(
                    f"{str(file)!r} is not an Arrow stream ({error}). Save the split again with "
                    "save_to_disk()."
                ) from error
            yield from table.to_pylist()


def _fields(
    labels: Sequence[str], text_a: str, text_b: str = "", meta: Sequence[str] = ()
) -> Reader:
    """Return a reader for rows with one or two text fields and a class index (-1 if unlabeled).

    The fields in `meta` are copied to `InputExample.meta`.
    """

    def read(path: Path, split: str) -> Iterator[Row]:
        for row in _read_rows(path):
            index = row["idx"] if "idx" in row else row["id"]
            if isinstance(index, dict):  # MultiRC
                index = f"p{index['paragraph']}-q{index['question']}-a{index['answer']}"
            number = row["label"] if "label" in row else row["topic"]
            label = labels[number] if number >= 0 else None
            values: Row = {"text_a": row[text_a], "label": label, "guid": str(index)}
            if text_b:
                values["text_b"] = row[text_b]
            yield {**values, "meta": {name: row[name] for name in meta}}

    return read


def _read_wsc(path: Path, split: str) -> Iterator[Row]:
    """Yield WSC texts in which both spans are between asterisks."""
    labels = _LABELS["wsc"]
    for row in _read_rows(path):
        words = row["text"].split()
        for index in sorted((row["span1_index"], row["span2_index"]), reverse=True):
            words[index : index + 1] = ["*", words[index], "*"]
        meta = {name: row[name] for name in ("span1_text", "span2_text")}
        label = labels[row["label"]] if row["label"] >= 0 else None
        yield {"text_a": " ".join(words), "meta": meta, "label": label, "guid": str(row["idx"])}


def _read_record(path: Path, split: str) -> Iterator[Row]:
    """Yield ReCoRD questions with their entities and the first answer."""
    for row in _read_rows(path):
        meta = {
            "passage": row["passage"].replace("\n", " "),
            "query": row["query"],
            "entities": ", ".join(row["entities"]),
            "answers": (row["answers"] or [""])[0],
        }
        yield {"meta": meta, "label": None, "guid": str(row["idx"])}


_LABELS: dict[str, tuple[Any, ...]] = {
    "multirc": ("No", "Yes"),
    "boolq": ("No", "Yes"),
    "cb": ("Entailment", "Not Entailment", "Neutral"),
    "copa": ("No", "Yes"),
    "rte": ("Entailment", "Not Entailment"),
    "wic": ("Same", "Different"),
    "wsc": ("Different", "Same"),
    "record": (None,),
}
_READERS: dict[str, Reader] = {
    "multirc": _fields(_LABELS["multirc"], "paragraph", "question", ("answer",)),
    "boolq": _fields(_LABELS["boolq"], "passage", "question"),
    "cb": _fields(_LABELS["cb"], "premise", "hypothesis"),
    "copa": _fields(_LABELS["copa"], "premise", meta=("choice1", "choice2", "question")),
    "rte": _fields(_LABELS["rte"], "premise", "hypothesis"),
    "wic": _fields(_LABELS["wic"], "sentence1", "sentence2", ("word",)),
    "wsc": _read_wsc,
    "record": _read_record,
}
_NAMES = {"multirc": "MultiRC", "boolq": "BoolQ", "wic": "WiC", "record": "Record"}
_VALIDATION = {"dev": "validation", "valid": "validation"}

ARROW_PROCESSORS: dict[str, type[DataProcessor]] = {
    f"super_glue.{task}": define_processor(
        f"Superglue{_NAMES.get(task, task.upper())}Processor",
        _LABELS[task],
        f"super_glue.{task}/{{split}}",
        read,
        _VALIDATION,
    )
    for task, read in _READERS.items()
}
ARROW_PROCESSORS["yahoo_answers_topics"] = define_processor(
    "YahooAnswersTopicsProcessor",
    YAHOO_TOPICS,
    "{split}",
    _fields(YAHOO_TOPICS, "question_title", "question_content"),
    {"dev": "train", "valid": "train"},
)
