"""Long texts cut into pieces: the ids of the pieces, joined, are those of the whole text."""

from __future__ import annotations

import random
from functools import cache

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, trainers

from bmforge.data import Document, TokenStore, encode_to_store, train_bpe
from bmforge.data.prepare import tokenize
from bmforge.data.prepare.tokenize import BpeConfig
from bmforge.tokenizers import FastTokenizer
from bmforge.tokenizers.gguf_read import PRE
from bmforge.tokenizers.text_pieces import PIECE_CHARACTERS, cut_text, find_separators

WORDS = ["it's", "don't", "THE", "ΟΔΟΣ", "naïve", "e\u0301t", "한국", "か\u3099", "１２３", "12345"]
WORDS += ["ﬁne", "a_b", "x", "in", "to", "now", "今天天气", "好", "的", "ᴀ", "\U0001e94b", "\u1c90"]
GAPS = [" ", " ", " ", "\n", "\n", "  ", "\n\n", " \n", "\t", "\r\n", "，", "。", "。\n", "、"]
GAPS += [", ", "!\n", "-", "'", "\u00a0", "\u3000", "\u200d", "\u2028", "🦉", "<x>", "", " \u0301"]
TEXTS = st.lists(st.sampled_from(WORDS + GAPS), max_size=40).map("".join)
QWEN, LLAMA3 = PRE["qwen2"].expressions[0], PRE["llama-bpe"].expressions[0]
GPT4O, STARCODER = PRE["gpt-4o"].expressions[0], PRE["starcoder"].expressions
ALL, PLAIN = " \n，。！？；：、", " \n"


def byte_level(*expressions, prefix=False, behavior="isolated", invert=False, normalizer=None):
    split = [pre_tokenizers.Split(Regex(e), behavior, invert) for e in expressions]
    pre = [*split, pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=not split)]
    return models.BPE(), normalizer, pre_tokenizers.Sequence(pre)


def metaspace(scheme="always", *before, split=True):
    steps = normalizers.Sequence([*before, normalizers.Replace(Regex(" {2,}"), " ")])
    space = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=split)
    return models.Unigram(), steps, space


LOWER, NFKC, STRIP = normalizers.BertNormalizer(), normalizers.NFKC(), normalizers.Strip()
BERT = pre_tokenizers.BertPreTokenizer()
# name -> ((model, normalizer, pre-tokenizer), separators)
KINDS = {
    "gpt2": (byte_level(), ALL),
    "gpt2_prefix": (byte_level(prefix=True), " "),
    "qwen": (byte_level(QWEN, normalizer=normalizers.NFC()), ALL),
    "llama3": (byte_level(LLAMA3), ALL),
    "llama3_removed": (byte_level(LLAMA3, behavior="removed", invert=True), ALL),
    "gpt4o": (byte_level(GPT4O), ALL),
    "starcoder": (byte_level(*STARCODER), ALL),
    "nfkc": (byte_level(QWEN, normalizer=NFKC), " \n。、"),
    "unigram": (metaspace("always"), " "),
    "unigram_first": (metaspace("first"), " "),
    "unigram_never": (metaspace("never"), " "),
    "unigram_strip": (metaspace("always", normalizers.Nmt(), STRIP), PLAIN),
    "unigram_nfkc": (metaspace("always", NFKC), " "),
    "wordpiece": ((models.WordPiece(unk_token="[UNK]"), LOWER, BERT), ALL),
    "whitespace": ((models.BPE(), None, pre_tokenizers.Whitespace()), ALL),
    "split": ((models.BPE(), None, pre_tokenizers.WhitespaceSplit()), PLAIN),
}
# Tokenizers that need the whole text.
WHOLE = {
    "llama2": (models.BPE(), normalizers.Prepend("▁"), None),
    "strip": metaspace("never", STRIP),
    "unsplit": metaspace("always", split=False),
    "own_expression": byte_level(r"[^\s]+\s*|\s+"),
    "merged": byte_level(QWEN, behavior="merged_with_next"),
    "dropout": (models.BPE(dropout=0.5), None, pre_tokenizers.ByteLevel()),
    "punctuation": (models.BPE(), None, pre_tokenizers.Punctuation()),
    "word_then_space": (models.BPE(), None, pre_tokenizers.CharDelimiterSplit(" ")),
}


