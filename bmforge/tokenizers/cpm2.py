"""Tokenizers of CPM-2 (2.0 Chinese, 2.1 Chinese-English), EVA, and ModelCenter's CPM-1."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import ClassVar, Self

from bmforge.errors import ConfigError
from bmforge.files import read_bytes
from bmforge.tokenizers.base import (
    VOCABULARY_FILE,
    VocabularyTokenizer,
    check_tokens,
    open_directory,
    parse_vocabulary,
)
from bmforge.tokenizers.word_encoder import CONTINUES, WordEncoder, has_chinese, ids_to_tokens
from bmforge.tokenizers.words import WordSegmenter

__all__ = ["CPM1WordTokenizer", "CPM2Tokenizer", "EVATokenizer"]

SPACE, NEWLINE = "\u2582", "\u2583"
_MARKED = re.compile(CONTINUES + "[A-Za-z]+")

# Maps full-width characters to half-width ones, except for Chinese punctuation.
_KEPT = "，。！（）？、；："
_HALF_WIDTH = {chr(c): chr(c - 0xFEE0) for c in range(0xFF00, 0xFF5F) if chr(c) not in _KEPT}
_HALF_WIDTH["\u3000"] = " "
# EVA's table, which contains all punctuation and quotes.
_EVA_FROM = "！？＂〝〞“”‟＃＄％＆＇‘’‛（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～"
_EVA_TO = '!?""""""#$%&\'\'\'\'()*+,-/:;<=>@[\\]^_`{|}~'
_EVA_FORMS = {"…": "...", **dict(zip(_EVA_FROM, _EVA_TO, strict=True))}


class CPM2Tokenizer(VocabularyTokenizer):
    """Tokenizer of CPM-2: jieba splits text into words, which are split by longest match.

    If the vocabulary has ``##`` tokens (2.1), they are used inside of words, and a space between
    two tokens without Chinese characters is not encoded. Decoding inserts a space between any two
    such tokens, so it restores the words but not always the same spaces. If the vocabulary has no
    ``##`` tokens (2.0), text is first converted to half-width characters, and decoding restores the
    result exactly. Names of special tokens in the text are encoded as characters.

    Args:
        content: contents of a vocab.txt, one token per line.
        path: path of the file, for error messages.

    Raises:
        DataError: the vocabulary is damaged or lacks a required token.
        MissingDependencyError: a package of the extra ``zh`` is not installed.

    Source: ``tokenization_enc_dec.py`` (2.0) and ``tokenization_enc_dec_encn.py`` (2.1) of
    TsinghuaAI/CPM-2-Finetune. The original 2.1 encodes a one-token text as two tokens; this class
    encodes it as one.
    """

    roles: ClassVar[Mapping[str, str]] = {
        "pad": "<pad>",
        "unk": "<unk>",
        "mask": "<mask>",
        "sep": "<sep>",
        "bos": "<s>",
        "eos": "<eod>",
        "go": "<go>",
        "eod": "<eod>",
        "space": SPACE,
        "newline": NEWLINE,
    }
    _forms: ClassVar[dict[str, str]] = _HALF_WIDTH
    _required: ClassVar[tuple[str, ...]] = ("unk", "pad", "sep", "eod", "space", "newline")

    def __init__(self, content: bytes, path: Path = Path(VOCABULARY_FILE)) -> None:
        self._content = content
        self._vocabulary = vocabulary = parse_vocabulary(content, path)
        required = (self.roles[role] for role in self._required)
        check_tokens(required, vocabulary, path, type(self).__name__)
        self._tokens = list(vocabulary)
        self._space_id = vocabulary[self.roles["space"]]
        self._has_form = re.compile("|".join(map(re.escape, self._forms)))
        self._cutter = WordSegmenter()
        blanks = {" ": self._space_id, "\n": vocabulary[self.roles["newline"]]}
        self._marked = any(map(_MARKED.fullmatch, vocabulary))
        self._encoder = WordEncoder({**vocabulary, **blanks}, vocabulary["<unk>"], self._marked)
        self._normalizes = not self._marked
        self.sentinel_ids = _sentinels(vocabulary)
        # If the vocabulary has ## tokens, a space is implied between any two of these tokens.
        self._spaced = [t != SPACE and not has_chinese(t) for t in self._tokens]

    @classmethod
    def from_pretrained(cls, directory: str | os.PathLike[str]) -> Self:
        """Load ``vocab.txt`` in `directory`."""
        path = open_directory(directory) / VOCABULARY_FILE
        return cls(read_bytes(path, "a vocabulary with one token per line"), path)

    def _files(self) -> dict[str, bytes]:
        return {VOCABULARY_FILE: self._content}

    @property
    def implies_spaces(self) -> bool:
        """True if decoding inserts spaces between some tokens."""
        return self._marked

    def sentinel_id(self, number: int) -> int:
        """Return the id of the sentinel token ``<s_number>``.

        Raises:
            ConfigError: the vocabulary has fewer sentinel tokens.
        """
        if not 0 <= number < len(self.sentinel_ids):
            raise ConfigError(
                f"there is no sentinel token {number}, because the vocabulary has only "
                f"{len(self.sentinel_ids)} sentinel tokens. Mask fewer spans."
            )
        return self.sentinel_ids[number]

    def _normalize(self, text: str) -> str:
        if not self._normalizes:
            return text
        return self._has_form.sub(lambda match: self._forms[match.group()], text)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, without adding special tokens."""
        encoder = self._encoder
        ids: list[int] = []
        for word in self._cutter.cut(self._normalize(text)):
            ids += encoder[word]
        return self._drop_spaces(ids) if self._marked else ids

    def _drop_spaces(self, ids: list[int]) -> list[int]:
        """Remove the space tokens that decoding would insert again."""
        space, spaced = self._space_id, self._spaced
        remaining = [
            id
            for before, id, after in zip(ids, ids[1:], ids[2:], strict=False)
            if id != space or not (spaced[before] and spaced[after])
        ]
        return [*ids[:1], *remaining, *ids[max(1, len(ids) - 1) :]]

    def decode(self, ids: Iterable[int]) -> str:
        """Decode token ids to text.

        Raises:
            DataError: an id is not in the vocabulary.
        """
        sequence = list(ids)
        tokens = ids_to_tokens(sequence, self._tokens)
        if not self._marked:
            return self._show("".join(tokens))
        parts = tokens[:1]
        for (before, after), token in zip(pairwise(sequence), tokens[1:], strict=True):
            if token.startswith(CONTINUES) and token != CONTINUES:
                parts.append(token.removeprefix(CONTINUES))
            elif self._spaced[before] and self._spaced[after]:
                parts += [SPACE, token]
            else:
                parts.append(token)
        return self._show("".join(parts))

    def _show(self, text: str) -> str:
        """Replace the tokens for a space and a newline with these characters."""
        return text.replace(self.roles["space"], " ").replace(self.roles["newline"], "\n")


