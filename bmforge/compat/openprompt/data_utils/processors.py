"""OpenPrompt's dataset readers: the table of its processors and the formats of their files.

The files are those that OpenPrompt's download scripts fetch (LOTClass, FewGLUE, TACRED, ...), which
differ from the original data sets that `bmforge.data.tasks` reads. Three faults of the original are
not repeated: COPA examples with swapped choices get the swapped label, WSC's training split keeps
its true examples (the original kept none), and reading ReCoRD raises no NameError.
"""

from __future__ import annotations

import csv
import io
import logging
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from bmforge.compat.openprompt.data_utils.data_processor import (
    DataProcessor,
    FileProcessor,
    Reader,
    define_processor,
)
from bmforge.compat.openprompt.data_utils.special_processors import (
    ARROW_PROCESSORS,
    OTHER_PROCESSORS,
)
from bmforge.data.sources.text_files import read_lines, read_text
from bmforge.data.tasks.cloze import FEW_NERD_TYPES, read_few_nerd
from bmforge.data.tasks.sentences import YAHOO_TOPICS
from bmforge.data.tasks.task import TaskRecord, read_json, read_records
from bmforge.errors import DataError

__all__ = ["CLASSES", "PROCESSORS", "ChnSentiCorp"]

Values = dict[str, Any]
_LOG = logging.getLogger(__name__)


def _cells_error(path: Path, number: int, cells: Sequence[str], num_cells: int) -> DataError:
    return DataError(
        f"{str(path)!r}, line {number} has {len(cells)} cells (needed: {num_cells}). Correct or "
        "remove the line."
    )


def _csv_rows(labels: Sequence[str], fields: int) -> Reader:
    """Return a reader for CSV rows with a 1-based class index and then text columns.

    All text columns but the last are joined into one.
    """

    def read(path: Path, split: str) -> Iterator[Values]:
        for number, cells in enumerate(csv.reader(io.StringIO(read_text(path))), 1):
            if len(cells) != fields + 1:
                raise _cells_error(path, number, cells, fields + 1)
            if not (cells[0].isdigit() and 1 <= int(cells[0]) <= len(labels)):
                raise DataError(
                    f"{str(path)!r}, line {number}: class={cells[0]!r} must be from 1 to "
                    f"{len(labels)}."
                )
            texts = [
                (cell.replace("\\n", " ") if fields > 2 else cell).replace("\\", " ")
                for cell in cells[1:]
            ]
            label = labels[int(cells[0]) - 1]
            yield {"text_a": " ".join(texts[:-1]), "text_b": texts[-1], "label": label}

    return read


def _labeled_lines(labels: Sequence[str], titled: bool = False) -> Reader:
    """Return a reader for files with a text per line; class indices are in `SPLIT_labels.txt`.

    Args:
        labels: label of each class.
        titled: True if a line's first sentence is a title; it becomes `text_a`, the rest `text_b`.
    """

    def read(path: Path, split: str) -> Iterator[Values]:
        classes = read_lines(path.with_name(f"{path.stem}_labels.txt"))
        lines = read_lines(path)
        if len(classes) != len(lines):
            raise DataError(
                f"{str(path)!r} has {len(lines)} lines, but {len(classes)} labels (needed: one "
                "label per line). Download the dataset again."
            )
        for line, number in zip(lines, classes, strict=True):
            title, _, text = line.strip().partition(". ")
            texts = {"text_a": f"{title}.", "text_b": text} if titled else {"text_a": line.strip()}
            yield {**texts, "label": labels[int(number)]}

    return read


def _tsv_columns(label: int, *texts: int) -> Reader:
    """Return a reader for tab-separated files with a header line.

    Args:
        label: index of the label's column.
        texts: indices of the columns of `text_a` and `text_b`.
    """

    def read(path: Path, split: str) -> Iterator[Values]:
        for number, line in enumerate(read_lines(path)[1:]):
            cells = line.strip().split("\t")
            if len(cells) <= max(label, *texts):
                raise _cells_error(path, number + 2, cells, max(label, *texts) + 1)
            values = dict(zip(("text_a", "text_b"), (cells[n] for n in texts), strict=False))
            yield {**values, "label": cells[label], "guid": f"{split}-{number}"}

    return read


