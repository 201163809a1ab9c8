"""Trains a byte-level BPE tokenizer, and encodes documents into a token store."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import tokenizers

from bmforge.data.sources.document import Document
from bmforge.data.store.writer import TokenStoreWriter
from bmforge.errors import ConfigError, DataError
from bmforge.logging import ProgressBar
from bmforge.prepare_settings import BpeConfig
from bmforge.tokenizers import AutoTokenizer, FastTokenizer, Tokenizer
from bmforge.tokenizers.text_pieces import cut_text, find_separators
from bmforge.tokenizers.tokenizer_json import CONFIG_FILE

__all__ = [
    "END_OF_TEXT",
    "EncodeCount",
    "check_bpe",
    "encode_quietly",
    "encode_to_store",
    "end_of_text_id",
    "load_tokenizer",
    "train_bpe",
]

END_OF_TEXT = "<|endoftext|>"
# Content of tokenizer_config.json, which transformers reads with tokenizer.json.
_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": END_OF_TEXT,
    "eos_token": END_OF_TEXT,
    "clean_up_tokenization_spaces": False,
}
_SMALLEST_VOCABULARY = 257  # 256 bytes and the end-of-text token
_BATCH_PIECES = 256
_BATCH_CHARACTERS = 1 << 20


@dataclass
class EncodeCount:
    """Size of a token store: documents, UTF-8 bytes of text, and tokens, end-of-text included."""

    documents: int = 0
    text_bytes: int = 0
    tokens: int = 0


def train_bpe(
    texts: Iterable[str], vocab_size: int, config: BpeConfig | None = None
) -> FastTokenizer:
    """Train a byte-level BPE tokenizer, which can encode any text without unknown tokens.

    ``<|endoftext|>`` gets id 0, other special tokens follow. With a small corpus, the vocabulary
    may have fewer than `vocab_size` tokens.

    Args:
        texts: training texts.
        vocab_size: vocabulary size, at least 257 plus one for each extra special token.
        config: pre-tokenization rules and special tokens.

    Raises:
        ConfigError: a setting is out of range.
    """
    config = config or BpeConfig()
    check_bpe(vocab_size, config)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = _make_pre_tokenizer(config)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    # The library merges only pairs that are shorter than its limit.
    limit = None if config.max_token_length is None else config.max_token_length + 1
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=config.min_frequency,
        special_tokens=[END_OF_TEXT, *config.special_tokens],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=limit,
        show_progress=False,
    )
    with ProgressBar("train tokenizer") as bar:
        separators = find_separators(tokenizer)
        tokenizer.train_from_iterator(_cut_and_count(texts, separators, bar), trainer)
    roles = {"bos": END_OF_TEXT, "eos": END_OF_TEXT}
    settings = (json.dumps(_CONFIG, indent=2, ensure_ascii=False) + "\n").encode()
    return FastTokenizer(tokenizer.to_str(pretty=True).encode(), roles, {CONFIG_FILE: settings})


def check_bpe(vocab_size: int, config: BpeConfig) -> None:
    """Check the options of BPE training before training begins.

    Raises:
        ConfigError: a setting is out of range.
    """
    special = config.special_tokens
    if len({END_OF_TEXT, *special}) != len(special) + 1 or not all(special):
        raise ConfigError(
            f"bpe.special_tokens={special} must contain different, non-empty names. "
            f"{END_OF_TEXT} must not be among them, because it is always added."
        )
    least = _SMALLEST_VOCABULARY + len(special)
    if vocab_size < least:
        raise ConfigError(
            f"vocab_size={vocab_size} is too small (byte-level BPE needs at least {least}: 256 "
            f"bytes and {1 + len(special)} special tokens)."
        )
    if config.min_frequency < 1:
        raise ConfigError(f"bpe.min_frequency={config.min_frequency} must be at least 1.")
    if config.max_token_length is not None and config.max_token_length < 2:
        raise ConfigError(f"bpe.max_token_length={config.max_token_length} must be at least 2.")


def _make_pre_tokenizer(config: BpeConfig) -> tokenizers.pre_tokenizers.PreTokenizer:
    """Build the pre-tokenizer: split digits and Chinese characters first, then words."""
    split, pattern = tokenizers.pre_tokenizers.Split, tokenizers.Regex
    parts = []
    if config.digits != "joined":
        longest = 1 if config.digits == "single" else 3
        parts.append(split(pattern(rf"\p{{N}}{{1,{longest}}}"), "isolated"))
    if config.han == "single":
        parts.append(split(pattern(r"\p{Han}"), "isolated"))
    byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizers.pre_tokenizers.Sequence([*parts, byte_level]) if parts else byte_level


def _cut_and_count(texts: Iterable[str], separators: str, bar: ProgressBar) -> Iterator[str]:
    for text in texts:
        yield from cut_text(text, separators)
        bar.advance()


# Re-exported: the same loader opens tokenizers of prepared corpora and of models.
load_tokenizer = AutoTokenizer.from_pretrained


def end_of_text_id(tokenizer: Tokenizer) -> int:
    """Return the id of the end-of-document token: ``<|endoftext|>``, else the tokenizer's EOS.

    Raises:
        DataError: the tokenizer has no such token.
    """
    for id in (tokenizer.token_to_id(END_OF_TEXT), tokenizer.eos_id):
        if id is not None:
            return id
    raise DataError(
        f"the tokenizer has no token {END_OF_TEXT!r} and no end-of-sequence token. Set eos_token "
        f"in the {CONFIG_FILE} of its directory, or pass eos_id to encode_to_store."
    )


def encode_to_store(
    documents: Iterable[Document],
    tokenizer: Tokenizer,
    prefix: str | os.PathLike[str],
    *,
    eos_id: int | None = None,
    num_documents: int | None = None,
    overwrite: bool = False,
) -> EncodeCount:
    """Encode documents and write them as a token store, with an EOS token after each document.

    A special-token string inside a document is encoded as ordinary text, so that no document can
    forge its end. An empty document is stored as a single EOS token.

    Args:
        documents: documents to encode.
        tokenizer: tokenizer of the texts.
        prefix: path of the store without ``.bin`` or ``.idx``.
        eos_id: id of the end-of-document token (default: `end_of_text_id`).
        num_documents: total number of documents, for the progress bar.
        overwrite: True to replace an existing store.

    Memory: about a million characters of text at a time, and the ids of one document. A longer
    document is encoded in pieces if the tokenizer can (`Tokenizer.cut_text`), else as a whole.
    """
    eos = end_of_text_id(tokenizer) if eos_id is None else eos_id
    with ProgressBar("tokenise", num_documents) as bar:
        return encode_quietly(documents, tokenizer, prefix, eos, overwrite, bar.advance)


def encode_quietly(
    documents: Iterable[Document],
    tokenizer: Tokenizer,
    prefix: str | os.PathLike[str],
    eos: int,
    overwrite: bool = False,
    advance: Callable[[int, str], None] = lambda documents, text: None,
) -> EncodeCount:
    """Encode like `encode_to_store`, but call `advance` instead of showing a progress bar."""
    count = EncodeCount()
    vocab_size = max(tokenizer.vocab_size, eos + 1)
    with TokenStoreWriter(prefix, vocab_size=vocab_size, overwrite=overwrite) as writer:
        unfinished: list[np.ndarray] = []
        for pieces in _batches(documents, tokenizer):
            for ids, (_, is_last) in zip(
                tokenizer.encode_plain([text for text, _ in pieces]), pieces, strict=True
            ):
                if is_last:
                    ids.append(eos)
                unfinished.append(np.asarray(ids, dtype=np.int64))
                if is_last:
                    writer.add_item(np.concatenate(unfinished))
                    writer.end_document()
                    unfinished.clear()
                count.tokens += len(ids)
            ended = sum(is_last for _, is_last in pieces)
            count.documents += ended
            count.text_bytes += sum(len(text.encode()) for text, _ in pieces)
            advance(ended, f"{count.tokens} tokens")
    return count


def _batches(
    documents: Iterable[Document], tokenizer: Tokenizer
) -> Iterator[list[tuple[str, bool]]]:
    """Yield batches of (piece of a document, True for the last piece of its document).

    A batch has at most 256 pieces, and about a million characters or one longer piece.
    """
    pieces: list[tuple[str, bool]] = []
    characters = 0
    for document in documents:
        left = len(document.text)
        for piece in tokenizer.cut_text(document.text):
            left -= len(piece)
            pieces.append((piece, not left))
            characters += len(piece)
            if len(pieces) == _BATCH_PIECES or characters >= _BATCH_CHARACTERS:
                yield pieces
                pieces, characters = [], 0
    if pieces:
        yield pieces
