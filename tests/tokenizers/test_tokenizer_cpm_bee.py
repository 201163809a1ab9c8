"""CPM-Bee's tokenizer against the published ids and a plain greedy matcher."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from bee_vocabulary import PUBLISHED_SIZE, SPECIALS, golden_tokenizer, small_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from bmforge.errors import ConfigError, DataError
from bmforge.tokenizers import AutoTokenizer
from bmforge.tokenizers.cpm_bee.tokenizer import CPMBeeTokenizer

GOLDEN = [
    ("今天天气是真的<mask_0>", [9803, 14963, 1730, 23974, 86583], {86583: "<mask_0>"}),
    ("𠮷野家", [86583, 2516, 2350], {86583: "𠮷"}),
]


@pytest.mark.parametrize(("text", "ids", "table"), GOLDEN)
def test_published_ids(text, ids, table):
    tokenizer = golden_tokenizer()
    assert tokenizer.vocab_size == len(tokenizer) == PUBLISHED_SIZE
    assert tokenizer.encode_extended(text) == (ids, table)
    assert tokenizer.decode(ids, table) == text


@pytest.mark.skipif(
    "BMFORGE_CPM_BEE" not in os.environ, reason="BMFORGE_CPM_BEE names no vocabulary"
)
def test_published_ids_with_the_published_vocabulary():
    tokenizer = CPMBeeTokenizer.from_pretrained(os.environ["BMFORGE_CPM_BEE"])
    assert len(tokenizer) == PUBLISHED_SIZE
    for text, ids, table in GOLDEN:
        assert tokenizer.encode_extended(text) == (ids, table)
    assert tokenizer.special_tokens == {
        "<pad>": 0, "<unk>": 1, "<mask>": 2, "<sep>": 3, "<s>": 6, "</s>": 7, "<root>": 8,
        "<ans>": 9, "<option>": 10, "<eod>": 65756,
    }  # fmt: skip


def plain_tokens(text: str, words: set[str]) -> list[str]:
    """Greedy longest match, by trying every length at every place; unknown runs are merged."""
    found: list[str] = []
    at, unknown = 0, ""
    while at < len(text):
        sizes = [n for n in range(32, 0, -1) if text[at : at + n] in words and at + n <= len(text)]
        if sizes:
            found += [unknown] if unknown else []
            unknown = ""
            found.append(text[at : at + sizes[0]])
        else:
            unknown += text[at]
        at += sizes[0] if sizes else 1
    return found + ([unknown] if unknown else [])


def test_longest_match_against_a_plain_one():
    tokenizer = small_tokenizer()
    words = set(tokenizer._decoder) - set(tokenizer.special_tokens)
    generator = random.Random(0)
    pieces = [
        "今天",
        "天气",
        "好吃",
        "input",
        "inputs",
        "a<b",
        "<",
        " ",
        "\n",
        "𠮷",
        "é",
        "opt",
        "s",
    ]
    for _ in range(200):
        text = "".join(generator.choices(pieces, k=generator.randint(0, 12)))
        ids, table = tokenizer.encode_extended(tokenizer.escape(text))
        assert [table.get(i) or tokenizer._decoder[i] for i in ids] == plain_tokens(text, words)


@given(st.text(alphabet="今天气inputs<>_ \n𠮷é�\ud800abc", max_size=40))
@settings(max_examples=100, deadline=None)
def test_any_text_comes_back(text):
    tokenizer = small_tokenizer()
    escaped = tokenizer.escape(text)
    ids, table = tokenizer.encode_extended(escaped)
    assert tokenizer.decode(ids, table) == escaped
    assert all(i < len(tokenizer) or i in table for i in ids)


def test_specials_and_escapes():
    tokenizer = small_tokenizer()
    size, ids = len(tokenizer), tokenizer.special_tokens
    assert tokenizer.encode_extended("<mask><mask_3><mask><ans>") == (
        [ids["<mask>"], size, ids["<mask>"], ids["<ans>"]],
        {size: "<mask_3>"},
    )
    escaped, table = tokenizer.encode_extended("<<mask_3>")
    assert tokenizer.decode(escaped) == "<<mask_3>"
    assert not table
    assert tokenizer.encode_extended("<<<mask_3>")[1] == {size: "<mask_3>"}


def test_a_piece_may_hold_the_escaped_character():
    tokenizer = small_tokenizer()
    (only,), _ = tokenizer.encode_extended("a<<b")
    assert tokenizer.decode([only]) == "a<<b"


def test_the_table_goes_on_and_the_given_one_stays():
    tokenizer = small_tokenizer()
    size = len(tokenizer)
    _, first = tokenizer.encode_extended("<mask_1>𠮷é今")
    assert first == {size: "<mask_1>", size + 1: "𠮷é"}
    ids, second = tokenizer.encode_extended("𠮷é<mask_2><mask_1>", first)
    assert ids == [size + 1, size + 2, size]
    assert second == {**first, size + 2: "<mask_2>"}
    assert len(first) == 2


def test_an_unknown_less_than_sign_is_no_special():
    tokens = [*SPECIALS, "a", ">"]
    tokenizer = CPMBeeTokenizer(tokens)
    ids, table = tokenizer.encode_extended("<<<<a>")
    assert tokenizer.decode(ids, table) == "<<<<a>"
    assert table == {len(tokens): "<<<<"}


@pytest.mark.parametrize("text", ["a<", "<mask", "<mask<mask_0>>", "1 < 2", "<>", "<a<b>"])
def test_stray_less_than_signs(text):
    with pytest.raises(DataError, match="rite << for the character"):
        small_tokenizer().encode_extended(text)


def test_ids_that_are_none():
    tokenizer = small_tokenizer()
    for bad in (-1, len(tokenizer)):
        with pytest.raises(DataError, match="neither in the vocabulary"):
            tokenizer.decode([bad])


def test_files(tmp_path: Path):
    tokenizer = golden_tokenizer()
    tokenizer.save_pretrained(tmp_path / "new")
    again = CPMBeeTokenizer.from_pretrained(tmp_path / "new")
    assert len(again) == PUBLISHED_SIZE
    assert again.encode_extended(GOLDEN[0][0]) == tokenizer.encode_extended(GOLDEN[0][0])
    assert type(AutoTokenizer.from_pretrained(tmp_path / "new")) is CPMBeeTokenizer
    with pytest.raises(ConfigError, match="already contains a different"):
        small_tokenizer().save_pretrained(tmp_path / "new")
    assert [again.token_to_id(token) for token in ("</n>", "<ans>", "真的", "é")] == [
        4, 9, 23974, None,
    ]  # fmt: skip
    assert again.special_ids == {"pad": 0, "bos": 6, "eos": 7, "unk": 1, "mask": 2}
    windows = tmp_path / "windows.txt"
    windows.write_bytes("\r\n".join([*SPECIALS, "a", "", "b", ""]).encode())
    assert CPMBeeTokenizer.from_pretrained(windows).encode("ab\n ") == [11, 12, 4, 5]
    with pytest.raises(DataError, match="cannot read the vocabulary"):
        CPMBeeTokenizer.from_pretrained(tmp_path / "absent")
    (tmp_path / "vocab.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match="UTF-8"):
        CPMBeeTokenizer.from_pretrained(tmp_path)


def test_vocabularies_that_are_none():
    with pytest.raises(ConfigError, match=r"lacks the tokens \['<mask>', '</n>'\]"):
        CPMBeeTokenizer([t for t in SPECIALS if t not in ("<mask>", "</n>")])
    with pytest.raises(ConfigError, match="duplicate"):
        CPMBeeTokenizer([*SPECIALS, "a", "b", "a"])