def _json_lines(
    text_a: str, text_b: str = "", meta: Sequence[str] = (), label: str = "label"
) -> Reader:
    """Return a reader for JSON objects with the given fields."""

    def read(path: Path, split: str) -> Iterator[Values]:
        for number, row in enumerate(read_records(path)):
            values: Values = {"text_a": row.text(text_a), "label": row.values.get(label)}
            if text_b:
                values["text_b"] = row.text(text_b)
            if meta:
                values["meta"] = {name: row.text(name) for name in meta}
            yield {**values, "guid": f"{split}-{row.values.get('idx', number)}"}

    return read


def _read_copa(path: Path, split: str) -> Iterator[Values]:
    """Yield COPA's examples; for training, each also with swapped choices."""
    rows = list(_json_lines("premise", meta=("choice1", "choice2", "question"))(path, split))
    yield from rows
    if split in ("train", "unlabeled"):
        for row in rows:
            meta = row["meta"]
            swapped = {**meta, "choice1": meta["choice2"], "choice2": meta["choice1"]}
            label = None if row["label"] is None else 1 - row["label"]
            yield {**row, "meta": swapped, "label": label, "guid": f"{row['guid']}m"}


def _read_wsc(path: Path, split: str) -> Iterator[Values]:
    """Yield WSC's examples with corrected word positions; for training, only true examples."""
    for number, row in enumerate(read_records(path)):
        if split == "train" and row.values.get("label") is not True:
            continue
        words, target = row.text("text").split(), row.part("target")
        meta: Values = {name: target.text(name) for name in ("span1_text", "span2_text")}
        for name in ("span1", "span2"):
            meta[f"{name}_index"] = _find_span(
                words, meta[f"{name}_text"], target.number(f"{name}_index")
            )
        guid = f"{split}-{row.values.get('idx', number)}"
        yield {"text_a": " ".join(words), "meta": meta, "label": row.values["label"], "guid": guid}


def _find_span(words: list[str], text: str, index: int) -> int:
    """Return the index in `words` at which `text` begins: `index`, `index` - 1 or `index` + 1.

    If the word at `index` only begins with `text`, it is split in `words`. A text that is not
    found keeps its index, with a warning, as in the original.
    """
    span_words = text.lower().split()
    for shift in (0, -1, 1):
        begin = index + shift
        if [w.lower() for w in words[max(begin, 0) : begin + len(span_words)]] == span_words:
            return begin
    if len(span_words) == 1 and words[index].startswith(text):
        words[index : index + 1] = [text, words[index].removeprefix(text)]
    else:
        _LOG.warning("the text %r does not begin at word %d of %r", text, index, " ".join(words))
    return index


def _read_multirc(path: Path, split: str) -> Iterator[Values]:
    """Yield one MultiRC example for each answer of each question."""
    for row in read_records(path):
        passage, p = row.part("passage"), row.values["idx"]
        for question in passage.parts("questions"):
            q = question.values["idx"]
            for answer in question.parts("answers"):
                a = answer.values["idx"]
                meta = {"passage_idx": p, "question_idx": q, "answer_idx": a}
                meta["answer"] = answer.text("text")
                texts = {"text_a": passage.text("text"), "text_b": question.text("question")}
                label = answer.values.get("label")
                yield {**texts, "meta": meta, "label": label, "guid": f"{split}-p{p}-q{q}-a{a}"}


def _read_record(path: Path, split: str) -> Iterator[Values]:
    """Yield ReCoRD's questions; for training, one per answer, with up to nine wrong entities."""
    for row in read_records(path):
        passage, p = row.part("passage"), row.values["idx"]
        text = passage.text("text")
        spans = [(e.number("start"), e.number("end")) for e in passage.parts("entities")]
        entities = list(dict.fromkeys(text[begin : end + 1] for begin, end in spans))
        for question in row.parts("qas"):
            answers = list(dict.fromkeys(a["text"] for a in question.values.get("answers", [])))
            base = {"text_a": text.replace("@highlight\n", "- "), "text_b": question.text("query")}
            guid = f"{split}-p{p}-q{question.values['idx']}"
            others = [entity for entity in entities if entity not in answers][:9]
            if split != "train":
                meta = {"candidates": entities, "answers": answers}
                yield {**base, "meta": meta, "label": "1", "guid": guid}
                continue
            for number, answer in enumerate(answers):
                meta = {"candidates": [answer, *others], "answers": [answer]}
                yield {**base, "meta": meta, "label": "1", "guid": f"{guid}-a{number}"}


