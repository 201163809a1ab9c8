"""CPM-1, CPM-2, EVA and CPM-Ant: golden ids of the originals, plain algorithms, transformers."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest

from bmforge.errors import ConfigError, DataError
from bmforge.tokenizers import (
    AutoTokenizer,
    CPM1Tokenizer,
    CPM2Tokenizer,
    CPMAntPlusTokenizer,
    CPMAntTokenizer,
    EVATokenizer,
)

jieba = pytest.importorskip("jieba", reason="the originals cut with jieba")
pytest.importorskip("rjieba", reason="needs the extra zh")
jieba.setLogLevel("WARNING")
import plain_tokenizers  # noqa: E402

TEXTS = [
    "",
    "好",
    " ",
    "\n",
    "今天天气真好！\n我们 走吧",
    "hello world",
    "hello, worlds. tokenization!",
    "今天ＡＢＣ天气，２０２０　！（好）",
    "中国hello中国 world\r\n的 的",
    "说“好”…‘不’＂？～",
    "未知𠮷字㐀 x" + "9" * 201,
]


@pytest.fixture(scope="module")
def plain():
    """The plain algorithms, with jieba's words of a text kept for the next of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plain_tokenizers, "cut", functools.cache(jieba.lcut))
        yield plain_tokenizers


REAL = {
    "cpm1": (CPM1Tokenizer, "cpm1"),
    "cpm2_cn": (CPM2Tokenizer, "cpm2"),
    "cpm2_cn_en": (CPM2Tokenizer, "cpm2"),
    "eva": (EVATokenizer, "eva"),
    "cpm_ant": (CPMAntTokenizer, "cpm_ant"),
}


# All 10,000 lines take minutes with jieba itself: every twentieth in the short run.
EVERY = [20, pytest.param(1, marks=pytest.mark.long)]


@pytest.mark.parametrize("every", EVERY)
@pytest.mark.parametrize("name", REAL)
def test_real_lines_as_the_original_does(name, every, shared_data, real_lines, plain):
    folder = shared_data(f"vocab/{name}")
    tokenizer_class, algorithm = REAL[name]
    tokenizer = tokenizer_class.from_pretrained(folder)
    expected = getattr(plain, algorithm)(folder)
    assert len(real_lines) == 10_000
    lines = [*TEXTS, *real_lines[::every]]
    wrong = [
        line
        for line, ids in zip(lines, tokenizer.encode_batch(lines), strict=True)
        if ids != expected(line)
    ]
    assert not wrong, (len(wrong), wrong[:3])
    assert tokenizer.encode(lines[-1]) == tokenizer.encode_batch(lines[-1:])[0]


GOLDEN_CPM1 = {
    "清华大学位于北京。": [7324, 954, 520, 8, 12],
    "人工智能": [11048, 540],
    "今天天气不错 hello world\n我们去公园": [
        *(837, 259, 497, 788, 8, 10, 25159, 8, 10, 15638, 8, 3, 101, 91, 3165),
    ],
}


def test_cpm1_golden_ids(shared_data):
    tokenizer = CPM1Tokenizer.from_pretrained(shared_data("vocab/cpm1"))
    for text, ids in GOLDEN_CPM1.items():
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids) == text
    assert tokenizer.vocab_size == 30_000
    assert tokenizer.special_ids == {
        **{"unk": 0, "bos": 1, "newline": 3, "sep": 4, "pad": 5, "mask": 6},
        **{"eos": 7, "eod": 7, "space": 10},
    }
    assert tokenizer.decode([11048, 540, 7]) == "人工智能<eod>"


def test_cpm_ant_golden_ids(shared_data):
    tokenizer = CPMAntTokenizer.from_pretrained(shared_data("vocab/cpm_ant"))
    text = "今天天气真好！\n我们 走吧"
    assert tokenizer.encode(text) == [9802, 14962, 2082, 831, 244, 4, 18039, 5, 875, 997]
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.vocab_size == 30_720
    ids = (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id, tokenizer.unk_id)
    assert ids == (6, 7, 0, 1)


