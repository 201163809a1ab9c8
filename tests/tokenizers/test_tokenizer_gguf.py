"""Tokenizers in GGUF files: against the libraries they come from, and there and back."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, trainers
from tokenizers import normalizers as norm
from tokenizers import pre_tokenizers as pre
from tokenizers.processors import TemplateProcessing

from bmforge.errors import BmforgeError, ConfigError, DataError
from bmforge.gguf_header import GgufHeader
from bmforge.tokenizers import AutoTokenizer, CPM1Tokenizer, FastTokenizer
from bmforge.tokenizers.chat_template import find_template
from bmforge.tokenizers.gguf_read import PRE, ROLE_KEYS, read_gguf_tokenizer
from bmforge.tokenizers.gguf_write import describe_tokenizer

TEXTS = [
    "The quick brown fox, aren't they? It's 12345 o'clock!\n\n  \tTwo  spaces.",
    "First Citizen:\nBefore we proceed any further, hear me speak.",
    "床前明月光，疑是地上霜。 naïve café Ångström \U0001f600 mixed中文text 3.14",
    "",
    " leading and trailing ",
    "the the theatre <|end|> there <|own|>then",
]
CORPUS = TEXTS * 3 + ["she sells sea shells by the sea shore and he sells the rest"] * 9
ROWS = 700


def write_metadata(path: Path, metadata: dict[str, Any]) -> Path:
    """Write a file with nothing but metadata, with the package."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in metadata.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string}
        add.get(type(value), writer.add_array)(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    return path


def byte_pairs(name: str) -> FastTokenizer:
    """Train byte pairs that cut text in one of the known ways."""
    rules = PRE[name]
    tokenizer = Tokenizer(models.BPE(ignore_merges=rules.takes_words))
    letters = pre.ByteLevel(add_prefix_space=False, use_regex=rules.expressions is None)
    tokenizer.pre_tokenizer = letters
    if rules.expressions:
        splits = [pre.Split(Regex(expression), "isolated") for expression in rules.expressions]
        tokenizer.pre_tokenizer = pre.Sequence([*splits, letters])
    tokenizer.normalizer = norm.NFC() if rules.composes else None
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken("<|end|>", normalized=False)])
    tokenizer.add_tokens([AddedToken("<|own|>", normalized=False)])
    return FastTokenizer(tokenizer.to_str().encode(), {"eos": "<|end|>", "bos": "<|end|>"})


def word_pieces(lowercase: bool) -> FastTokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = norm.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    roles = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
    return FastTokenizer(tokenizer.to_str().encode(), roles)


def train_spiece(kind: str, **options: Any) -> Any:
    spm = pytest.importorskip("sentencepiece")
    out = io.BytesIO()
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter([t for t in CORPUS if t.strip()]),
        model_writer=out,
        vocab_size=360 if kind == "bpe" else 150,
        model_type=kind,
        byte_fallback=kind == "bpe",
        character_coverage=0.98,
        normalization_rule_name="identity" if kind == "bpe" else "nmt_nfkc",
        remove_extra_whitespaces=kind != "bpe",
        minloglevel=2,
        hard_vocab_limit=False,
        **options,
    )
    return spm.SentencePieceProcessor(model_proto=out.getvalue()), out.getvalue()


def spiece_metadata(processor: Any, kind: str) -> dict[str, Any]:
    """Return what llama.cpp's converter writes of a sentencepiece model."""
    count = processor.vocab_size()
    types = [
        2 if processor.is_unknown(i)
        else 3 if processor.is_control(i)
        else 6 if processor.is_byte(i)
        else 1
        for i in range(count)
    ]  # fmt: skip
    return {
        "tokenizer.ggml.model": kind,
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [processor.id_to_piece(i) for i in range(count)],
        "tokenizer.ggml.scores": [processor.get_score(i) for i in range(count)],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": processor.bos_id(),
        "tokenizer.ggml.eos_token_id": processor.eos_id(),
        "tokenizer.ggml.unknown_token_id": processor.unk_id(),
        "tokenizer.ggml.add_bos_token": True,
    }


