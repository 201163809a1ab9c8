"""Filling documents, against the training form of the model and against counting by hand."""

from __future__ import annotations

import itertools
import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bmforge.cli.main import main
from bmforge.errors import ConfigError, DataError
from bmforge.infer.openbmb.documents import fill_documents, fill_each
from bmforge.models.cpm_bee import CPMBee, CPMBeeConfig, encode_document, to_arguments
from bmforge.tokenizers.cpm_bee.batch import build_instance, collate_rows
from bmforge.tokenizers.cpm_bee.tokenizer import CPMBeeTokenizer

SPECIALS = [
    "<pad>", "<unk>", "<mask>", "<sep>", "</n>", "</_>", "<s>", "</s>", "<root>", "<ans>",
    "<option>",
]  # fmt: skip
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789?()-._"
BLANKS = {"input": "one <mask_0> and <mask_1>.", "<ans>": {"<mask_0>": "", "<mask_1>": ""}}
OPEN = {"input": "tell it", "prompt": "go on", "<ans>": ""}
RATING = {"input": "good", "question": "how? (1-5)", "<ans>": ""}
CHOICE = {
    "input": "pick",
    "options": {"<option_0>": "yes", "<option_1>": "no", "<option_2>": "maybe"},
    "question": "which",
    "<ans>": "",
}


@cache
def tokenizer() -> CPMBeeTokenizer:
    """A vocabulary of letters, without the published one's words."""
    return CPMBeeTokenizer([*SPECIALS, *LETTERS])


@cache
def model(seed: int = 0) -> CPMBee:
    """A tiny model whose embedding is large enough for its answers to differ."""
    config = CPMBeeConfig(
        vocab_size=len(tokenizer()), hidden_size=32, intermediate_size=48, num_layers=3,
        num_heads=4, head_dim=6, num_buckets=16, num_relations=64, max_seq_len=32,
        mask_modules=((False, False), (False, True), (True, False)),
    )  # fmt: skip
    built = CPMBee.from_config(config, seed=seed).eval()
    with torch.no_grad():
        built.embed.weight.mul_(100.0)
    return built


def score(document: dict[str, Any], examples: tuple[dict[str, Any], ...] = ()) -> Any:
    """Return log-probabilities and labels of a document with its answers, as training sees it."""
    instance = build_instance(document, tokenizer(), examples)
    batch = collate_rows([[instance]], tokenizer())
    inputs = to_arguments(batch.inputs)
    labels = inputs.pop("labels")
    with torch.no_grad():
        return model()(**inputs).logits.log_softmax(-1)[0], labels[0]


def check_greedy(
    question: dict[str, Any], filled: dict[str, Any], limit: int, **known: Any
) -> None:
    """Every token of the answers is the likeliest one where training would predict it."""
    scores, labels = score(filled, **known)
    banned = [tokenizer().unk_id, tokenizer().bos_id, tokenizer().pad_id]
    size = len(tokenizer())
    names = {t for t in encode_document(question, tokenizer()).extension.tokens.values() if t[1]}
    rows = scores.shape[1] - size
    if not names:
        banned += range(size, size + rows)
    scores[:, banned] = -torch.inf
    written = 0
    for place in (labels != -100).nonzero()[:, 0].tolist():
        ends = int(labels[place]) == tokenizer().eos_id
        if not ends or written < limit:  # at the limit an answer has to end
            assert scores[place].argmax() == labels[place], place
        written = 0 if ends else written + 1


@pytest.mark.parametrize("question", [OPEN, BLANKS, {**OPEN, "<ans>": {"a": {"b": ""}, "c": ""}}])
def test_greedy_is_what_training_would_predict(question: dict[str, Any]) -> None:
    """Segment by segment through the cache, each token is the likeliest of the whole row."""
    known = fill_documents(model(), tokenizer(), [question], num_beams=1, max_new_tokens=6)[0]
    assert {k: v for k, v in known.items() if k != "<ans>"} == {
        k: v for k, v in question.items() if k != "<ans>"
    }
    check_greedy(question, known, 6)


def test_examples_are_seen() -> None:
    """In-context examples are part of what is predicted from."""
    examples = ({**OPEN, "<ans>": "abc"}, {**RATING, "<ans>": "4"})
    filled = fill_documents(
        model(), tokenizer(), [OPEN], num_beams=1, max_new_tokens=6, examples=examples
    )[0]
    check_greedy(OPEN, filled, 6, examples=examples)
    with_others, _ = score({**OPEN, "<ans>": "ab"}, examples)
    alone, labels = score({**OPEN, "<ans>": "ab"})
    place = int((labels != -100).nonzero()[0])
    assert not torch.allclose(with_others[place, :50], alone[place, :50], atol=1e-3)