@pytest.mark.parametrize("every", EVERY)
def test_cpm_ant_is_transformers_without_new_words(every, shared_data, real_lines):
    """transformers cuts without jieba's model of new words; with `new_words=False` so do we."""
    transformers = pytest.importorskip("transformers")
    folder = shared_data("vocab/cpm_ant")
    peer = transformers.CpmAntTokenizer(str(folder / "vocab.txt"))
    tokenizer = CPMAntTokenizer.from_pretrained(folder, new_words=False)
    lines = real_lines[::every]
    expected = peer(lines, add_special_tokens=False)["input_ids"]
    wrong = [
        line
        for line, ids, peer_ids in zip(lines, tokenizer.encode_batch(lines), expected, strict=True)
        if ids != peer_ids
    ]
    assert not wrong, (len(wrong), wrong[:3])
    assert [tokenizer.decode(ids) for ids in expected[:200]] == [
        "".join(peer.convert_ids_to_tokens(ids)) for ids in expected[:200]
    ]


def test_cpm2_special_ids_and_sentinels(shared_data):
    chinese = CPM2Tokenizer.from_pretrained(shared_data("vocab/cpm2_cn"))
    both = CPM2Tokenizer.from_pretrained(shared_data("vocab/cpm2_cn_en"))
    eva = EVATokenizer.from_pretrained(shared_data("vocab/eva"))
    assert (chinese.vocab_size, len(chinese.sentinel_ids)) == (26_240, 190)
    assert (both.vocab_size, len(both.sentinel_ids)) == (51_968, 185)
    assert (eva.vocab_size, len(eva.sentinel_ids)) == (30_000, 190)
    assert (both.special_ids["go"], both.eos_id, both.special_ids["space"]) == (7, 8, 11)
    assert chinese.sentinel_id(189) == 26_239
    assert (eva.sep_id, eva.bos_id, eva.eos_id) == (4, eva.sentinel_id(0), 4)
    with pytest.raises(ConfigError, match="sentinel token 185"):
        both.sentinel_id(185)


@pytest.mark.parametrize("kind", ["cpm2", "cpm2_marked", "ant", "eva"])
@pytest.mark.parametrize("text", TEXTS)
def test_small_vocabularies_as_the_plain_algorithm(kind, text, request, plain):
    folder = request.getfixturevalue({"eva": "cpm2"}.get(kind, kind) + "_folder")
    tokenizer_class = {"ant": CPMAntTokenizer, "eva": EVATokenizer}.get(kind, CPM2Tokenizer)
    if kind == "cpm2_marked":
        assert "##s" in plain.read_vocabulary(folder)
    expected = getattr(plain, {"ant": "cpm_ant", "eva": "eva"}.get(kind, "cpm2"))(folder)
    assert tokenizer_class.from_pretrained(folder).encode(text) == expected(text)


@pytest.mark.parametrize(
    "text", ["今天天气好！\n我们 走 吧", "hello world, hello\n", "", " ", "\n\n"]
)
def test_round_trip_where_the_vocabulary_can_spell(text, cpm2_folder, ant_folder):
    for tokenizer in (
        CPM2Tokenizer.from_pretrained(cpm2_folder),
        CPMAntTokenizer.from_pretrained(ant_folder),
    ):
        ids = tokenizer.encode(text)
        assert tokenizer.unk_id not in ids
        assert tokenizer.decode(ids) == text


def test_spaces_between_english_words_are_dropped_and_come_back(cpm2_marked_folder):
    tokenizer = CPM2Tokenizer.from_pretrained(cpm2_marked_folder)
    space = tokenizer.special_ids["space"]
    ids = tokenizer.encode("hello world 今天 tokenization")
    assert ids.count(space) == 2
    assert tokenizer.decode(ids) == "hello world 今天 tokenization"
    assert tokenizer.encode("hello") == [tokenizer.token_to_id("hello")]
    assert tokenizer.encode(" hello ") == [space, tokenizer.token_to_id("hello"), space]


def test_half_width_forms(cpm2_folder):
    cpm2, eva = (
        CPM2Tokenizer.from_pretrained(cpm2_folder),
        EVATokenizer.from_pretrained(cpm2_folder),
    )
    assert cpm2.decode(cpm2.encode("ＡＢＣ　，！。")) == "ABC ，！。"
    assert eva.decode(eva.encode("，！…")) == ",!..."


def test_full_width_letters_stay_in_2_1(cpm2_marked_folder):
    """Its original narrows nothing: letters that the vocabulary lacks are unknown, one by one."""
    tokenizer = CPM2Tokenizer.from_pretrained(cpm2_marked_folder)
    unknown = tokenizer.unk_id
    assert tokenizer.encode("ＡＢ") == [unknown, unknown]
    assert tokenizer.encode("今天\u3000，") == [
        *tokenizer.encode("今天"), unknown, tokenizer.token_to_id("，"),
    ]  # fmt: skip


