"""Our word cutting against jieba itself, and the greedy matcher against the plain way."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bmforge.errors import ConfigError, MissingDependencyError
from bmforge.tokenizers.longest_match import LongestMatcher, Match
from bmforge.tokenizers.word_encoder import WordEncoder
from bmforge.tokenizers.words import WordSegmenter

jieba = pytest.importorskip("jieba", reason="the words to compare with are jieba's")
pytest.importorskip("rjieba", reason="needs the extra zh")
jieba.setLogLevel("WARNING")
from plain_tokenizers import spell  # noqa: E402

LATIN = "abXY019+#&._%-"
LATIN_WORDS = ["AT&T", "C++", "c#", "c++", "C#", "C", "+", "AT", "&", "#"]
OTHER = [*" \r\n\t，。！、“”①１Ａé𠮷㐀γ\u3000\ud800", "\r\n"]
KNOWN = [*"的一是不了人我在有他这为之大来以个中上们北京清华学天气你好"]
MIXED = ["T恤", "AA制", "IP地址", "4S店", "C语言", "γ射线", "卡拉OK", "2020年", "3.5%", "x-1.5"]


def random_text(rng: random.Random, *pools: list[str]) -> str:
    return "".join(rng.choice(rng.choice(pools)) for _ in range(rng.randint(0, 25)))


@pytest.mark.parametrize(
    ("name", "pools"),
    [
        ("everything", ([*LATIN], LATIN_WORDS, OTHER, KNOWN, MIXED)),
        ("latin", ([*LATIN], LATIN_WORDS)),
        ("chinese", (KNOWN, [chr(code) for code in range(0x4E00, 0x9FD6)])),
        ("edges of the runs", (KNOWN, [chr(code) for code in range(0x9FC0, 0xA010)])),
    ],
)
def test_words_are_jiebas(name, pools):
    rng = random.Random(name)
    cutter = WordSegmenter()
    for _ in range(500):
        text = random_text(rng, *pools)
        assert cutter.cut(text) == jieba.lcut(text), repr(text)


@given(st.text(alphabet=st.characters(min_codepoint=0, max_codepoint=0x1FFFF), max_size=40))
@settings(max_examples=200, deadline=None)
def test_any_text_is_cut_as_jieba_does_and_joins_again(text):
    words = WordSegmenter().cut(text)
    assert words == jieba.lcut(text)
    assert "".join(words) == text


def test_dictionary_words_of_jieba(shared_data):
    """Real words side by side, dictionary words with Latin letters among them."""
    del shared_data
    rng = random.Random(0)
    words = [word for word, count in jieba.dt.FREQ.items() if count]
    latin = [word for word in words if not word.isalpha() or word.upper() != word.lower()]
    cutter = WordSegmenter()
    for _ in range(500):
        text = random_text(rng, words, latin, [*LATIN])
        assert cutter.cut(text) == jieba.lcut(text), repr(text)


def test_without_new_words_it_is_jieba_without_its_model():
    rng = random.Random(1)
    cutter = WordSegmenter(new_words=False)
    for _ in range(500):
        text = random_text(rng, [*LATIN], LATIN_WORDS, OTHER, KNOWN, MIXED)
        assert cutter.cut(text) == jieba.lcut(text, HMM=False), repr(text)


@pytest.mark.parametrize("every", [20, pytest.param(1, marks=pytest.mark.long)])
def test_real_lines_are_cut_as_jieba_does(real_lines, every):
    cutter = WordSegmenter()
    wrong = [line for line in real_lines[::every] if cutter.cut(line) != jieba.lcut(line)]
    assert not wrong, wrong[:3]


def plain_matches(text: str, vocabulary: dict[str, int]) -> list[Match]:
    found: list[Match] = []
    at = 0
    while at < len(text):
        for end in range(len(text), at, -1):
            if text[at:end] in vocabulary:
                found.append(Match(text[at:end], vocabulary[text[at:end]]))
                break
        else:
            end = at + 1
            if found and found[-1].id is None:
                found[-1] = Match(found[-1].text + text[at], None)
            else:
                found.append(Match(text[at], None))
        at = end
    return found


@given(
    st.lists(st.text("ab中𠮷", min_size=1, max_size=5), min_size=1, max_size=12, unique=True),
    st.text("abc中𠮷\ud800", max_size=30),
)
@settings(max_examples=300, deadline=None)
def test_longest_match_is_the_plain_one(tokens, text):
    vocabulary = {token: number + 7 for number, token in enumerate(tokens)}
    matcher = LongestMatcher(vocabulary)
    assert matcher.match(text) == plain_matches(text, vocabulary)
    assert "".join(match.text for match in matcher.match(text)) == text
    assert matcher.encode(text, 3) == spell(text, {**vocabulary, "<unk>": 3}, marked=False)


@given(
    st.lists(st.text("ab#中", min_size=1, max_size=5), min_size=1, max_size=12, unique=True),
    st.text("ab中#c", min_size=1, max_size=12),
)
@settings(max_examples=300, deadline=None)
def test_marked_tokens_are_the_plain_ones(tokens, word):
    vocabulary = {
        token: number for number, token in enumerate(dict.fromkeys(["<unk>", "##ab", *tokens]))
    }
    assert list(WordEncoder(vocabulary, 0, marked=True)[word]) == spell(
        word, vocabulary, marked=True
    )


def test_a_long_word_is_one_unknown_token():
    tokens = WordEncoder({"<unk>": 0, "a": 1}, 0)
    assert tokens["a" * 200] == (1,) * 200
    assert tokens["a" * 201] == (0,)


def test_long_tokens_can_be_left_out():
    matcher = LongestMatcher({"abcd": 0, "ab": 1}, max_chars=3)
    assert matcher.match("abcd") == [("ab", 1), ("cd", None)]
    with pytest.raises(ConfigError, match="max_chars=1"):
        LongestMatcher({"ab": 0}, max_chars=1)


def test_a_missing_package_names_the_extra(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "rjieba", None)
    with pytest.raises(MissingDependencyError, match=r"\[zh\]"):
        WordSegmenter()
    monkeypatch.setitem(__import__("sys").modules, "ahocorasick_rs", None)
    with pytest.raises(MissingDependencyError, match=r"\[zh\]"):
        LongestMatcher({"a": 0})
