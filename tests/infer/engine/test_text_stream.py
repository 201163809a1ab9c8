"""Text while it is written: joined it is the whole, and no stop or half character is shown."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from bmforge.infer.engine.text_stream import TextStream, token_data
from bmforge.tokenizers import CPM2Tokenizer, CPMAntTokenizer, FastTokenizer

TEXTS = [
    "The quick brown fox says 你好, 世界! Grüße 🦊🦊.",
    "北京是中国的首都。\nNaïve café\t\t 12 34",
]


def make_bytes() -> FastTokenizer:
    """Byte pairs of very few merges: most Chinese characters are three tokens."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(TEXTS, trainer)
    return FastTokenizer(made.to_str().encode())


def make_spaced() -> FastTokenizer:
    """Llama's form: blanks as U+2581, bytes where a character is unknown."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "\u2581fox", "fox"]
    pieces += [*"abcdefghijklmnopqrstuvwxyzT", "\u2581the", "世", "你"]
    made = Tokenizer(
        models.BPE(
            {piece: id for id, piece in enumerate(pieces)},
            [],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)])
    return FastTokenizer(made.to_str().encode())


BYTES, SPACED = make_bytes(), make_spaced()


class Letters:
    """Each id is one character."""

    def decode_written(self, ids: Any) -> str:
        return "".join(map(chr, ids))


def stream(tokenizer: Any, ids: Any, stops: tuple[str, ...] = ()) -> tuple[list[str], TextStream]:
    text = TextStream(tokenizer, stops)
    pieces = [text.add([id]) for id in ids]
    return [*pieces, text.finish()], text


@pytest.mark.parametrize("tokenizer", [BYTES, SPACED])
@pytest.mark.parametrize("text", TEXTS)
def test_pieces_joined_are_the_text(tokenizer: Any, text: str) -> None:
    """Of texts in every script; what is shown is never half a character."""
    ids = tokenizer.encode(text)
    pieces, written = stream(tokenizer, ids)
    assert "".join(pieces) == written.text == tokenizer.decode_written(ids)
    assert not any("\ufffd" in piece for piece in pieces[:-1])
    assert sum(map(bool, pieces)) > len(text) // 3


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_tokens(data: st.DataObject) -> None:
    """Tokens that no text has: broken characters are shown as decoding shows them in the end.

    With bytes for unknown characters, decoding calls all of a row broken where one is.
    """
    tokenizer = data.draw(st.sampled_from([BYTES, SPACED]))
    size = tokenizer.vocab_size
    ids = data.draw(st.lists(st.integers(0, size - 1), max_size=40))
    pieces, written = stream(tokenizer, ids)
    whole = tokenizer.decode_written(ids)
    assert "".join(pieces) == written.text
    assert written.text == whole or (tokenizer is SPACED and "\ufffd" in whole)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    text=st.text("abc", max_size=30),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
    sizes=st.lists(st.integers(1, 5), min_size=30, max_size=30),
)
def test_stop_strings(text: str, stops: list[str], sizes: list[int]) -> None:
    """The text ends in front of the first one, wherever tokens divide it, and none is shown."""
    written, at, shown = TextStream(Letters(), stops), 0, ""
    for size in sizes:
        shown += written.add([ord(letter) for letter in text[at : at + size]])
        at += size
    shown += written.finish()
    places = [text.find(stop) for stop in stops if stop in text]
    assert shown == written.text == (text[: min(places)] if places else text)
    assert written.is_stopped == bool(places)


def test_what_may_begin_a_stop_is_held_back() -> None:
    pieces, _ = stream(Letters(), map(ord, "abxaby!"), ("aby",))
    assert pieces == ["", "", "abx", "", "", "", "", ""]
    pieces, _ = stream(Letters(), map(ord, "xab"), ("aby",))
    assert pieces == ["x", "", "", "ab"]


@pytest.mark.parametrize("tokenizer", [BYTES, SPACED])
def test_bytes_of_tokens(tokenizer: Any) -> None:
    """Joined they are the text's, but for a blank that decoding leaves out at the front."""
    for text in TEXTS:
        named = {id: token for token, id in tokenizer.get_vocab().items()}
        data = b"".join(token_data(tokenizer, named[id], id) for id in tokenizer.encode(text))
        assert data.decode().lstrip(" ") == tokenizer.decode_written(tokenizer.encode(text))


HEAD = ["<unk>", "<s>", "</s>", "\u2583", "<sep>", "<pad>", "<mask>", "<eod>", "\u2582"]
PIECES = [*"abcde一二三四五", "ab", "word", "另外"]


def make_own(kind: str) -> Any:
    if kind == "cpm-ant":
        lines = ["<pad>", "<unk>", "<s>", "</s>", "</_>", "</n>", *PIECES]
        return CPMAntTokenizer("\n".join(lines).encode())
    inside = ["##a", "##b", "##ab", "##word"] if kind == "cpm-2.1" else []
    return CPM2Tokenizer("\n".join([*HEAD, "\u2581", *PIECES, *inside, "<s_0>"]).encode())


@pytest.mark.parametrize("kind", ["cpm-ant", "cpm-2.0", "cpm-2.1"])
def test_own_tokenizers(kind: str) -> None:
    """Whatever is written, pieces joined are decoding's text, implied spaces too."""
    tokenizer, draw = make_own(kind), random.Random(0)
    for _ in range(50):
        ids = [draw.randrange(len(tokenizer)) for _ in range(30)]
        pieces, _ = stream(tokenizer, ids)
        assert "".join(pieces) == tokenizer.decode_written(ids)
