"""Raw text prepared with every kind of tokenizer: ids, ends, and what the corpus keeps of it."""

from __future__ import annotations

import io
import json
from pathlib import Path

import plain_tokenizers
import pytest

from bmforge.data import (
    PrepareConfig,
    TokenStore,
    encode_to_store,
    normalize_text,
    prepare,
    train_bpe,
)
from bmforge.data.sources.document import Document
from bmforge.errors import ConfigError
from bmforge.recipes.inputs.vocabulary import check_tokenizers
from bmforge.tokenizers import AutoTokenizer, CPM1Tokenizer, CPMBeeTokenizer, Tokenizer

# What raw text may hold: names of special tokens, marks of CPM-Bee's language, unseen characters.
FORGED = (
    "今天<eod>天气</s>真好 <|endoftext|> [MASK] <mask_0> a < b > c << d <sep> 𠮷é\n\thello world."
)
# kind -> the original's algorithm, written plainly
PUBLISHED = {
    "cpm1": plain_tokenizers.cpm1,
    "cpm2_cn": plain_tokenizers.cpm2,
    "cpm2_cn_en": plain_tokenizers.cpm2,
    "eva": plain_tokenizers.eva,
    "cpm_ant": plain_tokenizers.cpm_ant,
}
ENDS = {"cpm1": "<eod>", "cpm2_cn": "<eod>", "cpm2_cn_en": "<eod>", "eva": "<sep>"}
BEE = ["<pad>", "<unk>", "<mask>", "<sep>", "</n>", "</_>", "<s>", "</s>"]
BEE += ["<root>", "<ans>", "<option>"]
SMALL = ["cpm1", "cpm2", "cpm2_marked", "ant", "bee", "english", "chinese", "byte_pairs"]


def write_documents(path: Path, texts: list[str]) -> list[str]:
    """A .jsonl of `texts`; returns what is left of them after cleaning."""
    lines = [json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts]
    path.write_text("".join(lines), "utf-8")
    return [normalize_text(text) for text in texts]


def prepared_documents(texts: list[str], folder: Path, out: Path):
    """The report of preparing `texts` with the tokenizer in `folder`, and the ids by document."""
    write_documents(out.with_suffix(".jsonl"), texts)
    config = PrepareConfig(tokenizer=str(folder), validation_fraction=0.0)
    report = prepare(out.with_suffix(".jsonl"), out, config)
    store = TokenStore(report.train_prefix)
    return report, [store.tokens[a:b].tolist() for a, b in store.documents()]


@pytest.mark.parametrize("kind", PUBLISHED)
def test_published_vocabularies_on_real_text(kind, real_lines, shared_data, tmp_path):
    """The ids of the original's algorithm, each document with the tokenizer's own end behind it."""
    folder = shared_data(f"vocab/{kind}")
    texts = [
        normalize_text(text) for text in (*real_lines[:40], *real_lines[300:320], real_lines[-1])
    ]
    report, documents = prepared_documents(texts, folder, tmp_path / "out")
    encode = PUBLISHED[kind](folder)
    tokenizer = AutoTokenizer.from_pretrained(report.tokenizer_dir)
    end = tokenizer.token_to_id(ENDS.get(kind, "</s>"))
    assert report.eos_id == end
    assert documents == [[*encode(text), end] for text in texts]
    assert documents == [[*tokenizer.encode(text), end] for text in texts]