def _read_tacred(path: Path, split: str) -> Iterator[Values]:
    """Yield TACRED's sentences with their subject and object."""
    for number, values in enumerate(read_json(path)):
        row = TaskRecord(f"{str(path)!r}, entry {number + 1}", values)
        words = row.texts("token")
        meta = {
            key: " ".join(words[row.number(f"{who}_start") : row.number(f"{who}_end") + 1])
            for key, who in (("head", "subj"), ("tail", "obj"))
        }
        yield {
            "text_a": " ".join(words), "meta": meta, "label": row.text("relation"),
            "guid": row.text("id"),
        }  # fmt: skip


def _read_semeval(path: Path, split: str) -> Iterator[Values]:
    """Yield SemEval's sentences with the names of both entities."""
    for row in read_records(path):
        meta = {"head": row.part("h").text("name"), "tail": row.part("t").text("name")}
        label = row.text("relation")
        yield {"text_a": " ".join(row.texts("token")), "meta": meta, "label": label}


def _read_few_nerd(path: Path, split: str) -> Iterator[Values]:
    """Yield one Few-NERD example for each entity."""
    for example in read_few_nerd(path):
        fields = example.fields
        label = FEW_NERD_TYPES[int(example.label or 0)]
        values = {"text_a": fields["sentence"], "meta": {"entity": fields["entity"]}}
        sentence, _ = example.idx if isinstance(example.idx, tuple) else (example.idx, 0)
        yield {**values, "label": label, "guid": str(sentence)}


def _read_webnlg(path: Path, split: str) -> Iterator[Values]:
    """Yield WebNLG's triples with all reference texts; for training, an example per reference."""
    for number, entry in enumerate(TaskRecord(repr(str(path)), read_json(path)).parts("entries")):
        triple_set = entry.part(str(number + 1))
        triples = [
            " : ".join(triple.text(name) for name in ("subject", "property", "object"))
            for triple in triple_set.parts("modifiedtripleset")
        ]
        source = "".join(f" | {triple}" for triple in triples)
        texts = [
            text.text("lex")
            for text in triple_set.parts("lexicalisations")
            if text.values.get("comment") == "good"
        ]
        for target in texts if split == "train" else ["\n".join(texts)]:
            yield {"text_a": source, "tgt_text": target}


def _read_csqa(path: Path, split: str) -> Iterator[Values]:
    """Yield CommonsenseQA's questions with their choices."""
    for row in read_records(path):
        question = row.part("question")
        choices = [part.values for part in question.parts("choices")]
        answer = row.values.get("answerKey")
        yield {"text_a": question.text("stem"), "meta": {"choices": choices}, "tgt_text": answer}


def _read_chnsenticorp(path: Path, split: str) -> Iterator[Values]:
    """Yield reviews with the names of both classes."""
    for row in read_records(path):
        meta = {"context": row.text("text_a"), "options": list(ChnSentiCorp.labels_mapped)}
        yield {"text_a": "", "meta": meta, "label": row.text("label")}


class ChnSentiCorp(FileProcessor):
    """Reads Chinese reviews (ChnSentiCorp) with the names of both classes.

    Attributes:
        labels_origin: labels in the file.
        labels_mapped: names of the classes, which are also the words of a verbalizer.
    """

    LABELS = labels_origin = ("0", "1")
    FILE = "{split}.jsonl"
    labels_mapped = ("消极", "积极")
    READ: ClassVar[Reader] = staticmethod(_read_chnsenticorp)


