"""Directories without a tokenizer.json, against what transformers makes of the same files."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from bmforge.data import PrepareConfig, load_tokenizer, prepare
from bmforge.errors import DataError
from bmforge.tokenizers import AutoTokenizer, FastTokenizer

transformers = pytest.importorskip("transformers")

TEXTS = [
    "First Citizen: before we proceed any further, hear me speak.",
    "  Two  spaces,\ttabs\nand lines \u00e9t\u00e9 na\u00efve \U0001f600 12345 isn't",
    "\u5927\u6a21\u578b\u5f88\u597d\u7528\u3002hello \u4e16\u754c",
    "a <mask> b</s><s> <pad>[MASK] [SEP]c <|endoftext|> <extra>d",
    "",
]
PROSE = " ".join(TEXTS[:1] + ["We are accounted poor citizens, the patricians good."] * 20)
ROBERTA = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
# name -> specials of the vocabulary, tokenizer_config.json, special_tokens_map.json, their class
BYTE_PAIRS = {
    "gpt2": (["<|endoftext|>"], {"model_max_length": 1024}, None, "GPT2Tokenizer"),
    "prefixed": (
        ["<|endoftext|>"],
        {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True},
        None,
        "GPT2Tokenizer",
    ),
    "opt": (
        ["<s>", "<pad>", "</s>", "<unk>"],
        {"tokenizer_class": "GPT2Tokenizer", "add_bos_token": True, "add_prefix_space": False},
        {
            "bos_token": {"content": "</s>", "lstrip": False, "rstrip": False, "normalized": True},
            "eos_token": "</s>",
            "unk_token": "</s>",
            "pad_token": "<pad>",
        },
        "GPT2Tokenizer",
    ),
    "roberta": (ROBERTA, None, None, "RobertaTokenizer"),
}


@pytest.fixture(scope="module")
def byte_pairs(train_byte_pairs) -> Tokenizer:
    return train_byte_pairs(PROSE, 400)


def write_json(folder: Path, name: str, content: object) -> None:
    if content is not None:
        (folder / name).write_text(json.dumps(content), "utf-8")


def write_byte_pairs(folder: Path, tokenizer: Tokenizer, kind: str) -> None:
    """Write vocab.json and merges.txt of a model, its specials in front, and its configs."""
    specials, config, roles, _ = BYTE_PAIRS[kind]
    tokenizer.model.save(str(folder))
    words = json.loads((folder / "vocab.json").read_text("utf-8"))
    ordered = [*specials, *sorted(words, key=lambda word: words[word])]
    write_json(folder, "vocab.json", {word: id for id, word in enumerate(ordered)})
    write_json(folder, "tokenizer_config.json", config)
    write_json(folder, "special_tokens_map.json", roles)


def assert_same(folder: Path, theirs) -> FastTokenizer:
    """Compare ids, and text from ids, with transformers' own tokenizer of the same files."""
    ours = AutoTokenizer.from_pretrained(folder)
    assert type(ours) is FastTokenizer
    for text in TEXTS:
        ids = theirs(text, add_special_tokens=False).input_ids
        assert ours.encode(text) == ids, text
        decoded = theirs.decode(ids, clean_up_tokenization_spaces=False)
        assert ours.decode(ids) == decoded
    assert load_tokenizer(folder).get_vocab() == theirs.get_vocab()
    for role, id in ours.special_ids.items():
        assert id == getattr(theirs, f"{role}_token_id"), role
    return ours


@pytest.mark.parametrize("kind", BYTE_PAIRS)
def test_byte_pairs_of_two_files(kind, byte_pairs, tmp_path):
    write_byte_pairs(tmp_path, byte_pairs, kind)
    # Its mask takes in the space before it, as in the published tokenizer.json.
    mask = transformers.AddedToken("<mask>", lstrip=True, normalized=False)
    changes = {"mask_token": mask} if kind == "roberta" else {}
    theirs = getattr(transformers, BYTE_PAIRS[kind][3]).from_pretrained(tmp_path, **changes)
    ours = assert_same(tmp_path, theirs)
    expected = {"opt": "</s>", "roberta": "</s>"}.get(kind, "<|endoftext|>")
    assert ours.eos_id == ours.token_to_id(expected) is not None
    assert (ours.mask_id is None) == (kind != "roberta")


@pytest.mark.parametrize(
    "config",
    [
        None,
        {"do_lower_case": False},
        {"do_lower_case": True, "strip_accents": False, "tokenizer_class": "BertTokenizer"},
        {"do_lower_case": False, "tokenize_chinese_chars": False},
    ],
)
def test_word_pieces_of_one_file(config, tmp_path):
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz,.:'"]
    words += [f"##{letter}" for letter in "abcdefghijklmnopqrstuvwxyz\u00e9\u578b"]
    words += ["hello", "First", "first", "citizen", "##izen", "\u5927", "\u6a21", "\u597d", "na"]
    (tmp_path / "vocab.txt").write_text("\n".join(words) + "\n", "utf-8")
    write_json(tmp_path, "tokenizer_config.json", config)
    ours = assert_same(tmp_path, transformers.BertTokenizer.from_pretrained(tmp_path))
    assert ours.special_ids == {"unk": 1, "sep": 3, "pad": 0, "cls": 2, "mask": 4}