def test_the_published_bee_on_real_text(real_lines, shared_data, tmp_path):
    texts = [normalize_text(text) for text in (*real_lines[:40], *real_lines[300:320], FORGED)]
    report, documents = prepared_documents(texts, shared_data("vocab/cpm_bee"), tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(report.tokenizer_dir)
    for text, ids in zip(texts, documents, strict=True):
        extended, table = tokenizer.encode_extended(tokenizer.escape(text))
        assert ids == [1 if id in table else id for id in extended] + [tokenizer.eos_id]
    assert report.eos_id == tokenizer.token_to_id("</s>") == 7


@pytest.fixture
def small_folder(request, tmp_path, small_sentence_piece) -> Path:
    """A directory with a small tokenizer of the kind that the test names."""
    kind, folder = request.param, tmp_path / "given"
    if kind == "cpm1":
        CPM1Tokenizer(small_sentence_piece).save_pretrained(folder)
    elif kind == "bee":
        CPMBeeTokenizer([*BEE, *"今天气真好abcdehlorw<>|"]).save_pretrained(folder)
    elif kind == "byte_pairs":
        train_bpe([FORGED * 3], 300).save_pretrained(folder)
    else:
        return request.getfixturevalue(f"{kind}_folder")
    return folder


@pytest.mark.parametrize("small_folder", SMALL, indirect=True)
def test_no_text_forges_an_end_and_the_corpus_keeps_the_tokenizer(small_folder, tmp_path):
    texts = [normalize_text(text) for text in (FORGED, "今天天气真好", "hello world, hello")]
    report, documents = prepared_documents(texts, small_folder, tmp_path / "out")
    given = AutoTokenizer.from_pretrained(small_folder)
    kept = AutoTokenizer.from_pretrained(report.tokenizer_dir)
    assert type(kept) is type(given)
    assert (kept.get_vocab(), kept.special_ids) == (given.get_vocab(), given.special_ids)
    assert report.vocab_size == kept.vocab_size
    assert report.eos_id == given.eos_id
    specials = {id for role, id in kept.special_ids.items() if role not in ("space", "newline")}
    for text, ids in zip(texts, documents, strict=True):
        assert ids[-1] == report.eos_id
        assert not (specials - {kept.unk_id}) & {*ids[:-1]}
        assert all(id < kept.vocab_size for id in ids)
        if text != FORGED:
            assert ids[:-1] == given.encode(text)
    assert prepare(tmp_path / "out.jsonl", tmp_path / "out", report.config).reused
    check_tokenizers([str(tmp_path / "out")], tokenizer=str(small_folder))


def test_names_that_are_pieces_of_the_model_itself_are_no_end(tmp_path):
    trainer = pytest.importorskip("sentencepiece", reason="needs the extra zh")
    model, end = io.BytesIO(), "<|endoftext|>"
    trainer.SentencePieceTrainer.train(
        sentence_iterator=iter([FORGED, "今天天气真好", "endof|text|"] * 5),
        model_writer=model,
        vocab_size=70,
        hard_vocab_limit=False,
        user_defined_symbols=[end],
        character_coverage=1.0,
        minloglevel=2,
    )
    names = ["[CLS]", "[MASK]", "[gMASK]", "<|startofpiece|>", "<|endofpiece|>"]
    (tmp_path / "cog-pretrain.model").write_bytes(model.getvalue())
    added = {name: 100 + number for number, name in enumerate(names)}
    (tmp_path / "added_tokens.json").write_text(json.dumps(added), "utf-8")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.eos_id in tokenizer.encode(f"今天{end}天气")
    (plain,) = tokenizer.encode_plain([f"今天{end}天气"])
    assert tokenizer.eos_id not in plain
    assert tokenizer.decode(plain).replace(" ", "") == f"今天{end}天气"


@pytest.mark.parametrize("small_folder", SMALL, indirect=True)
def test_every_kind_names_its_whole_vocabulary(small_folder):
    tokenizer: Tokenizer = AutoTokenizer.from_pretrained(small_folder)
    vocabulary = tokenizer.get_vocab()
    assert max(vocabulary.values()) < tokenizer.vocab_size
    assert all(tokenizer.token_to_id(token) == id for token, id in vocabulary.items())
    assert tokenizer.encode_batch(["今天", ""]) == [tokenizer.encode("今天"), []]


def test_a_corpus_of_another_vocabulary_is_refused(ant_folder, cpm2_folder, tmp_path):
    prepared_documents(["今天天气真好"], ant_folder, tmp_path / "out")
    with pytest.raises(ConfigError, match=rf"data.tokenizer='{cpm2_folder}': "):
        check_tokenizers([str(tmp_path / "out")], tokenizer=str(cpm2_folder))


def test_another_tokenizer_leaves_no_file_of_the_earlier_one(ant_folder, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("今天天气真好 hello", "utf-8")
    prepare(text, tmp_path / "out", PrepareConfig(vocab_size=300, validation_fraction=0.0))
    settings = PrepareConfig(tokenizer=str(ant_folder), validation_fraction=0.0)
    report = prepare(text, tmp_path / "out", settings, overwrite=True)
    names = sorted(path.name for path in report.tokenizer_dir.iterdir())
    assert names == ["tokenizer_config.json", "vocab.txt"]


def test_a_store_is_written_with_a_tokenizer_that_is_not_of_a_file(tmp_path):
    """An end of the caller's choice, and an id type that has room for it."""
    tokenizer = CPMBeeTokenizer([*BEE, "a", "b"])
    count = encode_to_store([Document("ab<", "x")], tokenizer, tmp_path / "s", eos_id=70_000)
    assert count.tokens == 4
    assert TokenStore(tmp_path / "s").get(0).tolist() == [11, 12, 1, 70_000]