def assert_same(one: Any, other: Any, texts: list[str] = TEXTS) -> None:
    assert one.get_vocab() == other.get_vocab()
    assert one.special_ids == other.special_ids
    for text in texts:
        ids = one.encode(text)
        assert other.encode(text) == ids
        assert other.decode(ids) == one.decode(ids)
        assert other.encode_plain([text]) == one.encode_plain([text])


@pytest.mark.parametrize("name", PRE)
def test_byte_pairs_there_and_back(tmp_path, name):
    mine = byte_pairs(name)
    found = describe_tokenizer(mine, ROWS, "{{ messages }}")
    written = PRE[found["tokenizer.ggml.pre"]]  # several names share an expression
    assert written._replace(adds_begin=False) == PRE[name]._replace(adds_begin=False)
    assert len(found["tokenizer.ggml.tokens"]) == ROWS
    path = write_metadata(tmp_path / "a.gguf", found)
    back = AutoTokenizer.from_pretrained(path)
    assert_same(mine, back)
    assert find_template(path) == "{{ messages }}"
    back.save_pretrained(tmp_path / "saved")
    assert_same(mine, AutoTokenizer.from_pretrained(tmp_path / "saved"))
    assert find_template(tmp_path / "saved") == "{{ messages }}"


def test_pairs_of_scores_are_sentencepieces(tmp_path):
    """A Llama's tokenizer: ids as sentencepiece itself gives, also through our own writing."""
    processor, _ = train_spiece("bpe")
    back = AutoTokenizer.from_pretrained(
        write_metadata(tmp_path / "a.gguf", spiece_metadata(processor, "llama"))
    )
    texts = [text for text in TEXTS if text]
    for text in texts:
        assert back.encode(text) == processor.encode(text)
        assert back.decode(back.encode(text)) == text
    assert back.bos_id == processor.bos_id()
    found = describe_tokenizer(back, back.vocab_size + 5)
    assert found["tokenizer.ggml.add_bos_token"] is True
    assert found["tokenizer.ggml.token_type"][-1] == 5
    assert_same(back, AutoTokenizer.from_pretrained(write_metadata(tmp_path / "b.gguf", found)))


def test_unigrams_are_sentencepieces(tmp_path):
    processor, model = train_spiece("unigram")
    (tmp_path / "spiece.model").write_bytes(model)
    mine = AutoTokenizer.from_pretrained(tmp_path)
    found = describe_tokenizer(mine, mine.vocab_size + 9)
    back = AutoTokenizer.from_pretrained(write_metadata(tmp_path / "a.gguf", found))
    texts = [text for text in TEXTS if text]
    for text in texts:
        assert back.encode(text) == processor.encode(text)
    assert back.encode("a <extra_id_3> b") == mine.encode("a <extra_id_3> b")
    assert back.special_ids == mine.special_ids
    assert back.get_vocab() == mine.get_vocab()


@pytest.mark.parametrize("lowercase", [True, False])
def test_word_pieces_there_and_back(tmp_path, lowercase):
    mine = word_pieces(lowercase)
    found = describe_tokenizer(mine, ROWS)
    assert not any(token.startswith("##") for token in found["tokenizer.ggml.tokens"])
    back = AutoTokenizer.from_pretrained(write_metadata(tmp_path / "a.gguf", found))
    ids = {role: id for role, id in back.special_ids.items() if role != "bos"}
    assert ids == mine.special_ids
    assert back.get_vocab() == mine.get_vocab()
    for text in TEXTS:
        assert back.encode(text) == mine.encode(text)


def test_begin_token_is_found_in_the_template(tmp_path):
    content = json.loads(byte_pairs("gpt-2")._content)
    tokenizer = Tokenizer.from_str(json.dumps(content))
    end = tokenizer.token_to_id("<|end|>")
    tokenizer.post_processor = TemplateProcessing(
        single="<|end|> $A", special_tokens=[("<|end|>", end)]
    )
    mine = FastTokenizer(tokenizer.to_str().encode(), {"bos": "<|end|>"})
    assert describe_tokenizer(mine, ROWS)["tokenizer.ggml.add_bos_token"] is True
    assert describe_tokenizer(byte_pairs("gpt-2"), ROWS)["tokenizer.ggml.add_bos_token"] is False