def build(model, normalizer, pre_tokenizer):
    tokenizer = tokenizers.Tokenizer(model)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    return tokenizer


@cache
def trained(name):
    tokenizer = build(*KINDS[name][0])
    rng = random.Random(0)
    texts = ["".join(rng.choice(WORDS + GAPS) for _ in range(40)) for _ in range(300)]
    options = {"vocab_size": 420, "show_progress": False}
    if isinstance(tokenizer.model, models.Unigram):
        trainer = trainers.UnigramTrainer(unk_token="<unk>", special_tokens=["<unk>"], **options)
    elif isinstance(tokenizer.model, models.WordPiece):
        trainer = trainers.WordPieceTrainer(special_tokens=["[UNK]"], **options)
    else:
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(initial_alphabet=alphabet, **options)
    tokenizer.train_from_iterator(texts, trainer)
    # An added token that is found in texts, and removes the spaces before it.
    tokenizer.add_tokens([AddedToken("<x>", lstrip=True, normalized=False)])
    return FastTokenizer(tokenizer.to_str().encode()), find_separators(tokenizer)


@pytest.mark.parametrize("name", KINDS)
def test_the_separators_of_each_kind(name):
    assert trained(name)[1] == KINDS[name][1]


@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=50, deadline=None)
@given(text=TEXTS)
@example(text="in to now\nx in，好 的。今天天气")
def test_ids_of_pieces_are_those_of_the_whole_text(name, text):
    tokenizer, separators = trained(name)
    pieces = list(cut_text(text, separators, 1))
    assert "".join(pieces) == text
    (whole,) = tokenizer.encode_plain([text])
    assert [id for ids in tokenizer.encode_plain(pieces) for id in ids] == whole


@pytest.mark.parametrize("name", KINDS)
def test_a_long_text_is_cut_at_each_separator(name):
    separators = KINDS[name][1]
    for separator in separators:
        text = "".join(f"a{separator}" for _ in range(50)) + "a"
        assert max(map(len, cut_text(text, separators, 4))) <= 6


@pytest.mark.parametrize("name", WHOLE)
def test_other_tokenizers_get_the_whole_text(name):
    tokenizer = build(*WHOLE[name])
    assert find_separators(tokenizer) == ""
    assert list(cut_text("a b\nc" * 9, find_separators(tokenizer), 1)) == ["a b\nc" * 9]


@pytest.mark.parametrize(
    "token",
    [
        AddedToken("new york", normalized=False),
        AddedToken("end", rstrip=True, normalized=False),
        AddedToken(" x", single_word=True, normalized=False),
    ],
)
def test_added_tokens_over_a_cut_forbid_cuts(token):
    tokenizer = build(*KINDS["gpt2"][0])
    assert find_separators(tokenizer) == ALL
    tokenizer.add_tokens([token])
    assert find_separators(tokenizer) == ""


@pytest.mark.parametrize(
    "config", [BpeConfig(), BpeConfig(digits="single", han="single"), BpeConfig(digits="triples")]
)
def test_a_long_document_is_trained_on_and_stored_as_if_whole(config, tmp_path, monkeypatch):
    rng = random.Random(1)
    text = "".join(rng.choice(WORDS) + rng.choice(GAPS) for _ in range(60_000))
    assert len(text) > 2 * PIECE_CHARACTERS
    lengths: list[int] = []
    whole = FastTokenizer.encode_plain

    def encode(tokenizer, texts):
        lengths.extend(map(len, texts))
        return whole(tokenizer, texts)

    tokenizer = train_bpe([text, "short"], 500, config)
    monkeypatch.setattr(FastTokenizer, "encode_plain", encode)
    documents = [Document(t, "x") for t in ("before", text, "after")]
    count = encode_to_store(documents, tokenizer, tmp_path / "s")
    assert max(lengths) < PIECE_CHARACTERS + 1000
    store = TokenStore(tmp_path / "s")
    ids = [store.tokens[a:b].tolist() for a, b in store.documents()]
    assert ids == [[*whole(tokenizer, [d.text])[0], 0] for d in documents]
    assert (count.documents, count.tokens) == (3, sum(map(len, ids)))
    assert count.text_bytes == sum(len(d.text.encode()) for d in documents)
    monkeypatch.setattr(tokenize, "cut_text", lambda text, separators: iter((text,)))
    assert train_bpe([text, "short"], 500, config).definition == tokenizer.definition
