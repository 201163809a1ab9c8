"""The originals' algorithms, written out plainly: what ours must equal, and the benchmark's peer.

Each function takes a vocabulary directory and returns ``encode``: text -> list of ids.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from pathlib import Path

import jieba
from sentencepiece import SentencePieceProcessor

Encode = Callable[[str], list[int]]

LONGEST_WORD = 200
WRITTEN = str.maketrans(" \n", "▂▃")
EVA_QUOTES = {"〝": '"', "〞": '"', "“": '"', "”": '"', "‟": '"', "‘": "'", "’": "'", "‛": "'"}


def cut(text: str) -> list[str]:
    return jieba.lcut(text)


def read_vocabulary(folder: Path) -> dict[str, int]:
    lines = (folder / "vocab.txt").read_text("utf-8").removesuffix("\n").split("\n")
    return {line.strip(): number for number, line in enumerate(lines)}


def is_chinese(text: str) -> bool:
    return any(0x4E00 <= ord(character) <= 0x9FFF for character in text)


def spell(word: str, vocabulary: dict[str, int], marked: bool) -> list[int]:
    """From the left, always the longest piece; try every end, the farthest first."""
    if len(word) > LONGEST_WORD:
        return [vocabulary["<unk>"]]
    ids = []
    start = 0
    while start < len(word):
        for end in range(len(word), start, -1):
            piece = word[start:end]
            if marked and start > 0 and not is_chinese(piece):
                piece = "##" + piece
            if piece in vocabulary:
                ids.append(vocabulary[piece])
                start = end
                break
        else:
            ids.append(vocabulary["<unk>"])
            start += 1
    return ids


def cpm1(folder: Path) -> Encode:
    processor = SentencePieceProcessor(model_file=str(folder / "chinese_vocab.model"))

    def encode(text: str) -> list[int]:
        words = [word.translate(WRITTEN) for word in cut(text)]
        return processor.encode(" ".join(words))

    return encode


def cpm1_words(folder: Path) -> Encode:
    """ModelCenter's CPM-1: marks of space and line end are private characters while it cuts."""
    vocabulary = read_vocabulary(folder)
    marks = {"\ufff2": vocabulary["</_>"], "\ufff3": vocabulary["</n>"]}
    pieces = {**vocabulary, **marks}

    def encode(text: str) -> list[int]:
        text = text.replace("\n", "\ufff3").replace("</n>", "\ufff3")
        text = text.replace(" ", "\ufff2").replace("</_>", "\ufff2")
        return [i for word in cut(text) for i in spell(word, pieces, False)]

    return encode


def cpm_ant(folder: Path) -> Encode:
    vocabulary = read_vocabulary(folder)
    vocabulary[" "] = vocabulary.pop("</_>")
    vocabulary["\n"] = vocabulary.pop("</n>")
    return lambda text: [i for word in cut(text) for i in spell(word, vocabulary, False)]


def half_width(character: str) -> str:
    if character in "，。！（）？、；：":
        return character
    code = 0x20 if ord(character) == 0x3000 else ord(character) - 0xFEE0
    return chr(code) if 0x20 <= code <= 0x7E else character


def cpm2(folder: Path) -> Encode:
    vocabulary = read_vocabulary(folder)
    marked = "##s" in vocabulary
    space = vocabulary["▂"]
    english = {i for token, i in vocabulary.items() if not is_chinese(token) and i != space}

    def encode(text: str) -> list[int]:
        if not marked:
            text = "".join([half_width(character) for character in text])
        ids = []
        for word in cut(text):
            ids += spell(word.translate(WRITTEN), vocabulary, marked)
        if not marked:
            return ids
        kept = []
        for at, i in enumerate(ids):
            inner = 0 < at < len(ids) - 1
            if i == space and inner and ids[at - 1] in english and ids[at + 1] in english:
                continue
            kept.append(i)
        return kept

    return encode


def eva(folder: Path) -> Encode:
    vocabulary = read_vocabulary(folder)
    table = {chr(code): chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)}
    table = {c: a for c, a in table.items() if unicodedata.category(c)[0] in "PS"}
    table |= EVA_QUOTES
    # Full-width brackets and signs that EVA's table has; letters and digits stay as they are.

    def encode(text: str) -> list[int]:
        text = "".join([table.get(character, character) for character in text.replace("…", "...")])
        words = [word.translate(WRITTEN) for word in cut(text)]
        return [i for word in words for i in spell(word, vocabulary, False)]

    return encode


def cpm_ant_plus(folder: Path) -> Encode:
    """No words; what begins no piece is left out, a character at a time."""
    lines = (folder / "vocab.txt").read_text("utf-8").split("\n")
    vocabulary = {line: i for i, line in enumerate([line for line in lines if line])}
    vocabulary[" "] = vocabulary.pop("</_>")
    vocabulary["\n"] = vocabulary.pop("</n>")
    typed = {t: i for t, i in vocabulary.items() if not (t.startswith("<") and t.endswith(">"))}

    def encode(text: str) -> list[int]:
        ids = []
        while text:
            fits = [text[:end] for end in range(len(text), 0, -1) if text[:end] in typed]
            ids += [typed[fits[0]]] if fits else []
            text = text[len(fits[0]) if fits else 1 :]
        return ids

    return encode


def cpm_bee(folder: Path) -> Encode:
    """Plain text only (no ``<``): unknown characters in a row are one -1."""
    lines = (folder / "vocab.txt").read_text("utf-8").split("\n")
    vocabulary = {line: i for i, line in enumerate([line for line in lines if line])}
    vocabulary[" "] = vocabulary.pop("</_>")
    vocabulary["\n"] = vocabulary.pop("</n>")
    special = {token for token in vocabulary if token.startswith("<") and token.endswith(">")}
    longest = max(map(len, vocabulary))

    def longest_piece(text: str) -> str:
        text = text[:longest]
        for cut in range(len(text)):
            piece = text[: len(text) - cut]
            if piece in vocabulary and piece not in special:
                return piece
        return text[0]

    def encode(text: str) -> list[int]:
        ids: list[int] = []
        at = 0
        while at < len(text):
            piece = longest_piece(text[at:])
            found = vocabulary.get(piece, -1)
            if found != -1 or not ids or ids[-1] != -1:
                ids.append(found)
            at += len(piece)
        return ids

    return encode