class EVATokenizer(CPM2Tokenizer):
    """Tokenizer of EVA: CPM-2's, but converts punctuation to half-width and ``…`` to three dots.

    A text is one utterance; insert `sep_id` between the ids of several utterances.

    Source: ``src/tokenization_enc_dec.py`` of thu-coai/EVA.
    """

    roles: ClassVar[Mapping[str, str]] = {
        **CPM2Tokenizer.roles,
        "eos": "<sep>",
        "cls": "<cls>",
        "bos": "<s_0>",
    }
    _forms = _EVA_FORMS

    @property
    def sep_id(self) -> int:
        """Id of the token that ends an utterance."""
        return self._vocabulary["<sep>"]


class CPM1WordTokenizer(CPM2Tokenizer):
    """Tokenizer of ModelCenter's CPM-1, which has a ``vocab.txt`` instead of a sentencepiece model.

    Text is encoded as in CPM-2 without ``##`` tokens, but with other tokens for spaces and newlines
    and without conversion to half-width characters. ``</_>`` in a text is encoded as a space, and
    ``</n>`` as a newline.

    Source: ``tokenizer/cpm1_tokenizer.py`` of OpenBMB/ModelCenter.
    """

    roles: ClassVar[Mapping[str, str]] = {
        "pad": "<pad>",
        "unk": "<unk>",
        "eos": "<eod>",
        "eod": "<eod>",
        "space": "</_>",
        "newline": "</n>",
    }
    _forms: ClassVar[dict[str, str]] = {"</_>": " ", "</n>": "\n"}
    _required = ("unk", "pad", "eod", "space", "newline")


def _sentinels(vocabulary: dict[str, int]) -> list[int]:
    """Return the ids of the sentinel tokens ``<s_0>``, ``<s_1>``, ... in a vocabulary."""
    ids: list[int] = []
    while (id := vocabulary.get(f"<s_{len(ids)}>")) is not None:
        ids.append(id)
    return ids
