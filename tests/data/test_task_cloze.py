"""Entities, facts, triples, reviews and relations in the form of their files, and their figures."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from bmforge.data.tasks import TASKS, TaskExample, read_task
from bmforge.data.tasks.metrics import corpus_bleu, loose_f1, relation_scores, score_task
from bmforge.errors import ConfigError, DataError, ShapeError


def put(folder: Path, name: str, text: str) -> Path:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    return file


def test_reviews_of_a_folder_or_of_lines(tmp_path):
    for name, text in (("pos/10_9.txt", "late"), ("pos/2_8.txt", "good\n"), ("neg/0_1.txt", "bad")):
        put(tmp_path / "imdb" / "aclImdb" / "train", name, text)
    found = read_task("imdb", tmp_path, "train")
    assert [(e.fields["text"], e.label, e.idx) for e in found] == [
        ("bad", 0, "neg/0_1"), ("good", 1, "pos/2_8"), ("late", 1, "pos/10_9"),
    ]  # fmt: skip
    put(tmp_path, "lines/test.txt", "fine\nawful\n")
    put(tmp_path, "lines/test_labels.txt", "1\n0\n")
    rows = read_task("imdb", tmp_path / "lines", "test")
    assert [(e.fields["text"], e.label) for e in rows] == [("fine", 1), ("awful", 0)]
    put(tmp_path, "lines/test_labels.txt", "1\n")
    with pytest.raises(DataError, match="0 or 1, for each of the 2 lines"):
        read_task("imdb", tmp_path / "lines", "test")
    with pytest.raises(ConfigError, match="no split 'dev'"):
        read_task("imdb", tmp_path, "dev")


def test_papers_of_a_discipline(tmp_path):
    names = TASKS["csldcp"].label_names
    assert len(set(names)) == len(names) == 67
    row = {"content": "本文研究了水稻", "label": "作物学", "id": 805}
    put(tmp_path / "csldcp", "train_0.json", json.dumps(row, ensure_ascii=False) + "\n")
    (found,) = read_task("csldcp", tmp_path, "train")
    assert (found.fields["content"], names[found.label], found.idx) == (
        "本文研究了水稻", "作物学", 805,
    )  # fmt: skip


def test_entities_are_neighbours_of_one_type(tmp_path):
    names = TASKS["Few-NERD"].label_names
    assert len(set(names)) == len(names) == 66
    lines = [
        "Ann\tperson-actor", "Lee\tperson-actor", "saw\tO", "Bob\tperson-actor",
        "Paris\tlocation-GPE", "", "nothing\tO", "", "Jaws\tart-film",
    ]  # fmt: skip
    put(tmp_path / "Few-NERD" / "supervised", "dev.txt", "\n".join(lines) + "\n")
    found = read_task("Few-NERD", tmp_path, "dev")
    assert [(e.fields["entity"], names[e.label], e.idx) for e in found] == [
        ("Ann Lee", "person-actor", (0, 0)),
        ("Bob", "person-actor", (0, 1)),
        ("Paris", "location-GPE", (0, 2)),
        ("Jaws", "art-film", (2, 0)),
    ]
    assert found[0].fields["sentence"] == "Ann Lee saw Bob Paris"
    put(tmp_path / "Few-NERD" / "supervised", "test.txt", "Ann\tperson-cook\n")
    with pytest.raises(DataError, match=r"line 1.*is not a token and one of the"):
        read_task("Few-NERD", tmp_path, "test")


def test_facts_are_chosen_from_the_objects_of_a_relation(tmp_path):
    def row(subject: str, thing: str) -> str:
        return json.dumps({"sub_label": subject, "obj_label": thing, "predicate_id": "P19"})

    folder = tmp_path / "original" / "P19"
    put(folder, "train.jsonl", row("Ann", "Rome") + "\n" + row("Bob", "Oslo") + "\n")
    put(folder, "test.jsonl", row("Cleo", "Cairo") + "\n")
    (found,) = read_task("LAMA", folder, "test")
    assert found.choices == ("Cairo", "Oslo", "Rome")
    assert found.choices[found.label] == "Cairo"
    assert (found.fields["before"], found.fields["after"]) == ("Cleo", "")
    known = {"relation": "P19", "template": "[X] was born in [Y] ."}
    put(tmp_path, "relations.jsonl", json.dumps(known) + "\n")
    (found,) = read_task("LAMA", folder, "test")
    assert (found.fields["before"], found.fields["after"]) == ("Cleo was born in", ".")
    examples = read_task("LAMA", folder, "train")
    assert score_task("LAMA", [2, 2], examples) == {"p@1": 0.5}


def test_texts_of_triples(tmp_path):
    triple = {"subject": "Ann", "property": "bornIn", "object": "Rome"}
    said = [{"comment": "good", "lex": "Ann was born in Rome."},
            {"comment": "good", "lex": "Rome is where Ann was born."},
            {"comment": "toFix", "lex": "Ann Rome."}]  # fmt: skip
    entry = {"category": "Person", "modifiedtripleset": [triple, triple], "lexicalisations": said}
    text = json.dumps({"entries": [{"1": entry}]})
    for split in ("train", "dev"):
        put(tmp_path / "WebNLG", f"{split}.json", text)
    train = read_task("WebNLG", tmp_path, "train")
    assert [e.answers for e in train] == [(said[0]["lex"],), (said[1]["lex"],)]
    assert train[0].fields["triples"] == "Ann : bornIn : Rome | Ann : bornIn : Rome"
    (held_out,) = read_task("WebNLG", tmp_path, "dev")
    assert held_out.answers == (said[0]["lex"], said[1]["lex"])
    assert score_task("WebNLG", [said[1]["lex"]], [held_out]) == {"bleu": 1.0}


def test_relations_by_their_newer_names(tmp_path):
    names = TASKS["Re-TACRED"].label_names
    assert len(set(names)) == len(names) == 40
    row = {
        "id": "x", "relation": "per:identity", "token": ["Ann", "is", "Anna"],
        "subj_start": 0, "subj_end": 0, "obj_start": 2, "obj_end": 2, "subj_type": "PERSON",
        "obj_type": "PERSON",
    }  # fmt: skip
    put(tmp_path / "Re-TACRED", "train.json", json.dumps([row]))
    (found,) = read_task("Re-TACRED", tmp_path, "train")
    assert names[found.label] == "per:identity"
    put(tmp_path / "Re-TACRED", "dev.json", json.dumps([row | {"relation": "org:parents"}]))
    with pytest.raises(DataError, match="is not a label"):
        read_task("Re-TACRED", tmp_path, "dev")


def test_relations_are_scored_without_those_that_are_none():
    # found: 3, of which 1 right; there: 4
    scores = relation_scores([0, 1, 2, 3, 0], [0, 1, 1, 2, 3])
    assert scores == {"precision": 1 / 3, "recall": 1 / 4, "f1": pytest.approx(2 / 7)}
    assert relation_scores([0], [1])["f1"] == 0.0
    assert relation_scores([0], [0]) == {"precision": 0.0, "recall": 0.0, "f1": 0.0}
    examples = [TaskExample({}, label, 0) for label in (0, 5)]
    assert score_task("Re-TACRED", [5, 5], examples)["f1"] == pytest.approx(2 / 3)


def test_types_are_scored_with_those_above():
    found = loose_f1(["person-actor", "art-film"], ["person-director", "art-film"])
    assert found["loose micro f1"] == pytest.approx(3 / 4)  # person, art, art-film of four
    assert found["loose macro f1"] == pytest.approx((1 / 2 + 1) / 2)
    examples = [TaskExample({}, 0, 0), TaskExample({}, 1, 1)]
    scores = score_task("Few-NERD", [0, -1], examples)
    assert scores["accuracy"] == 0.5
    assert scores["loose micro f1"] == pytest.approx(2 * 2 / (2 + 2 + 1 + 2))


def test_bleu_is_its_closed_form():
    right = "the cat sat on the mat ."
    assert corpus_bleu([right], [[right, "other"]]) == pytest.approx(1.0)
    assert corpus_bleu(["The cat sat on the mat."], [[right]]) == pytest.approx(1.0)
    # One word of seven is wrong: so many of the 7, 6 and 5 n-grams are right, and none of four.
    wrong = ["the cat sat in the mat ."]
    found = corpus_bleu(wrong, [[right]], longest=3)
    assert found == pytest.approx(math.prod((6 / 7, 4 / 6, 2 / 5)) ** (1 / 3))
    assert corpus_bleu(wrong, [[right]]) == 0.0
    # Four words of seven, all right, are short: exp(1 - 7/4).
    assert corpus_bleu(["the cat sat on"], [[right]]) == pytest.approx(math.exp(1 - 7 / 4))
    # A word that is said too often counts as often as it may.
    assert corpus_bleu(["the the the"], [["the cat", "the the dog"]], 1) == pytest.approx(2 / 3)
    # Together: counts are added, not figures.
    both = corpus_bleu(["a b", "c x"], [["a b"], ["c d"]], 1)
    assert both == pytest.approx(3 / 4)
    assert corpus_bleu(["x"], [["y"]]) == 0.0
    with pytest.raises(ShapeError, match="at least one reference text"):
        corpus_bleu(["x"], [[]])
