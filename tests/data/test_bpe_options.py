"""Options of the trained tokenizer, and paragraphs that repeat, through a whole preparation."""

from __future__ import annotations

import itertools
import json
import tomllib
from pathlib import Path

import pytest
import tomli_w
from tokenizers import Tokenizer

from bmforge.data import PrepareConfig, prepare
from bmforge.data.prepare.record import read_record
from bmforge.data.prepare.tokenize import train_bpe
from bmforge.data.store.sharded import open_store
from bmforge.errors import ConfigError
from bmforge.prepare_settings import BpeConfig
from bmforge.tokenizers import AutoTokenizer

TEXTS = [f"In 20{n:02d} the ferry 12345{n} sailed, 渡轮准时离开码头。" for n in range(60)] * 3
OPTIONS = list(
    itertools.product(
        ("joined", "single", "triples"), ("joined", "single"), ((), ("<|im_start|>", "<x>")), (2, 9)
    )
)


def pieces(tokenizer, text: str) -> list[str]:
    return [tokenizer.decode([id]) for id in tokenizer.encode_plain([text])[0]]


@pytest.mark.parametrize(("digits", "han", "special", "frequency"), OPTIONS)
def test_each_option_holds_for_every_token(digits, han, special, frequency):
    config = BpeConfig(digits=digits, han=han, special_tokens=special, min_frequency=frequency)
    tokenizer = train_bpe(TEXTS, 700, config)
    words = [piece for text in TEXTS[:20] for piece in pieces(tokenizer, text)]
    most = {"single": 1, "triples": 3}.get(digits, 99)
    assert max(sum(c.isdigit() for c in word) for word in words) <= most
    if digits != "joined":
        assert all(word.isdigit() or not any(map(str.isdigit, word)) for word in words)
    if han == "single":
        assert max(sum("一" <= c <= "鿿" for c in word) for word in words) == 1
    else:
        assert max(sum("一" <= c <= "鿿" for c in word) for word in words) > 1
    assert [tokenizer.token_to_id(name) for name in special] == list(range(1, len(special) + 1))


@pytest.mark.parametrize("longest", [2, 3, 4, 5, 6, 8, 12])
def test_the_longest_token_has_the_given_number_of_bytes(tmp_path, longest):
    """Each word of 2 to 14 letters, or of Chinese characters, is merged as far as it may be."""
    words = [chr(0x4E00 + size) * (size // 3) + "x" * (size % 3) for size in range(3, 15)]
    words += [bytes(range(97, 97 + size)).decode() for size in range(2, 15)]
    train_bpe(words * 9, 900, BpeConfig(max_token_length=longest)).save_pretrained(tmp_path)
    vocabulary = json.loads((tmp_path / "tokenizer.json").read_bytes())["model"]["vocab"]
    # A character of the byte-level alphabet is one byte.
    assert max(len(token) for token in vocabulary if token != "<|endoftext|>") == longest


def test_rare_pairs_are_not_merged():
    """A higher frequency gives a part of the merges of a lower one."""
    few, many = (
        train_bpe(TEXTS[:60], 2000, BpeConfig(min_frequency=count)).vocab_size for count in (30, 2)
    )
    assert few < many


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"min_frequency": 0}, "min_frequency=0"),
        ({"max_token_length": 1}, "max_token_length=1"),
        ({"special_tokens": ("<a>", "<a>")}, "special_tokens"),
        ({"special_tokens": ("<|endoftext|>",)}, "special_tokens"),
        ({"special_tokens": ("",)}, "special_tokens"),
    ],
)
def test_options_out_of_range_are_refused_before_any_work(tmp_path, values, said):
    with pytest.raises(ConfigError, match=said):
        prepare(None, tmp_path / "out", PrepareConfig(bpe=BpeConfig(**values)))
    assert not (tmp_path / "out").exists()


def test_a_given_tokenizer_takes_no_options(tmp_path):
    config = PrepareConfig(tokenizer="somewhere", bpe=BpeConfig(digits="single"))
    with pytest.raises(ConfigError, match="no effect"):
        prepare(None, tmp_path / "out", config)


def write(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def kept_texts(out: Path) -> list[str]:
    tokenizer, store = (
        AutoTokenizer.from_pretrained(out / "tokenizer"),
        open_store(out / "train" / "tokens"),
    )
    ids = [list(map(int, store[number])) for number in range(len(store))]
    return [tokenizer.decode(one[:-1]) for one in ids]


def test_the_tokenizer_of_a_corpus_has_the_options_and_the_record_tells_them(tmp_path):
    bpe = BpeConfig(digits="single", special_tokens=("<tool>",))
    config = PrepareConfig(vocab_size=400, validation_fraction=0, bpe=bpe)
    prepare([write(tmp_path / "a.jsonl", TEXTS[:60])], tmp_path / "out", config)
    saved = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer" / "tokenizer.json"))
    assert all(sum(map(str.isdigit, token)) <= 1 for token in saved.encode("20 1234").tokens)
    assert saved.token_to_id("<tool>") == 1
    assert read_record(tmp_path / "out")[0].config == config


def test_records_of_earlier_versions_are_read(tmp_path):
    config = PrepareConfig(vocab_size=400, validation_fraction=0)
    prepare([write(tmp_path / "a.jsonl", TEXTS[:60])], tmp_path / "out", config)
    path = tmp_path / "out" / "prepared.toml"
    old = path.read_text()
    before, _, rest = old.partition("[settings.bpe]")
    after = rest[rest.index("\n[") :]
    added = ("errors", "phone_regions")
    lines = [line for line in (before + after).splitlines() if not line.startswith(added)]
    path.write_text("\n".join(lines))
    assert read_record(tmp_path / "out")[0].config == config


def test_records_with_settings_outside_groups_are_read(tmp_path):
    config = PrepareConfig(
        vocab_size=400,
        validation_fraction=0,
        near_duplicates=0.9,
        text_repairs=("width",),
        workers=1,
    )
    inputs = [write(tmp_path / "a.jsonl", TEXTS[:60])]
    prepare(inputs, tmp_path / "out", config)
    path = tmp_path / "out" / "prepared.toml"
    record = tomllib.loads(path.read_text())
    flat = {}
    for name, value in record["settings"].items():
        flat |= value if isinstance(value, dict) and name != "bpe" else {name: value}
    assert {"near_duplicates", "text_repairs", "workers", "vocab_size"} <= flat.keys()
    path.write_text(tomli_w.dumps(record | {"settings": flat}))
    assert read_record(tmp_path / "out")[0].config == config
    assert prepare(inputs, tmp_path / "out", config).reused


@pytest.mark.parametrize("spans", [None, 50])
def test_repeated_paragraphs_are_cut_and_the_first_stays(tmp_path, spans):
    shared = "This paragraph is the same in two documents, word by word, and it is long enough."
    texts = [
        f"The first document.\n\n{shared}\n\nIts own end.",
        f"The second one.\n\n{shared}\n\nshort\n\nAnother end.",
        f"{shared}",
        "short\n\nThe last document.",
    ]
    config = PrepareConfig(
        vocab_size=300, validation_fraction=0, repeated_paragraphs=40, repeated_spans=spans
    )
    report = prepare([write(tmp_path / "a.jsonl", texts)], tmp_path / "out", config)
    left = kept_texts(tmp_path / "out")
    assert sum(shared in text for text in left) == 1
    assert sum("short" in text for text in left) == 2
    assert all(any(own in text for text in left) for own in ("The first", "The second", "The last"))
    assert report.funnel.changed["repeated_spans"][0] + report.documents <= 6