@pytest.mark.parametrize("kind", BYTE_PAIRS)
def test_saved_as_one_file_it_is_the_same(kind, byte_pairs, tmp_path):
    folder, saved = tmp_path / "old", tmp_path / "new"
    folder.mkdir()
    write_byte_pairs(folder, byte_pairs, kind)
    first = AutoTokenizer.from_pretrained(folder)
    first.save_pretrained(saved)
    assert not (saved / "vocab.json").exists()
    again = AutoTokenizer.from_pretrained(saved)
    assert again.special_ids == first.special_ids
    assert again.encode_batch(TEXTS) == first.encode_batch(TEXTS)
    again.save_pretrained(saved)


def test_added_tokens_have_their_ids(byte_pairs, tmp_path):
    write_byte_pairs(tmp_path, byte_pairs, "gpt2")
    size = AutoTokenizer.from_pretrained(tmp_path).vocab_size
    write_json(tmp_path, "added_tokens.json", {"<more>": size + 1, "<extra>": size})
    ours = assert_same(tmp_path, transformers.GPT2Tokenizer.from_pretrained(tmp_path))
    assert ours.encode("<extra><more>") == [size, size + 1]
    write_json(tmp_path, "added_tokens.json", {"<extra>": size + 3})
    with pytest.raises(DataError, match="Use two files of the same model"):
        AutoTokenizer.from_pretrained(tmp_path)


def test_text_is_prepared_with_them(byte_pairs, tmp_path):
    folder = tmp_path / "opt"
    folder.mkdir()
    write_byte_pairs(folder, byte_pairs, "opt")
    (tmp_path / "text.txt").write_text("hear me speak\n\nspeak, speak\n", "utf-8")
    config = PrepareConfig(tokenizer=str(folder), validation_fraction=0.0)
    report = prepare(tmp_path / "text.txt", tmp_path / "out", config)
    kept = AutoTokenizer.from_pretrained(report.tokenizer_dir)
    opt = AutoTokenizer.from_pretrained(folder)
    assert report.eos_id == opt.token_to_id("</s>")
    assert (kept.special_ids, kept.encode(TEXTS[0])) == (opt.special_ids, opt.encode(TEXTS[0]))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer_config.json", {"tokenizer_class": "CLIPTokenizer"}, "no tokenizer in"),
        ("config.json", {"model_type": "qwen2"}, "no tokenizer in"),
        ("vocab.json", {"a": "b"}, "cannot read the vocabulary"),
        ("vocab.json", ["a"], "is a list|holds a list|cannot read the vocabulary"),
    ],
)
def test_other_or_damaged_files_are_refused(name, content, message, byte_pairs, tmp_path):
    write_byte_pairs(tmp_path, byte_pairs, "roberta")
    write_json(tmp_path, name, content)
    with pytest.raises(DataError, match=message):
        AutoTokenizer.from_pretrained(tmp_path)


def test_a_list_of_words_that_is_not_berts(tmp_path):
    (tmp_path / "vocab.txt").write_text("one\ntwo\n", "utf-8")
    with pytest.raises(DataError, match=r"vocab\.txt.* for older models"):
        AutoTokenizer.from_pretrained(tmp_path)


def test_a_wrong_tokenizer_leaves_nothing(tmp_path):
    (tmp_path / "text.txt").write_text("hear me speak", "utf-8")
    config = PrepareConfig(tokenizer=str(tmp_path))
    for is_there in (False, True):
        out = tmp_path / f"out{is_there}"
        if is_there:
            out.mkdir()
            (out / "mine").write_text("kept", "utf-8")
        with pytest.raises(DataError, match="no tokenizer in"):
            prepare(tmp_path / "text.txt", out, config, overwrite=is_there)
        assert [path.name for path in out.rglob("*")] == ["mine"] * is_there
        assert out.exists() == is_there


@pytest.fixture(scope="module")
def spiece(tmp_path_factory) -> Path:
    """A directory with nothing but a spiece.model in T5's form."""
    trainer = pytest.importorskip("sentencepiece", reason="needs the extra zh")
    folder, model = tmp_path_factory.mktemp("spiece"), io.BytesIO()
    trainer.SentencePieceTrainer.train(
        sentence_iterator=iter([*TEXTS[:3], PROSE] * 3), model_writer=model, vocab_size=120,
        hard_vocab_limit=False, pad_id=0, eos_id=1, unk_id=2, bos_id=-1, minloglevel=2,
        character_coverage=0.99,
    )  # fmt: skip
    (folder / "spiece.model").write_bytes(model.getvalue())
    return folder