@pytest.mark.parametrize("beams", [1, 3])
def test_side_by_side_is_one_by_one(beams: int) -> None:
    """Padding on the left and others' extension tokens change nothing."""
    documents = [OPEN, BLANKS, RATING, CHOICE, {**OPEN, "input": "x \u4e09 <mask_5> y"}]
    options: dict[str, Any] = {"num_beams": beams, "max_new_tokens": 5}
    together = fill_documents(model(), tokenizer(), documents, **options)
    alone = [fill_documents(model(), tokenizer(), [d], **options)[0] for d in documents]
    assert together == alone
    assert fill_documents(model(), tokenizer(), documents, batch_size=2, **options) == alone


def total(document: dict[str, Any], answers: list[str], allowed: list[list[str]]) -> float:
    """Log-probability of answers among those allowed, by training's form and a plain trie."""
    keys = list(document["<ans>"])
    filled = {**document, "<ans>": dict(zip(keys, answers, strict=True))}
    scores, labels = score(filled)
    places = iter((labels != -100).nonzero()[:, 0].tolist())
    ids = {letter: i for i, letter in enumerate([*SPECIALS, *LETTERS])}
    summed, count = 0.0, 0
    for answer, texts in zip(answers, allowed, strict=True):
        for done in range(len(answer) + 1):
            open_texts = [t for t in texts if t[:done] == answer[:done]]
            options = {ids[t[done]] if len(t) > done else ids["</s>"] for t in open_texts}
            place = next(places)
            among = scores[place, sorted(options)]
            summed += float(scores[place, labels[place]] - among.logsumexp(0))
            count += 1
    return summed / count


def test_beams_find_the_best_of_all() -> None:
    """With room for every combination, the search returns the likeliest per token."""
    document = {"input": "fill", "<ans>": {"first": "", "second": ""}}
    allowed = [["ab", "a", "cde"], ["x", "yz", "xy"]]
    constraints = {("first",): allowed[0], ("second",): allowed[1]}
    got = fill_documents(
        model(), tokenizer(), [document], num_beams=12, max_new_tokens=5, constraints=constraints
    )[0]["<ans>"]
    ranked = sorted(
        itertools.product(*allowed), key=lambda pair: total(document, list(pair), allowed)
    )
    assert (got["first"], got["second"]) == ranked[-1]


def test_ratings_and_options() -> None:
    """Ratings are 1 to 5, a choice is one of the options, and the likeliest at that."""
    for seed in range(3):
        rating, choice = fill_documents(model(seed), tokenizer(), [RATING, CHOICE])
        assert rating["<ans>"] in {"1", "2", "3", "4", "5"}
        assert choice["<ans>"] in CHOICE["options"]
    scores, labels = score({**RATING, "<ans>": "1"})
    place = int((labels != -100).nonzero()[0])
    ids = [tokenizer().token_to_id(str(n)) for n in range(1, 6)]
    best = str(1 + int(scores[place, ids].argmax()))
    assert fill_documents(model(), tokenizer(), [RATING], num_beams=1)[0]["<ans>"] == best


def test_sampling_repeats_with_a_seed() -> None:
    """Drawing is_license_allowed the seed and the constraints."""
    options: dict[str, Any] = {"do_sample": True, "temperature": 2.0, "max_new_tokens": 8}
    first = fill_documents(model(), tokenizer(), [OPEN, RATING], seed=1, **options)
    assert first == fill_documents(model(), tokenizer(), [OPEN, RATING], seed=1, **options)
    answers = {
        fill_documents(model(), tokenizer(), [OPEN], seed=seed, **options)[0]["<ans>"]
        for seed in range(6)
    }
    assert len(answers) > 1
    assert first[1]["<ans>"] in {"1", "2", "3", "4", "5"}


def test_repetition_penalty_leaves_ends_alone() -> None:
    """A penalty spreads the tokens of all answers, and answers still end."""
    plain = fill_documents(model(), tokenizer(), [BLANKS], num_beams=1, max_new_tokens=8)
    spread = fill_documents(
        model(), tokenizer(), [BLANKS], num_beams=1, max_new_tokens=8, repetition_penalty=50.0
    )
    text = "".join(spread[0]["<ans>"].values())
    assert spread != plain
    assert len(set(text)) >= len(text) - 2


