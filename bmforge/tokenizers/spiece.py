"""Builds T5's tokenizer from a sentencepiece model, with the tokenizers library.

Many T5 checkpoints (v1.1, mT5, mengzi) contain only ``spiece.model``, a protocol buffer. This
module reads its pieces with their scores, and its text normalization.

Source: ``sentencepiece_model.proto`` of google/sentencepiece; transformers' ``tokenization_t5.py``
for T5's 100 sentinel tokens, whose ids follow the pieces in descending order.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from bmforge.errors import DataError

__all__ = ["EXTRA_IDS", "SPIECE_FILES", "UnigramModel", "build_unigram", "open_spiece"]

SPIECE_FILES = ("spiece.model",)
EXTRA_IDS = 100
_SPACE = "\u2581"
_SENTINEL = re.compile(f"{_SPACE}?(<extra_id_[0-9]+>)")
_UNIGRAM = 1
_ALGORITHMS = {1: "unigram", 2: "BPE", 3: "word", 4: "character"}  # `ModelType` of the .proto file
_CONTROL = 3


class UnigramModel(NamedTuple):
    """Fields of a sentencepiece model: pieces (text, score, type), and normalization settings."""

    pieces: list[tuple[str, float, int]]
    algorithm: int
    unknown_id: int
    byte_fallback: bool
    characters: bytes
    leads_with_space: bool
    drops_spaces: bool


def open_spiece(content: bytes, path: Path, extra_ids: int | None = None) -> Any:
    """Build the tokenizer of a sentencepiece model with the ``tokenizers`` library.

    Args:
        content: contents of the file.
        path: path of the file, for error messages.
        extra_ids: number of sentinel tokens (``<extra_id_0>``, ...) after the pieces; if None,
            100, or 0 if the pieces include sentinel tokens.

    Raises:
        DataError: the file is not a sentencepiece model, or not a unigram model.
    """
    model = _read(content, path)
    if model.algorithm != _UNIGRAM:
        kind = _ALGORITHMS.get(model.algorithm, str(model.algorithm))
        raise DataError(
            f"{str(path)!r} is a SentencePiece model of type {kind} (supported: "
            "unigram, as for T5). Write a tokenizer.json with transformers' "
            "AutoTokenizer.from_pretrained(directory).save_pretrained(directory)."
        )
    return build_unigram(model, extra_ids)


def build_unigram(model: UnigramModel, extra_ids: int | None = None) -> Any:
    """Build a unigram tokenizer with the ``tokenizers`` library; see `open_spiece`."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models
    from tokenizers import normalizers as norm
    from tokenizers import pre_tokenizers as pre

    # mT5's sentinel tokens are pieces with a leading space, which is removed.
    named = [(_SENTINEL.sub(r"\1", text), score, kind) for text, score, kind in model.pieces]
    scores = [(text, score) for text, score, _ in named]
    tokenizer = Tokenizer(models.Unigram(scores, model.unknown_id, model.byte_fallback))
    steps: list[Any] = [norm.Precompiled(model.characters)] if model.characters else []
    if model.drops_spaces:
        steps += [norm.Strip(), norm.Replace(Regex(" {2,}"), " ")]
    tokenizer.normalizer = norm.Sequence(steps)
    scheme = "always" if model.leads_with_space else "never"
    tokenizer.pre_tokenizer = pre.Metaspace(_SPACE, prepend_scheme=scheme)
    tokenizer.decoder = decoders.Metaspace(_SPACE, prepend_scheme=scheme)
    own = [text for text, _, kind in named if kind == _CONTROL or _SENTINEL.fullmatch(text)]
    if extra_ids is None:
        extra_ids = 0 if "<extra_id_0>" in own else EXTRA_IDS
    more = [f"<extra_id_{number}>" for number in reversed(range(extra_ids))]
    special = [AddedToken(text, normalized=False) for text in (*own, *more)]
    tokenizer.add_special_tokens(special)
    return tokenizer


def _read(content: bytes, path: Path) -> UnigramModel:
    """Parse the fields of a model file; missing fields get the format's defaults."""
    try:
        parts = list(_fields(content))
        pieces = [_read_piece(dict(_fields(part))) for number, part in parts if number == 1]
        training = dict(_fields(next((p for n, p in parts if n == 2), b"")))
        treatment = dict(_fields(next((p for n, p in parts if n == 3), b"")))
        if not pieces:
            raise ValueError("the vocabulary is empty")
        return UnigramModel(
            pieces,
            training.get(3, _UNIGRAM),
            training.get(40, 0),
            bool(training.get(35, 0)),
            treatment.get(2, b""),
            bool(treatment.get(3, 1)),
            bool(treatment.get(4, 1)),
        )
    except (ValueError, IndexError, TypeError, struct.error) as error:
        raise DataError(
            f"{str(path)!r} is not a SentencePiece model ({error}). Download the file again."
        ) from error


def _read_piece(fields: dict[int, Any]) -> tuple[str, float, int]:
    (score,) = struct.unpack("<f", fields.get(2, bytes(4)))
    return fields[1].decode("utf-8"), score, fields.get(3, 1)


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yield (field number, value as int or bytes) for each field in a protobuf message."""
    at = 0
    while at < len(data):
        key, at = _number(data, at)
        kind = key & 7
        if kind == 0:
            value, at = _number(data, at)
            yield key >> 3, value
            continue
        if kind == 2:
            length, at = _number(data, at)
        elif kind in (1, 5):
            length = 8 if kind == 1 else 4
        else:
            raise ValueError(f"a field has the unknown type {kind}")
        if at + length > len(data):
            raise ValueError("the file is truncated")
        yield key >> 3, data[at : at + length]
        at += length


def _number(data: bytes, at: int) -> tuple[int, int]:
    """Decode a varint (seven bits per byte, lowest first); return its value and the next offset."""
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
