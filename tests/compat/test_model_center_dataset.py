"""Task data as tensors, batches for every process, corpora, and the other old names."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import model_center_programs as programs
import numpy as np
import pytest
import torch

import bmforge.compat.bmtrain as bmt
from bmforge.compat import model_center
from bmforge.compat.model_center import dataset as old_data
from bmforge.compat.model_center.dataset import (
    bertdataset,
    cpm1dataset,
    cpm2dataset,
    gpt2dataset,
    llamadataset,
    t5dataset,
)
from bmforge.compat.model_center.dataset.loader import share_batches
from bmforge.compat.model_center.tokenizer import BertTokenizer
from bmforge.data import TokenStoreWriter
from bmforge.errors import DataError
from bmforge.parallel import shutdown_distributed
from bmforge.testing.pool import run_distributed

START, END, PAD, BLANK = 900, 901, 902, 903


class Letters:
    """A tokenizer of letters, with a start in front or an end behind where they are asked for."""

    pad_token_id = PAD

    def __init__(self, starts: bool = False, ends: bool = False) -> None:
        self.starts, self.ends = starts, ends

    def encode(self, text: str) -> list[int]:
        text, blanks = text.replace("<extra_id_0>", "\0"), {"\0": BLANK}
        ids = [blanks.get(letter, ord(letter)) for letter in text]
        return [START] * self.starts + ids + [END] * self.ends

    def convert_tokens_to_ids(self, token: str) -> int:
        return BLANK if token == "<extra_id_0>" else BLANK + 1

    def get_sentinel_id(self, number: int) -> int:
        return BLANK + number

    def __call__(
        self, text: str, max_length: int, padding: str, truncation: bool
    ) -> dict[str, Any]:
        assert (padding, truncation) == ("max_length", True)
        ids = self.encode(text)[:max_length]
        filling = max_length - len(ids)
        mask = [1] * len(ids) + [0] * filling
        return {"input_ids": ids + [PAD] * filling, "attention_mask": mask}


def text_of(ids: torch.Tensor) -> str:
    return "".join("<>" if i == BLANK else chr(i) for i in ids.tolist() if i not in (START, END))


def write(folder: Path, task: str, name: str, *rows: Any) -> str:
    path = folder / task / name
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    path.write_text(text, encoding="utf-8")
    return str(folder)


BOOLQ = [
    {"question": "is it", "passage": "Yes", "idx": 0, "label": True},
    {"question": "was it", "passage": "No", "idx": 1, "label": False},
]
COPA = {"premise": "p", "choice1": "a", "choice2": "b", "question": "cause", "idx": 0, "label": 0}


def test_a_decoder_is_asked_and_answers_with_a_word(tmp_path: Path) -> None:
    folder = write(tmp_path, "BoolQ", "train.jsonl", *BOOLQ)
    kind = gpt2dataset.DATASET["BoolQ"]
    data = kind(folder, "train", 0, 1, Letters(), 20)
    first = data[0]
    length = int(first["input_length"])
    assert text_of(first["input_ids"][:length]) == "Yes. is it?"
    assert not first["input_ids"][length:].any()
    assert first["index"].nonzero().tolist() == [[length - 1]]
    no, yes = kind.get_verbalizer(Letters())
    assert (no, yes) == (ord(" "), ord(" "))
    assert first["targets"][: length - 1].tolist() == first["input_ids"][1:length].tolist()
    assert first["targets"][length - 1] == yes
    assert (first["targets"][length:] == -100).all()
    assert [int(row["labels"]) for row in data] == [1, 0]
    cut = kind(folder, "train", 0, 1, Letters(), max_decoder_length=6)[0]
    assert text_of(cut["input_ids"]) == "is it?"
    assert cut["input_length"] == 6


def test_llama_words_stand_behind_the_start(tmp_path: Path) -> None:
    folder = write(tmp_path, "BoolQ", "val.jsonl", *BOOLQ)
    kind = llamadataset.DATASET["BoolQ"]
    assert kind.get_verbalizer(Letters(starts=True)) == [ord("N"), ord("Y")]
    row = kind(folder, "dev", 0, 1, Letters(starts=True), 20)[0]
    assert row["input_ids"][0] == START
    assert row["targets"][int(row["input_length"]) - 1] == -100


def test_t5_fills_a_blank(tmp_path: Path) -> None:
    folder = write(tmp_path, "BoolQ", "train.jsonl", *BOOLQ)
    kind = t5dataset.DATASET["BoolQ"]
    row = kind(folder, "train", 0, 1, Letters(ends=True), 20, 4)[0]
    assert text_of(row["enc_input"][: row["enc_length"]]) == "Yes. is it? <>."
    assert row["dec_input"].tolist() == [PAD, BLANK, 0, 0]
    assert (row["dec_length"], row["targets"]) == (2, 1)
    assert row["index"].tolist() == [0, 1, 0, 0]
    short = kind(folder, "train", 0, 1, Letters(ends=True), 5, 4)[0]
    assert (text_of(short["enc_input"]), int(short["enc_length"])) == ("? <>.", 5)
    assert kind.get_verbalizer(Letters()) == [ord("N"), ord("Y")]


def test_choices_are_asked_both_ways_round_in_training(tmp_path: Path) -> None:
    write(tmp_path, "COPA", "train.jsonl", COPA)
    folder = write(tmp_path, "COPA", "val.jsonl", COPA)
    kind = gpt2dataset.DATASET["COPA"]
    train = kind(folder, "train", 0, 1, Letters(), 80)
    asked = [text_of(row["input_ids"][: row["input_length"]]) for row in train]
    tail = 'The cause of "p" was choice'
    assert asked == [f"Choice 1: a Choice 2: b {tail}", f"Choice 1: b Choice 2: a {tail}"]
    assert [int(row["labels"]) for row in train] == [0, 1]
    assert len(kind(folder, "dev", 0, 1, Letters(), 80)) == 1


def test_every_entity_is_asked_for(tmp_path: Path) -> None:
    """With what belongs together under one name, as judging whole questions wants it."""
    row = {
        **{"source": "x", "idx": 4},
        "passage": {
            "text": "Rome, Bonn\n@highlight\nx",
            "entities": [{"start": 0, "end": 3}, {"start": 6, "end": 9}],
        },
        "qas": [{"query": "@placeholder?", "idx": 9, "answers": [{"text": "Bonn"}]}],
    }
    data = gpt2dataset.DATASET["ReCoRD"](
        write(tmp_path, "ReCoRD", "val.jsonl", row), "dev", 0, 1, Letters(), 200
    )
    assert [int(one["labels"]) for one in data] == [0, 1]
    assert data.qids == ["4-9", "4-9"]
    asked = text_of(data[1]["input_ids"][: data[1]["input_length"]])
    assert "- x Question" in asked
    assert "Can Bonn be" in asked


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("bert")
    (folder / "vocab.txt").write_text("\n".join(programs.SPECIAL + programs.WORDS) + "\n")
    return BertTokenizer.from_pretrained(folder)


def words(ids: torch.Tensor) -> str:
    known = programs.SPECIAL + programs.WORDS
    return " ".join(known[i] for i in ids.tolist() if i)


def test_an_encoder_reads_a_pair(bert: Any, tmp_path: Path) -> None:
    """Also where the first text is too long for both: the question is there."""
    long = {"question": "is it true", "passage": "the cat " * 20, "idx": 0, "label": True}
    folder = write(tmp_path, "BoolQ", "train.jsonl", long)
    row = bertdataset.DATASET["BoolQ"](folder, "train", 0, 1, bert, max_encoder_length=10)[0]
    assert words(row["input_ids"]) == "[CLS] the cat the cat [SEP] is it true [SEP]"
    assert row["token_type_ids"].tolist() == [0] * 6 + [1] * 4
    assert (row["attention_mask"].tolist(), int(row["labels"])) == ([1] * 10, 1)


def test_an_encoder_reads_every_choice(bert: Any, tmp_path: Path) -> None:
    row = {**COPA, "premise": "the cat sat", "choice1": "it ran", "choice2": "no mat"}
    folder = write(tmp_path, "COPA", "train.jsonl", row)
    (found,) = list(bertdataset.DATASET["COPA"](folder, "train", 0, 1, bert, 24))
    assert words(found["input_ids0"]).startswith("[CLS] it ran [SEP] the [UNK]")
    assert words(found["input_ids1"]).startswith("[CLS] no mat [SEP] the [UNK]")
    assert set(found) == {
        *(f"{name}{n}" for name in ("input_ids", "attention_mask", "token_type_ids") for n in "01"),
        "labels",
    }


def test_rare_classes_come_more_often_in_training(bert: Any, tmp_path: Path) -> None:
    labels = ["entailment"] * 5 + ["neutral"] * 2
    rows = [{"premise": "a", "hypothesis": "b", "idx": n, "label": x} for n, x in enumerate(labels)]
    write(tmp_path, "CB", "val.jsonl", *rows)
    folder = write(tmp_path, "CB", "train.jsonl", *rows)
    kind = bertdataset.DATASET["CB"]
    train = [int(row["labels"]) for row in kind(folder, "train", 0, 1, bert, 16)]
    assert (train.count(1), train.count(2)) == (5, 4)
    assert len(kind(folder, "dev", 0, 1, bert, 16)) == 7


def test_chinese_questions_for_openbmbs_models(tmp_path: Path) -> None:
    (tmp_path / "LCQMC").mkdir()
    table = "text_a\ttext_b\tlabel\n喜欢\t爱\t1\n"
    (tmp_path / "LCQMC" / "dev.tsv").write_text(table, encoding="utf-8")
    asked = "“喜欢”与“爱”是否有关？"
    kind = cpm1dataset.DATASET["LCQMC"]
    one = kind(str(tmp_path), "dev", 0, 1, Letters(), 20)[0]
    length = int(one["input_length"])
    assert text_of(one["input_tokens"][1:length]) == asked
    assert one["index"].nonzero().tolist() == [[length - 1]]
    assert (int(one["targets"]), bool(one["input_context"].any())) == (1, False)
    assert kind.get_verbalizer(Letters()) == [ord("无"), ord("有")]
    two = cpm2dataset.DATASET["LCQMC"](str(tmp_path), "dev", 0, 1, Letters(), 20, 4)[0]
    assert text_of(two["enc_input"][: two["enc_length"]]) == asked + "<>"
    assert (two["dec_input"].tolist(), int(two["dec_length"])) == ([BLANK, 0, 0, 0], 1)
    with pytest.raises(DataError, match="max_length=5"):
        kind(str(tmp_path), "dev", 0, 1, Letters(), 5)[0]


def test_squad_for_t5(tmp_path: Path) -> None:
    answers = [{"text": "Rome", "answer_start": 0}]
    question = {"question": " where", "id": "1", "answers": answers}
    data = {"data": [{"paragraphs": [{"context": "It", "qas": [question]}]}]}
    for split in ("train", "dev"):
        (tmp_path / f"{split}-v1.1.json").write_text(json.dumps(data))
    train = t5dataset.DATASET["SQuAD"](str(tmp_path), "train", Letters(ends=True), 60, 12)
    row = train[0]
    source = row["input_ids"][row["attention_mask"].bool()]
    assert text_of(source) == "Question: where Answer: <> Context: It"
    target = row["targets"][row["targets"] != -100]
    assert target[0] == BLANK
    assert target[-1] == END or len(target) == 12
    assert row["decoder_input_ids"].tolist()[1:] == [
        *(int(t) if t != -100 else PAD for t in row["targets"][:-1])
    ]
    dev = t5dataset.DATASET["SQuAD"](str(tmp_path), "dev", Letters(), 60, 12)
    assert dev[0]["targets"] == {"Rome"}


def test_a_test_split_without_labels_is_empty(tmp_path: Path) -> None:
    secret = {name: value for name, value in BOOLQ[0].items() if name != "label"}
    folder = write(tmp_path, "BoolQ", "test.jsonl", secret)
    kind = gpt2dataset.DATASET["BoolQ"]
    assert len(kind(folder, "test", 0, 1, Letters(), 20)) == 0
    assert len(kind(str(tmp_path / "BoolQ"), "test", 0, 1, Letters(), 20)) == 0
    with pytest.raises(TypeError, match="max_decoder_length"):
        kind(folder, "test", 0, 1, Letters())
    with pytest.raises(DataError, match="no file"):
        kind(folder, "dev", 0, 1, Letters(), 20)


def test_evaluation_gives_every_example_once() -> None:
    """On any number of processes, with equally many batches on each, none larger than asked."""
    draw = random.Random(0)
    for _ in range(300):
        count, size, world = draw.randrange(1, 40), draw.randrange(1, 9), draw.randrange(1, 6)
        shares = [share_batches(count, size, rank, world) for rank in range(world)]
        assert sorted(n for share in shares for batch in share for n in batch) == [*range(count)]
        assert len({len(share) for share in shares}) == 1
        assert max(len(batch) for share in shares for batch in share) <= size
        empty = sum(not batch for share in shares for batch in share)
        assert not empty or count // world < len(shares[0])
        dropped = [share_batches(count, size, rank, world, True) for rank in range(world)]
        assert {len(batch) for share in dropped for batch in share} <= {size}
        assert {len(share) for share in dropped} == {count // world // size}


class Numbers(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"number": torch.tensor(index)}


def read_batches(count: int, shuffle: bool) -> list[list[list[int]]]:
    bmt.init_distributed()
    loader = old_data.DistributedDataLoader(Numbers(count), shuffle, seed=3, batch_size=2)
    epochs = [[batch["number"].tolist() for batch in loader] for _ in range(2)]
    assert all(len(epoch) == len(loader) for epoch in epochs)
    return epochs


@pytest.mark.parametrize("count", [1, 7])
def test_batches_on_two_processes(count: int) -> None:
    first, second = run_distributed(read_batches, 2, count, False)
    assert first[0] == first[1]
    assert sorted(n for share in (first, second) for b in share[0] for n in b) == [*range(count)]
    assert len(first[0]) == len(second[0])
    first, second = run_distributed(read_batches, 2, count, True)
    assert {n for share in (first, second) for b in share[0] for n in b} == {*range(count)}
    assert [len(b) for b in first[0]] == [len(b) for b in second[0]]
    if count > 1:
        assert first[0] != first[1]


def test_a_loader_of_nothing() -> None:
    try:
        bmt.init_distributed()
        loader = old_data.DistributedDataLoader(Numbers(0), batch_size=4)
        assert (len(loader), list(loader)) == (0, [])
    finally:
        shutdown_distributed()


def test_corpora_in_several_files(tmp_path: Path) -> None:
    """Every process has its part of each file, and together they have all."""
    rows = [np.arange(n, n + 3) for n in range(11)]
    for file, part in enumerate((rows[:4], rows[4:])):
        with TokenStoreWriter(tmp_path / f"text_{file}", "<i4") as writer:
            for row in part:
                writer.add_item(row.tolist())
                writer.end_document()
    one = old_data.MMapIndexedDataset(str(tmp_path / "text_0"))
    assert [row.tolist() for row in one[1:3]] == [row.tolist() for row in rows[1:3]]
    assert (len(one), one.sizes.tolist()) == (4, [3] * 4)
    assert not old_data.MMapIndexedDataset.exists(str(tmp_path / "text_2"))
    shares = [
        old_data.DistributedMMapIndexedDataset(f"{tmp_path}/", "text", r, 3) for r in range(3)
    ]
    found = [row.tolist() for share in shares for row in share[:]]
    assert sorted(found) == [row.tolist() for row in rows]
    assert shares[1][-1].tolist() == shares[1][len(shares[1]) - 1].tolist()
    with pytest.raises(IndexError):
        shares[0][len(shares[0])]
    with pytest.raises(DataError, match="none_0"):
        old_data.DistributedMMapIndexedDataset(f"{tmp_path}/", "none")


def test_names_that_are_gone_say_what_to_use() -> None:
    with pytest.raises(ImportError, match="blocks_to_store"):
        _ = old_data.compact_dataset
    with pytest.raises(AttributeError, match=r"dataset\.Nonsense does not exist"):
        _ = old_data.Nonsense


def test_the_command_line() -> None:
    """Warm-up below 1 is a fraction, as it was documented."""
    args = model_center.get_args(["--train-iters", "500", "--epochs", "2", "--lr", "1e-3"])
    assert (args.warmup_iters, args.batch_size, args.lr_decay_style) == (10.0, 32, "noam")
    assert (args.max_encoder_length, args.loss_scale, args.seed) == (512, 65536, 1234)
    args = model_center.get_args(["--warmup-iters", "40", "--lr-decay-iters", "100"])
    assert (args.warmup_iters, args.lr_decay_iters) == (40, 100)


def test_importing_needs_no_extra() -> None:
    """transformers and scikit-learn come only when they are used."""
    code = (
        "import sys, bmforge.compat.model_center.dataset.bertdataset, "
        "bmforge.compat.model_center.tokenizer, bmforge.compat.model_center.layer, "
        "bmforge.compat.model_center.generation, bmforge.compat.model_center.utils, "
        "bmforge.data.tasks.metrics; print({'transformers', 'sklearn'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
