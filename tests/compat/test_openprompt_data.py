"""OpenPrompt's dataset readers on files in its formats, and its metrics against closed forms."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

import pytest
from sklearn.metrics import f1_score, precision_score, recall_score

from bmforge.compat.openprompt.data_utils import PROCESSORS, load_dataset
from bmforge.compat.openprompt.data_utils.text_classification_dataset import AgnewsProcessor
from bmforge.compat.openprompt.data_utils.utils import InputExample
from bmforge.compat.openprompt.data_utils.ZH import ChnSentiCorp
from bmforge.compat.openprompt.utils.crossfit_metrics import evaluate
from bmforge.compat.openprompt.utils.metrics import classification_metrics, generation_metric
from bmforge.errors import ConfigError, DataError


def write_lines(path: Path, rows: list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")
    return path.parent


def fields(example: InputExample) -> tuple[Any, ...]:
    return example.guid, example.text_a, example.text_b, example.label, example.meta


def test_comma_separated_classes(tmp_path: Path) -> None:
    with (tmp_path / "test.csv").open("w", newline="") as file:
        csv.writer(file).writerows([[3, "Fears\\for pensions", 'Unions "say", so'], [1, "a", "b"]])
    processor = AgnewsProcessor()
    examples = processor.get_test_examples(tmp_path)
    assert [fields(e) for e in examples] == [
        ("0", "Fears for pensions", 'Unions "say", so', 2, {}),
        ("1", "a", "b", 0, {}),
    ]
    assert processor.get_labels()[2] == "Business"
    assert processor.get_num_labels() == 4
    with pytest.raises(FileNotFoundError, match=r"train\.csv' does not exist"):
        processor.get_train_examples(tmp_path)
    (tmp_path / "train.csv").write_text("5,a,b\n")
    with pytest.raises(DataError, match=r"class='5' must be from 1 to 4"):
        processor.get_train_examples(tmp_path)


def test_few_shot_superglue(tmp_path: Path) -> None:
    premise = {"premise": "p", "choice1": "x", "choice2": "y", "question": "cause", "idx": 7}
    folder = write_lines(tmp_path / "train.jsonl", [{**premise, "label": 0}])
    whole, mirrored = PROCESSORS["copa"]().get_train_examples(folder)
    assert (whole.label, whole.meta["choice1"]) == (0, "x")
    assert (mirrored.label, mirrored.meta["choice1"], mirrored.guid) == (1, "y", "train-7m")
    text = "Mark told Pete about himself, which Pete wrote down."
    target = {"span1_text": "Mark", "span1_index": 1, "span2_text": "himself", "span2_index": 4}
    rows = [{"text": text, "target": target, "label": label, "idx": 0} for label in (True, False)]
    write_lines(folder / "train.jsonl", rows)
    (only,) = PROCESSORS["wsc"]().get_train_examples(folder)
    assert only.label == 0
    assert only.text_a.split()[only.meta["span2_index"]] == "himself"
    assert only.text_a.split()[only.meta["span1_index"]] == "Mark"
    write_lines(folder / "dev32.jsonl", rows)
    assert [e.label for e in PROCESSORS["wsc"]().get_dev_examples(folder)] == [0, 1]


def test_datasets_saved_to_disk(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    table = pa.table(
        {"passage": ["p", "q"], "question": ["a", "b"], "label": [1, -1], "idx": [4, 5]}
    )
    folder = tmp_path / "super_glue.boolq" / "validation"
    folder.mkdir(parents=True)
    with pa.ipc.new_stream(folder / "data-00000-of-00001.arrow", table.schema) as writer:
        writer.write_table(table)
    first, second = PROCESSORS["super_glue.boolq"]().get_dev_examples(tmp_path)
    assert fields(first) == ("4", "p", "a", 1, {})
    assert second.label is None
    (folder / "data-00000-of-00001.arrow").write_bytes(b"no arrow")
    with pytest.raises(DataError, match="not an Arrow stream"):
        PROCESSORS["super_glue.boolq"]().get_dev_examples(tmp_path)


def test_load_dataset_leaves_out_missing_splits(tmp_path: Path) -> None:
    write_lines(tmp_path / "dev32.jsonl", [{"premise": "p", "hypothesis": "h", "label": "neutral"}])

    class Dataset:
        name, path = "cb", str(tmp_path)

    class Config:
        dataset = Dataset

    train, dev, test, processor = load_dataset(Config)
    assert (train, test) == (None, None)
    assert [e.label for e in dev] == [processor.get_label_id("neutral")] == [2]
    Dataset.name = "no such"
    with pytest.raises(DataError, match=r"unknown dataset: dataset\.name='no such'"):
        load_dataset(Config)


def test_metrics_of_classes_equal_scikit_learn() -> None:
    predicted, wanted = [1, 0, 1, 1, 0, 1], [1, 1, 0, 1, 0, 0]
    pairs = {
        "micro-f1": f1_score(wanted, predicted, average="micro"),
        "macro-f1": f1_score(wanted, predicted, average="macro"),
        "precision": precision_score(wanted, predicted),
        "recall": recall_score(wanted, predicted),
        "accuracy": 0.5,
    }
    for name, value in pairs.items():
        assert classification_metrics(predicted, wanted, name) == pytest.approx(value)
    names = {0: "person-actor", 1: "person-other"}
    # Each wrong type still shares the level `person`: half of each pair's levels.
    assert classification_metrics(predicted, wanted, "loose-micro-f1", names) == 0.75
    with pytest.raises(ConfigError, match="needs the name of each class"):
        classification_metrics(predicted, wanted, "loose-macro-f1")


def test_sentence_bleu_in_closed_form() -> None:
    assert generation_metric(["a b c d e"], ["a b c d e\nz"]) == pytest.approx(1.0)
    # Words 3/4; pairs 1/3; no triples (1 miss) and no quadruples (2 misses), ln(4) / (2^k 5).
    smooth = [3 / 4, 1 / 3, math.log(4) / 10 / 2, math.log(4) / 20 / 1]
    expected = math.exp(sum(map(math.log, smooth)) / 4)
    assert generation_metric(["a b x d"], ["a b c d"]) == pytest.approx(expected)
    assert generation_metric(["x", "a b c d e"], ["a", "a b c d e"]) == pytest.approx(0.5)


def test_crossfit_scores() -> None:
    assert evaluate(["Yes!", "no"], ["yes", ["maybe", "No"]], "EM") == 1.0
    assert evaluate(["Yes!", "no"], ["yes", ["maybe", "No"]], "ACC") == 0.5
    assert evaluate(["Yes!"], ["yes"], "ACC", only_compare_prefix=True) == 1.0
    assert evaluate(["the big cat"], ["big dog"], "QA-F1") == pytest.approx(0.5)
    macro = f1_score([0, 1, 0], [0, 0, 0], average="macro")
    assert evaluate(["a", "a", "a"], ["a", "b", "a"], "Classification-F1") == pytest.approx(macro)
    with pytest.raises(ConfigError, match="supported: EM, ACC"):
        evaluate(["a"], ["a"], "Rouge-L")


def test_chinese_reviews(tmp_path: Path) -> None:
    write_lines(tmp_path / "dev.jsonl", [{"text_a": "很好", "label": "1"}])
    (example,) = ChnSentiCorp().get_dev_examples(tmp_path)
    assert example.label == 1
    assert example.meta == {"context": "很好", "options": ["消极", "积极"]}
