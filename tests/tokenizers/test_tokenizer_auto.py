"""Opening the right tokenizer for a directory, wrapping a tokenizer.json, and saving."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from bmforge.errors import ConfigError, DataError
from bmforge.tokenizers import (
    AutoTokenizer,
    CPM1Tokenizer,
    CPM2Tokenizer,
    CPMAntTokenizer,
    CPMBeeTokenizer,
    EVATokenizer,
    FastTokenizer,
)

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "hello", "world"]


@pytest.fixture
def fast_folder(tmp_path: Path) -> Path:
    """A Hugging Face directory whose tokenizer puts [CLS] and [SEP] around a text."""
    folder = tmp_path / "fast"
    folder.mkdir()
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "[UNK]",
        "pad_token": {"content": "[PAD]", "lstrip": False},
        "eos_token": None,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "special_tokens_map.json").write_text('{"cls_token": "[CLS]", "unk_token": "x"}')
    return folder


def test_a_tokenizer_json_gets_our_methods(fast_folder, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(fast_folder)
    assert type(tokenizer) is FastTokenizer
    assert tokenizer.encode("hello there world") == [4, 1, 5]
    assert tokenizer.encode_batch(["world", ""]) == [[5], []]
    assert tokenizer.decode([2, 4, 5]) == "[CLS] hello world"
    assert tokenizer.special_ids == {"unk": 1, "pad": 0, "cls": 2}
    assert (tokenizer.vocab_size, len(tokenizer), tokenizer.eos_id) == (6, 6, None)
    with pytest.raises(DataError, match="id=6"):
        tokenizer.decode([6])
    tokenizer.save_pretrained(tmp_path / "again")
    again = AutoTokenizer.from_pretrained(tmp_path / "again")
    assert again.special_ids == tokenizer.special_ids
    (fast_folder / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"not a tokenizer\.json"):
        AutoTokenizer.from_pretrained(fast_folder)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("cpm1", CPM1Tokenizer),
        ("cpm2_cn", CPM2Tokenizer),
        ("cpm2_cn_en", CPM2Tokenizer),
        ("eva", EVATokenizer),
        ("cpm_ant", CPMAntTokenizer),
        ("cpm_bee", CPMBeeTokenizer),
    ],
)
def test_the_published_vocabularies_are_told_apart(name, kind, shared_data):
    assert type(AutoTokenizer.from_pretrained(shared_data(f"vocab/{name}"))) is kind


@pytest.mark.parametrize(
    ("model_type", "kind"),
    [
        ("eva", EVATokenizer),
        ("cpm2", CPM2Tokenizer),
        ("cpm-2", CPM2Tokenizer),
        ("another", CPM2Tokenizer),
    ],
)
def test_the_model_type_decides_before_the_files(model_type, kind, cpm2_folder):
    (cpm2_folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    assert type(AutoTokenizer.from_pretrained(cpm2_folder)) is kind


def test_what_was_saved_opens_as_the_same(cpm2_folder, ant_folder, small_sentence_piece, tmp_path):
    tokenizers = [
        CPM1Tokenizer(small_sentence_piece),
        CPM2Tokenizer.from_pretrained(cpm2_folder),
        EVATokenizer.from_pretrained(cpm2_folder),
        CPMAntTokenizer.from_pretrained(ant_folder),
    ]
    text = "今天天气不错，hello\n"
    for number, tokenizer in enumerate(tokenizers):
        folder = tmp_path / str(number)
        tokenizer.save_pretrained(folder)
        again = AutoTokenizer.from_pretrained(folder)
        assert type(again) is type(tokenizer)
        assert again.encode(text) == tokenizer.encode(text)
        assert again.special_ids == tokenizer.special_ids
        before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
        again.save_pretrained(folder)
        assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before


def test_saving_never_replaces_other_files(cpm2_folder, ant_folder):
    ant = CPMAntTokenizer.from_pretrained(ant_folder)
    content = (cpm2_folder / "vocab.txt").read_bytes()
    with pytest.raises(ConfigError, match=r"vocab\.txt"):
        ant.save_pretrained(cpm2_folder)
    assert (cpm2_folder / "vocab.txt").read_bytes() == content
    assert [path.name for path in cpm2_folder.iterdir()] == ["vocab.txt"]


def test_no_tokenizer_is_explained(tmp_path):
    with pytest.raises(DataError, match=r"no tokenizer in .*save_pretrained"):
        AutoTokenizer.from_pretrained(tmp_path)
    (tmp_path / "vocab.txt").write_text("[UNK]\n[CLS]\n")
    with pytest.raises(DataError, match="no tokenizer in"):
        AutoTokenizer.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(DataError, match="contains a list"):
        AutoTokenizer.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(DataError, match="not JSON"):
        AutoTokenizer.from_pretrained(tmp_path)


def test_half_of_a_surrogate_pair(fast_folder, cpm2_folder, ant_folder, small_sentence_piece):
    """Where a library cannot take it, the message says where it is; elsewhere it is unknown."""
    for tokenizer in (
        FastTokenizer.from_pretrained(fast_folder),
        CPM1Tokenizer(small_sentence_piece),
    ):
        with pytest.raises(DataError, match="character 2 of"):
            tokenizer.encode("ab\ud800")
    for tokenizer in (
        CPM2Tokenizer.from_pretrained(cpm2_folder),
        CPMAntTokenizer.from_pretrained(ant_folder),
    ):
        assert tokenizer.encode("好\ud800")[1:] == [tokenizer.unk_id]


def test_what_a_model_writes_beyond_the_vocabulary(fast_folder, cpm2_folder, ant_folder):
    """A padded model has ids that no token has; they are an error anywhere else."""
    for folder in (fast_folder, cpm2_folder, ant_folder):
        tokenizer = AutoTokenizer.from_pretrained(folder)
        ids = sorted(tokenizer.get_vocab().values())[-3:]
        beyond = max(ids) + 1
        assert tokenizer.decode_written([beyond, *ids, beyond + 7]) == tokenizer.decode(ids)
        with pytest.raises(DataError, match="vocabulary"):
            tokenizer.decode([beyond])