@pytest.mark.parametrize("last", [False, True])
def test_transformers_adds_the_begin_token_of_a_converted_file(tmp_path, last):
    """A tokenizer without a class of its own gets its begin and end from tokenizer.json."""
    transformers = pytest.importorskip("transformers")
    content = json.loads(byte_pairs("gpt-2")._content)
    mine = FastTokenizer(json.dumps(content).encode(), {"bos": "<|end|>", "eos": "<|own|>"})
    found = describe_tokenizer(mine, ROWS)
    marks = {"bos": mine.token_to_id("<|end|>"), "eos": mine.token_to_id("<|own|>")}
    found |= {f"tokenizer.ggml.{role}_token_id": id for role, id in marks.items()}
    found |= {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": last}
    back = AutoTokenizer.from_pretrained(write_metadata(tmp_path / "a.gguf", found))
    back.save_pretrained(tmp_path / "saved")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
    end = [marks["eos"]] * last
    want = [marks["bos"], *mine.encode("the shore"), *end]
    assert theirs("the shore").input_ids == want == back.encode_prompt("the shore")
    assert theirs("the shore", "the shore").input_ids == [*want, *want]


def test_refused_by_name(tmp_path):
    """Other ways to cut, other kinds, and what contradicts itself."""
    usual = describe_tokenizer(byte_pairs("gpt-2"), ROWS)
    for changes, said in (
        ({"pre": "deepseek-llm"}, "tokenizer.ggml.pre='deepseek-llm', which is not supported"),
        ({"pre": 3}, "pre=3"),
        ({"model": "rwkv"}, "type 'rwkv'"),
        ({"tokens": ["a", "a"], "token_type": [1, 1]}, "only 1 of 2 tokens differ"),
        ({"tokens": ["a", "b"]}, "2 tokens, but 700 types"),
        ({"merges": ["ab"]}, "a string that is not a pair of tokens"),
        ({"merges": ["a nosuchtoken"]}, "damaged"),
        ({"eos_token_id": 10**6}, "the eos token has the unknown id 1000000"),
    ):
        changed = {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
        path = write_metadata(tmp_path / "a.gguf", {**usual, **changed})
        with pytest.raises(DataError, match=said):
            AutoTokenizer.from_pretrained(path)
    mine = byte_pairs("gpt-2")
    with pytest.raises(ConfigError, match="Use the tokenizer of the model"):
        describe_tokenizer(mine, 100)
    settings = {**mine.settings, "pre_tokenizer": {"type": "Whitespace"}}
    settings.pop("config")
    other = FastTokenizer(json.dumps(settings).encode())
    with pytest.raises(ConfigError, match="the tokenizer's pre-tokenizer"):
        describe_tokenizer(other, ROWS)


FUZZ = settings(
    max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), database=None
)
TOKEN = st.text(st.sampled_from("ab\u2581 <#[]0x\u00e9\u4e2d"), max_size=6)


@FUZZ
@given(st.data())
def test_any_metadata(data):
    """Of any kind, with any tokens, types, scores, pairs and ids: a tokenizer, or our error."""
    tokens = data.draw(st.lists(TOKEN, max_size=12))
    count = len(tokens)
    numbers = st.lists(st.floats(width=32), min_size=count, max_size=count)
    found: dict[str, Any] = {
        "tokenizer.ggml.model": data.draw(st.sampled_from(["gpt2", "llama", "t5", "bert"])),
        "tokenizer.ggml.pre": data.draw(st.sampled_from([*PRE, None])),
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(
            data.draw(st.lists(st.integers(0, 7), min_size=count, max_size=count)), np.int32
        ),
        "tokenizer.ggml.scores": np.array(data.draw(numbers), np.float32),
        "tokenizer.ggml.merges": data.draw(st.lists(TOKEN, max_size=4)),
    }
    for key in ROLE_KEYS.values():
        found[f"tokenizer.ggml.{key}_token_id"] = data.draw(st.none() | st.integers(-1, 12))
    try:
        tokenizer = FastTokenizer(read_gguf_tokenizer(GgufHeader(Path("a"), found, {})).content)
        ids = tokenizer.encode("ab \u4e2d")
    except BmforgeError:
        return
    assert all(0 <= number < count for number in ids)


def test_own_tokenizers_have_no_place():
    with pytest.raises(ConfigError, match="CPM1Tokenizer"):
        describe_tokenizer(CPM1Tokenizer.__new__(CPM1Tokenizer), ROWS)
