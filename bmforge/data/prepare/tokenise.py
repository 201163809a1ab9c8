"""Train a byte-level BPE tokenizer, and turn documents into a token store with it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from bmforge.data.sources.files import Document
from bmforge.data.store.writer import TokenStoreWriter
from bmforge.errors import ConfigError, DataError
from bmforge.files import read_json
from bmforge.logging import ProgressBar, track
from bmforge.tokenizers.tokenizer_json import (
    CONFIG_FILE,
    TOKENIZER_FILE,
    find_tokenizer_json,
    open_tokenizer_json,
    read_role_tokens,
)

__all__ = [
    "END_OF_TEXT",
    "EncodeCount",
    "copy_tokenizer",
    "encode_to_store",
    "end_of_text_id",
    "load_tokenizer",
    "save_tokenizer",
    "train_bpe",
]

END_OF_TEXT = "<|endoftext|>"
_FAST_CLASS = "PreTrainedTokenizerFast"
_SMALLEST_VOCABULARY = 257  # 256 bytes and the end-of-text token
_BATCH_DOCUMENTS = 256
_BATCH_CHARACTERS = 1 << 20


@dataclass
class EncodeCount:
    """What went into a store: documents, UTF-8 bytes of their text, tokens with end-of-text."""

    documents: int = 0
    text_bytes: int = 0
    tokens: int = 0


def train_bpe(texts: Iterable[str], vocab_size: int, *, min_frequency: int = 2) -> Tokenizer:
    """Train a byte-level BPE tokenizer; it encodes any text without an unknown token.

    ``<|endoftext|>`` gets id 0. A small corpus may give fewer than `vocab_size` tokens.

    Args:
        vocab_size: token ids to make, at least 257.
        min_frequency: a pair seen less often is not merged.

    Raises:
        ConfigError: `vocab_size` is below 257.
    """
    if vocab_size < _SMALLEST_VOCABULARY:
        raise ConfigError(
            f"vocab_size={vocab_size}: byte-level BPE needs at least {_SMALLEST_VOCABULARY} "
            "(256 bytes and the end-of-text token)"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(track(texts, "train tokenizer"), trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, directory: str | os.PathLike[str]) -> None:
    """Write tokenizer.json and tokenizer_config.json, which transformers' fast tokenizer reads."""
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / TOKENIZER_FILE))
    config = {
        "tokenizer_class": _FAST_CLASS,
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
    }
    _write_config(folder, config)


def load_tokenizer(directory: str | os.PathLike[str]) -> Tokenizer:
    """Open the tokenizer.json of a directory, or what older files make; it cuts and pads nothing.

    Raises:
        DataError: there is none, or it is no tokenizer.
    """
    return open_tokenizer_json(_read_tokenizer(Path(directory)), Path(directory) / TOKENIZER_FILE)


def copy_tokenizer(source: str | os.PathLike[str], directory: str | os.PathLike[str]) -> None:
    """Write what `save_tokenizer` does for the tokenizer of `source`, with the roles named there.

    Raises:
        DataError: there is none, or a file is damaged.
    """
    source, folder = Path(source), Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / TOKENIZER_FILE).write_bytes(_read_tokenizer(source))
    config = source / CONFIG_FILE
    said = read_json(config) if config.is_file() else {"tokenizer_class": _FAST_CLASS}
    roles = {f"{role}_token": token for role, token in read_role_tokens(source).items()}
    missing = {name: token for name, token in roles.items() if said.get(name) is None}
    if config.is_file() and not missing:
        (folder / CONFIG_FILE).write_bytes(config.read_bytes())
    else:
        _write_config(folder, {**said, **missing})


def end_of_text_id(tokenizer: Tokenizer, directory: str | os.PathLike[str] | None = None) -> int:
    """Return the id of ``<|endoftext|>``, or else of the ``eos_token`` that `directory` names.

    Raises:
        DataError: the tokenizer has no such token.
    """
    roles = {} if directory is None else read_role_tokens(Path(directory))
    for name in (END_OF_TEXT, roles.get("eos")):
        if name is not None and (found := tokenizer.token_to_id(name)) is not None:
            return int(found)
    raise DataError(
        f"the tokenizer has no token {END_OF_TEXT!r}: name its end-of-document token with eos_id, "
        f"or with eos_token in a {CONFIG_FILE} beside it"
    )


def _read_tokenizer(folder: Path) -> bytes:
    content = find_tokenizer_json(folder)
    if content is None:
        raise DataError(
            f"{str(folder / TOKENIZER_FILE)!r} does not exist: name a directory with a "
            f"{TOKENIZER_FILE}, or with GPT-2's, OPT's or RoBERTa's vocab.json and merges.txt, or "
            "BERT's vocab.txt"
        )
    return content


def _write_config(folder: Path, config: dict[str, Any]) -> None:
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    (folder / CONFIG_FILE).write_text(text, "utf-8")


def encode_to_store(
    documents: Iterable[Document],
    tokenizer: Tokenizer,
    prefix: str | os.PathLike[str],
    *,
    eos_id: int | None = None,
    num_documents: int | None = None,
    overwrite: bool = False,
) -> EncodeCount:
    """Encode documents in batches and write them as a token store, eos behind each.

    A special token's name inside a text is encoded as ordinary text, so that no text can forge the
    end of a document. Empty documents are kept as their eos alone.

    Args:
        prefix: path of the store without ``.bin`` or ``.idx``.
        eos_id: the end-of-document token; by default that of ``<|endoftext|>``.
        num_documents: for the progress bar.
        overwrite: replace a store that is there.

    Memory: about a million characters of text at a time, or one document if that is longer.
    """
    eos = end_of_text_id(tokenizer) if eos_id is None else eos_id
    count = EncodeCount()
    vocab_size = max(tokenizer.get_vocab_size(), eos + 1)
    with (
        TokenStoreWriter(prefix, vocab_size=vocab_size, overwrite=overwrite) as writer,
        ProgressBar("tokenise", num_documents) as bar,
        _specials_as_text(tokenizer),
    ):
        for texts in _batches(documents):
            for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False):
                ids = encoding.ids
                ids.append(eos)
                writer.add_item(ids)
                writer.end_document()
                count.tokens += len(ids)
            count.documents += len(texts)
            count.text_bytes += sum(len(text.encode()) for text in texts)
            bar.advance(len(texts), f"{count.tokens} tokens")
    return count


def _batches(documents: Iterable[Document]) -> Iterator[list[str]]:
    """Yield lists of texts, closed at 256 documents or a million characters."""
    texts: list[str] = []
    characters = 0
    for document in documents:
        texts.append(document.text)
        characters += len(document.text)
        if len(texts) == _BATCH_DOCUMENTS or characters >= _BATCH_CHARACTERS:
            yield texts
            texts, characters = [], 0
    if texts:
        yield texts


@contextmanager
def _specials_as_text(tokenizer: Tokenizer) -> Iterator[None]:
    """Let names of special tokens inside texts be plain text, and put the setting back."""
    before = tokenizer.encode_special_tokens
    tokenizer.encode_special_tokens = True
    try:
        yield
    finally:
        tokenizer.encode_special_tokens = before