def test_blank_lines_of_ants_vocabulary_do_not_count(ant_folder):
    """The original skips them when it numbers the tokens; what was given is saved as it was."""
    plain = CPMAntTokenizer.from_pretrained(ant_folder)
    lines = (ant_folder / "vocab.txt").read_text("utf-8").splitlines()
    content = "\n".join([*lines[:12], "", "  ", *lines[12:], "", ""]).encode()
    spaced = CPMAntTokenizer(content)
    assert spaced.get_vocab() == plain.get_vocab()
    assert spaced._files() == {"vocab.txt": content}
    with pytest.raises(DataError, match="'</d>' twice, in lines 10 and 15"):
        CPMAntTokenizer("\n".join([*lines[:12], "", "", "</d>"]).encode())


def test_plus_cuts_no_words(make_vocabulary):
    """The longest pieces of the whole text, without what no piece spells."""
    head = ["<pad>", "<unk>", "<mask>", "<sep>", "</n>", "</_>", "<s>", "</s>", "<d>", "</d>"]
    rest = ["<eod>", "今天", "天气", "今", "天气真好", "a", "<", "<m", "ab", " ab", "s", ">"]
    folder = make_vocabulary(*head, *rest, name="plus")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert type(tokenizer) is CPMAntPlusTokenizer
    encode = plain_tokenizers.cpm_ant_plus(folder)
    for text in ("今天气真好", "aab<s>\n <mask>", "今天𠮷气天气真好。", "<eod>", "a ab", ""):
        assert tokenizer.encode(text) == encode(text)
    assert tokenizer.decode(tokenizer.encode("ab <s>")) == "ab <s>"
    (folder / "config.json").write_text('{"model_type": "cpm_ant"}')
    assert type(AutoTokenizer.from_pretrained(folder)) is CPMAntPlusTokenizer


def test_cpm1_with_a_small_model(small_sentence_piece, tmp_path):
    (tmp_path / "chinese_vocab.model").write_bytes(small_sentence_piece)
    tokenizer = CPM1Tokenizer.from_pretrained(tmp_path)
    for text in ("今天天气不错 hello world\n我们去公园", "", "\n 的"):
        ids = tokenizer.encode(text)
        assert tokenizer.encode_batch([text]) == [ids]
        assert tokenizer.decode(ids) == text
    assert tokenizer.decode([tokenizer.eos_id]) == "<eod>"
    for wrong in (-1, tokenizer.vocab_size):
        with pytest.raises(DataError, match=f"id={wrong}"):
            tokenizer.decode([wrong])


def test_cpm1_refuses_a_vocabulary_of_another_model(small_sentence_piece, tmp_path):
    (tmp_path / "chinese_vocab.model").write_bytes(small_sentence_piece)
    good = CPM1Tokenizer(small_sentence_piece).get_vocab()
    (tmp_path / "vocab.json").write_text(json.dumps(good), "utf-8")
    CPM1Tokenizer.from_pretrained(tmp_path)
    (tmp_path / "vocab.json").write_text(json.dumps({**good, "的": 0, "新": 5}), "utf-8")
    with pytest.raises(DataError, match="different ids"):
        CPM1Tokenizer.from_pretrained(tmp_path)


def test_decoding_what_is_no_id(cpm2_folder, ant_folder):
    ant = CPMAntTokenizer.from_pretrained(ant_folder)
    assert ant.decode([-1, -100, ant.token_to_id("好")]) == "好"
    with pytest.raises(DataError, match=f"id={ant.vocab_size}"):
        ant.decode([ant.vocab_size])
    with pytest.raises(DataError, match="id=-1"):
        CPM2Tokenizer.from_pretrained(cpm2_folder).decode([-1])


@pytest.mark.parametrize("tokenizer_class", [CPM1Tokenizer, CPM2Tokenizer, CPMAntTokenizer])
@pytest.mark.parametrize(
    ("content", "match"),
    [
        (None, "cannot read"),
        (b"", "empty"),
        (b"\xff\xfe\x00", "not UTF-8|not a SentencePiece"),
        (b"<unk>\n<pad>\n", "lacks|not a SentencePiece"),
        (b"<unk>\na\na\n", "in lines 2 and 3|not a SentencePiece"),
    ],
)
def test_bad_files_are_named(tokenizer_class, content, match, tmp_path):
    if content is not None:
        for name in ("vocab.txt", "chinese_vocab.model"):
            (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=match) as caught:
        tokenizer_class.from_pretrained(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_a_directory_is_needed(tmp_path: Path):
    with pytest.raises(DataError, match="not a directory"):
        CPM2Tokenizer.from_pretrained(tmp_path / "vocab.txt")