_WIC = _json_lines("sentence1", "sentence2", ("word",))
_RTE = _json_lines("premise", "hypothesis")
_FILE = tomllib.loads(Path(__file__).with_name("labels.toml").read_text("utf-8"))
_LABELS = {name: labels.split() for name, labels in _FILE.items()}
_NEWS, _DBPEDIA, _RATING = (_LABELS[name] for name in ("agnews", "dbpedia", "rating"))
_SEMEVAL = ("Other", *(f"{k}({o})" for o in ("e1,e2", "e2,e1") for k in _LABELS["semeval"]))
_FEW_GLUE = {"dev": "dev32", "test": "val"}
_CSQA = {
    "train": "train_rand_split", "dev": "dev_rand_split", "test": "test_rand_split_no_answers",
}  # fmt: skip
# Class name, names in PROCESSORS, labels, file of a split, reader.
_TABLE: tuple[tuple[str, str, Sequence[Any] | None, str, Reader], ...] = (
    ("AgnewsProcessor", "agnews", _NEWS, "{split}.csv", _csv_rows(_NEWS, 2)),
    ("MnliProcessor", "mnli", _LABELS["mnli"], "{split}.csv", _csv_rows(_LABELS["mnli"], 2)),
    ("YahooProcessor", "yahoo", YAHOO_TOPICS, "{split}.csv", _csv_rows(YAHOO_TOPICS, 3)),
    ("DBpediaProcessor", "dbpedia", _DBPEDIA, "{split}.txt", _labeled_lines(_DBPEDIA, True)),
    ("ImdbProcessor", "imdb", _LABELS["imdb"], "{split}.txt", _labeled_lines(_LABELS["imdb"])),
    ("AmazonProcessor", "amazon", _RATING, "{split}.txt", _labeled_lines(_RATING)),
    ("SST2Processor", "sst-2", ("0", "1"), "{split}.tsv", _tsv_columns(1, 0)),
    ("SNLIProcessor", "snli", _LABELS["snli"], "{split}.tsv", _tsv_columns(-1, 7, 8)),
    ("TACREDProcessor", "tacred", _LABELS["tacred"], "{split}.json", _read_tacred),
    ("TACREVProcessor", "tacrev", _LABELS["tacred"], "{split}.json", _read_tacred),
    ("ReTACREDProcessor", "retacred", _LABELS["retacred"], "{split}.json", _read_tacred),
    ("SemEvalProcessor", "semeval", _SEMEVAL, "{split}.jsonl", _read_semeval),
    ("FewNERDProcessor", "fewnerd", FEW_NERD_TYPES, "supervised/{split}.txt", _read_few_nerd),
    ("WebNLGProcessor", "webnlg webnlg_2017", None, "{split}.json", _read_webnlg),
    ("CSQAProcessor", "csqa", None, "{split}.jsonl", _read_csqa),
    ("RteProcessor", "rte", ("entailment", "not_entailment"), "{split}.jsonl", _RTE),
    ("CbProcessor", "cb", ("entailment", "contradiction", "neutral"), "{split}.jsonl", _RTE),
    ("WicProcessor", "wic", (True, False), "{split}.jsonl", _WIC),
    ("BoolQProcessor", "boolq", (True, False), "{split}.jsonl", _json_lines("passage", "question")),
    ("WscProcessor", "wsc", (True, False), "{split}.jsonl", _read_wsc),
    ("CopaProcessor", "copa", (0, 1), "{split}.jsonl", _read_copa),
    ("MultiRcProcessor", "multirc", (0, 1), "{split}.jsonl", _read_multirc),
    ("RecordProcessor", "record", ("0", "1"), "{split}.jsonl", _read_record),
)  # fmt: skip
_SPLITS: Mapping[str, Mapping[str, str]] = {"csqa": _CSQA} | dict.fromkeys(
    ["rte", "cb", "wic", "boolq", "wsc", "copa", "multirc", "record"], _FEW_GLUE
)

CLASSES: dict[str, type[DataProcessor]] = {
    name: define_processor(name, labels, file, read, _SPLITS.get(keys))
    for name, keys, labels, file, read in _TABLE
}
CLASSES |= {"ChnSentiCorp": ChnSentiCorp}
CLASSES |= {cls.__name__: cls for cls in (*ARROW_PROCESSORS.values(), *OTHER_PROCESSORS.values())}
PROCESSORS: dict[str, type[DataProcessor]] = {
    **{key: CLASSES[name] for name, keys, *_ in _TABLE for key in keys.split()},
    **ARROW_PROCESSORS,
    **OTHER_PROCESSORS,
}