def test_bad_input() -> None:
    """Documents that cannot be read, options without a place, another model's tokenizer."""
    with pytest.raises(DataError, match=r"document 1: .*<ans>"):
        fill_documents(model(), tokenizer(), [OPEN, {"input": "x"}])
    with pytest.raises(DataError, match=r"document 0: .*max_length=4"):
        fill_documents(model(), tokenizer(), [OPEN], max_length=4)
    with pytest.raises(ConfigError, match="eos_token_id=7"):
        fill_documents(model(), tokenizer(), [OPEN], eos_token_id=7)
    with pytest.raises(ConfigError, match="vocab_size"):
        fill_documents(model(), CPMBeeTokenizer([*SPECIALS, "a"]), [OPEN])
    assert fill_documents(model(), tokenizer(), []) == []
    assert not np.any([m.training for m in model().modules()])


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`bmforge generate MODEL --document FILE` prints the filled documents, line by line."""
    model().save_pretrained(tmp_path / "bee")
    tokenizer().save_pretrained(tmp_path / "bee")
    lines = [json.dumps(d, ensure_ascii=False) for d in (OPEN, RATING)]
    file = tmp_path / "questions.jsonl"
    file.write_text("\n".join(lines) + "\n\n", encoding="utf-8")
    call = ["generate", str(tmp_path / "bee"), "--document", str(file), "--max-new-tokens", "6"]
    assert main(call) == 0
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert printed == fill_documents(model(), tokenizer(), [OPEN, RATING], max_new_tokens=6)
    file.write_text(f"{lines[0]}\n{{", encoding="utf-8")
    assert main(call) == 2
    assert "line 2" in capsys.readouterr().err
    assert main([*call, "--prompt", "x"]) == 2
    assert "--prompt" in capsys.readouterr().err


def nest(levels: int) -> str:
    """A document that is nested so deep."""
    return '{"input":' * levels + '"x"' + "}" * levels


def test_one_bad_document_stops_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is said with its line as editors count them; what is right is answered as before."""
    model().save_pretrained(tmp_path / "bee")
    tokenizer().save_pretrained(tmp_path / "bee")
    unseen = "".join(f"{chr(0x4E00 + number)}a" for number in range(3000))
    bad = {
        2: (b'{"input": "' + b"ab" * 2000 + b'", "<ans>": ""}', "more than"),
        3: (json.dumps({"input": unseen, "<ans>": ""}).encode(), "more than"),
        4: (rb'{"input": "a\ud800", "<ans>": ""}', r"has '\ud800', an unpaired surrogate"),
        6: (nest(2_000).encode(), "nested"),
        7: (nest(200_000).encode(), "nested too deep"),
        8: (b'{"input": "a", "input": "b", "<ans>": ""}', "has the key 'input' twice"),
        9: (b'{"input": "\xff", "<ans>": ""}', "is not JSON"),
        11: (b"[]", "is a list, not a JSON object"),
        12: (b'{"input": 3, "<ans>": ""}', "the value at input is 3"),
    }
    good = {1: OPEN, 5: RATING, 13: BLANKS}
    lines = {number: line for number, (line, _) in bad.items()}
    lines |= {number: json.dumps(document).encode() for number, document in good.items()}
    ends = {1: b"\r\n", 2: b"\r"}
    text = b"".join(lines.get(n, b"") + ends.get(n, b"\n") for n in range(1, 14))
    (tmp_path / "questions.jsonl").write_bytes(text)
    call = ["generate", str(tmp_path / "bee"), "--document", str(tmp_path / "questions.jsonl")]
    assert main([*call, "--max-new-tokens", "3"]) == 2
    said = capsys.readouterr()
    want = fill_documents(model(), tokenizer(), list(good.values()), max_new_tokens=3)
    assert [json.loads(line) for line in said.out.splitlines()] == want
    *told, last = said.err.splitlines()
    assert "9 of 12 documents" in last
    assert len(told) == len(bad)
    for line, (number, (_, words)) in zip(told, bad.items(), strict=True):
        assert line.startswith(f"line {number}: ")
        assert words in line
        assert len(line) < 600


def test_answers_come_batch_by_batch() -> None:
    """Nothing is read that is not about to be filled."""
    taken = []

    def read() -> Any:
        for number in range(5):
            taken.append(number)
            yield {**OPEN, "input": f"tell {number}"} if number != 1 else DataError("bad")

    filled = fill_each(model(), tokenizer(), read(), batch_size=2, max_new_tokens=2)
    assert next(filled)["input"] == "tell 0"
    assert taken == [0, 1]
    assert isinstance(next(filled), DataError)
    assert next(filled)["input"] == "tell 2"
    assert taken == [0, 1, 2, 3]
    assert [one["input"] for one in filled] == ["tell 3", "tell 4"]
