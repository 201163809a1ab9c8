"""Readers of SuperGLUE and Yahoo! Answers as `datasets` saves them, of LAMA, and of UltraChat.

`load_dataset("super_glue", "boolq").save_to_disk("FOLDER/super_glue.boolq")` writes a folder for
each split with Arrow files, which pyarrow reads here. The hub is not contacted. The readers of LAMA
and UltraChat have special arguments.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bmforge.compat.openprompt.data_utils.data_processor import (
    DataProcessor,
    Reader,
    define_processor,
)
from bmforge.compat.openprompt.examples import InputExample
from bmforge.data.sources.text_files import read_text
from bmforge.data.tasks.sentences import YAHOO_TOPICS
from bmforge.data.tasks.task import read_records
from bmforge.errors import ConfigError, DataError, MissingDependencyError

__all__ = ["ARROW_PROCESSORS", "OTHER_PROCESSORS", "LAMAProcessor", "UltraChatProcessor"]

Row = dict[str, Any]
_WSC_LABELS = ("Different", "Same")


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
    for row in _read_rows(path):
        words = row["text"].split()
        for index in sorted((row["span1_index"], row["span2_index"]), reverse=True):
            words[index : index + 1] = ["*", words[index], "*"]
        meta = {name: row[name] for name in ("span1_text", "span2_text")}
        label = _WSC_LABELS[row["label"]] if row["label"] >= 0 else None
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


_ANSWERS, _ENTAILMENT = ("No", "Yes"), ("Entailment", "Not Entailment")
# Task, name in the class name, labels, and a reader or the arguments of `_fields`.
_SUPERGLUE: tuple[tuple[str, str, Sequence[Any], Any], ...] = (
    ("multirc", "MultiRC", _ANSWERS, ("paragraph", "question", ("answer",))),
    ("boolq", "BoolQ", _ANSWERS, ("passage", "question")),
    ("cb", "CB", (*_ENTAILMENT, "Neutral"), ("premise", "hypothesis")),
    ("copa", "COPA", _ANSWERS, ("premise", "", ("choice1", "choice2", "question"))),
    ("rte", "RTE", _ENTAILMENT, ("premise", "hypothesis")),
    ("wic", "WiC", ("Same", "Different"), ("sentence1", "sentence2", ("word",))),
    ("wsc", "WSC", _WSC_LABELS, _read_wsc),
    ("record", "Record", (None,), _read_record),
)
ARROW_PROCESSORS: dict[str, type[DataProcessor]] = {
    f"super_glue.{task}": define_processor(
        f"Superglue{name}Processor",
        labels,
        f"super_glue.{task}/{{split}}",
        source if callable(source) else _fields(labels, *source),
        {"dev": "validation", "valid": "validation"},
    )
    for task, name, labels, source in _SUPERGLUE
}
ARROW_PROCESSORS["yahoo_answers_topics"] = define_processor(
    "YahooAnswersTopicsProcessor",
    YAHOO_TOPICS,
    "{split}",
    _fields(YAHOO_TOPICS, "question_title", "question_content"),
    {"dev": "train", "valid": "train"},
)


_VOCABULARY_FILES = {"share": "29k-vocab.json", "lama": "34k-vocab.json"}


class LAMAProcessor(DataProcessor):
    """Reads the facts of one relation whose object is a single token of the model.

    Args:
        base_path: folder with `single_relations` and the files of allowed objects.
        model_name: kind of model, such as "bert"; selects the list of allowed objects.
        tokenizer: tokenizer of the model.
        vocab_strategy: "original" (all tokens), "share" or "lama" (the lists of LAMA's authors).
        relation_id: relation, such as "P1001".
    """

    def __init__(
        self,
        base_path: str | Path,
        model_name: str,
        tokenizer: Any,
        vocab_strategy: str,
        relation_id: str = "P1001",
    ) -> None:
        super().__init__()
        self.relation_id, self.tokenizer = relation_id, tokenizer
        path = Path(base_path) / "single_relations" / f"{relation_id}.jsonl"
        sentence = next(iter(read_records(path))).text("template").replace("[X]", "<text_a>")
        causal = "gpt" in model_name or "megatron" in model_name
        before, _, after = sentence.partition("[Y]")
        self.manual_template = before if causal else f"{before}<mask>{after}"
        self.label_mapping = tokenizer.get_vocab()
        names = self._allowed_names(Path(base_path), model_name, vocab_strategy)
        self.allowed_vocab_ids = [self.label_mapping[name] for name in names]

    def _allowed_names(self, folder: Path, model_name: str, strategy: str) -> list[str]:
        if strategy == "original":
            return self.labels
        if strategy not in _VOCABULARY_FILES:
            strategies = ", ".join(["original", *_VOCABULARY_FILES])
            raise ConfigError(
                f"unknown strategy: vocab_strategy={strategy!r} (supported: {strategies})."
            )
        lists: dict[str, list[str]] = json.loads(read_text(folder / _VOCABULARY_FILES[strategy]))
        name = "gpt2-xl" if "gpt" in model_name else model_name
        if "roberta" in model_name or "megatron" in model_name:
            name = "roberta-large"
        if name not in lists:
            raise ConfigError(
                f"there is no vocabulary list for model_name={model_name!r} (supported: "
                f"{', '.join(lists)})."
            )
        return lists[name]

    def get_manual_template(self) -> str:
        """Return the sentence of the relation as a template."""
        return self.manual_template

    def get_examples(self, data_dir: str | Path, split: str) -> list[InputExample]:
        """Return the relation's facts whose object is a single, allowed token."""
        folder = Path(data_dir) / "fact-retrieval" / "original" / self.relation_id
        allowed, examples = set(self.allowed_vocab_ids), []
        for number, row in enumerate(read_records(folder / f"{split}.jsonl")):
            text = " " + row.text("obj_label")
            ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
            if len(ids) == 1 and ids[0] in allowed:
                example = InputExample(str(number), row.text("sub_label"), label=ids[0])
                examples.append(example)
        return examples


class UltraChatProcessor(DataProcessor):
    """Reads UltraChat's conversations, with one example for each answer."""

    def get_examples(self, data_dir: str | Path, split: str = "") -> list[InputExample]:
        """Return one example per answer, with the earlier turns as `meta["context"]`.

        Args:
            data_dir: the JSON lines file.
            split: without effect; the dataset has one file.
        """
        examples: list[InputExample] = []
        for row in read_records(Path(data_dir)):
            turns = row.texts("data")
            if len(turns) % 2:
                raise DataError(
                    f"{row.place} has {len(turns)} turns (needed: an even number, since every "
                    "question needs an answer)."
                )
            named = [f"{('User', 'Assistant')[n % 2]}: {turn}" for n, turn in enumerate(turns)]
            for n in range(1, len(turns), 2):
                meta = {"context": named[:n]}
                examples.append(InputExample(str(len(examples)), meta=meta, tgt_text=turns[n]))
        return examples


OTHER_PROCESSORS: dict[str, type[DataProcessor]] = {
    "LAMA": LAMAProcessor,
    "ultrachat": UltraChatProcessor,
}