def check_spiece(folder: Path, texts: list[str]) -> None:
    """The ids of sentencepiece itself, and 100 sentinels behind them, counted down."""
    from sentencepiece import SentencePieceProcessor

    processor = SentencePieceProcessor(model_file=str(folder / "spiece.model"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    size = processor.get_piece_size()
    assert tokenizer.encode_batch(texts) == processor.encode(texts)
    assert (tokenizer.pad_id, tokenizer.eos_id, tokenizer.unk_id) == (0, 1, 2)
    assert tokenizer.vocab_size == size + 100
    assert tokenizer.encode("a<extra_id_0> b") == [
        *processor.encode("a"), size + 99, *processor.encode("b"),
    ]  # fmt: skip
    ids = processor.encode(texts[0])
    assert tokenizer.decode(ids) == processor.decode(ids)


def test_a_spiece_model_alone(spiece: Path, tmp_path: Path) -> None:
    """What is saved in its place opens here and with transformers, with the same ids."""
    texts = [*TEXTS[:3], "", "   ", "\u3000x\u200by \ufb01ne \u00bd"]
    check_spiece(spiece, texts)
    tokenizer = AutoTokenizer.from_pretrained(spiece)
    tokenizer.save_pretrained(tmp_path / "saved")
    again = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert again.encode_batch(texts) == tokenizer.encode_batch(texts)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path / "saved")
    assert theirs(texts, add_special_tokens=False)["input_ids"] == tokenizer.encode_batch(texts)


def test_no_text_forges_a_token_of_a_spiece_model(spiece: Path) -> None:
    """Text that is prepared reads their names as characters, as sentencepiece does."""
    from sentencepiece import SentencePieceProcessor

    tokenizer = AutoTokenizer.from_pretrained(spiece)
    processor = SentencePieceProcessor(model_file=str(spiece / "spiece.model"))
    texts = ["the</s>city <pad>", "<extra_id_0>", *TEXTS]
    plain = tokenizer.encode_plain(texts)
    assert plain == processor.encode(texts)
    assert not {0, 1} & {id for ids in plain for id in ids}
    assert 1 in tokenizer.encode(texts[0])
    with pytest.raises(DataError, match="character 1 of"):
        tokenizer.encode_plain(["a\ud800"])


def test_sentinels_that_are_pieces(tmp_path: Path) -> None:
    """As mT5 has them, with the space in front that a text has there anyway."""
    trainer, model = pytest.importorskip("sentencepiece"), io.BytesIO()
    names = [f"\u2581<extra_id_{number}>" for number in (1, 0)]
    trainer.SentencePieceTrainer.train(
        sentence_iterator=iter([PROSE] * 3), model_writer=model, vocab_size=60, pad_id=0, eos_id=1,
        unk_id=2, bos_id=-1, user_defined_symbols=names, hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    (tmp_path / "spiece.model").write_bytes(model.getvalue())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    processor = trainer.SentencePieceProcessor(model_proto=model.getvalue())
    assert tokenizer.vocab_size == processor.get_piece_size()
    assert tokenizer.token_to_id("<extra_id_0>") == processor.piece_to_id(names[1]) > 0
    for text in ("hear <extra_id_0> speak", "<extra_id_1> any", "hear me"):
        assert tokenizer.encode(text) == processor.encode(text)


def test_the_published_spiece_model(shared_data) -> None:
    """T5's own on English and Chinese text."""
    pytest.importorskip("sentencepiece", reason="needs the extra zh")
    lines = shared_data("tinyshakespeare.txt").read_text("utf-8").splitlines()[:400]
    check_spiece(shared_data("vocab/t5"), [*TEXTS[:3], *filter(None, lines)])


def test_spiece_models_that_are_not_read(spiece: Path, tmp_path: Path) -> None:
    """Byte pairs, damaged files, and kinds of model that treat text in another way."""
    whole = (spiece / "spiece.model").read_bytes()
    file = tmp_path / "spiece.model"
    trainer, model = pytest.importorskip("sentencepiece"), io.BytesIO()
    trainer.SentencePieceTrainer.train(
        sentence_iterator=iter([PROSE] * 3), model_writer=model, model_type="bpe", vocab_size=60,
        minloglevel=2,
    )  # fmt: skip
    for content, message in (
        (model.getvalue(), "of type BPE .supported: unigram"),
        (whole[: len(whole) // 2], "not a SentencePiece model"),
        (b"{}", "not a SentencePiece model"),
        (b"", "not a SentencePiece model"),
    ):
        file.write_bytes(content)
        with pytest.raises(DataError, match=message):
            AutoTokenizer.from_pretrained(tmp_path)
    file.write_bytes(whole)
    write_json(tmp_path, "tokenizer_config.json", {"extra_ids": 3})
    assert AutoTokenizer.from_pretrained(tmp_path).token_to_id("<extra_id_3>") is None
    write_json(tmp_path, "config.json", {"model_type": "albert"})
    with pytest.raises(DataError, match="no tokenizer in"):
        AutoTokenizer.from_pretrained(tmp_path)
