"""Interface of all tokenizers: load, save, encode, decode, and special token ids."""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

from bmforge.errors import ConfigError, DataError
from bmforge.files import replace_file
from bmforge.tokenizers.tokenizer_json import CONFIG_FILE

__all__ = [
    "VOCABULARY_FILE",
    "Tokenizer",
    "VocabularyTokenizer",
    "check_tokens",
    "open_directory",
    "parse_vocabulary",
    "save_files",
    "unreadable_text",
]

VOCABULARY_FILE = "vocab.txt"


class Tokenizer(ABC):
    """Base class of all tokenizers, which convert text to token ids and back.

    Attributes:
        roles: mapping from role ("pad", "bos", "eos", "unk", "mask", ...) to its special token. A
            role whose token is not in the vocabulary has no id.
    """

    roles: ClassVar[Mapping[str, str]] = {}

    @classmethod
    @abstractmethod
    def from_pretrained(cls, directory: str | os.PathLike[str]) -> Self:
        """Load the vocabulary files in `directory`.

        Raises:
            DataError: a file is missing or damaged.
            MissingDependencyError: a package of the extra ``zh`` is not installed.
        """

    @abstractmethod
    def _files(self) -> dict[str, bytes]:
        """Return a dict from file name to contents, for the files that `from_pretrained` reads."""

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, without adding special tokens."""

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """Decode token ids to text.

        Raises:
            DataError: an id is not in the vocabulary.
        """

    def decode_written(self, ids: Iterable[int]) -> str:
        """Decode generated token ids to text, skipping ids outside the vocabulary.

        The embedding may have more rows than the vocabulary (padded to a round number), and a model
        may generate such ids.
        """
        return self.decode(id for id in ids if id in self._known_ids)

    @cached_property
    def _known_ids(self) -> frozenset[int]:
        """All ids in the vocabulary, cached because every generation step needs them."""
        return frozenset(self.get_vocab().values())

    @abstractmethod
    def token_to_id(self, token: str) -> int | None:
        """Return the id of a token, or None if the vocabulary lacks the token."""

    @abstractmethod
    def get_vocab(self) -> dict[str, int]:
        """Return the vocabulary as a dict from token to id."""

    def convert_ids_to_tokens(self, ids: Iterable[int]) -> list[str | None]:
        """Return the token of each id, as transformers does; None for an id without a token."""
        tokens = {id: token for token, id in self.get_vocab().items()}
        return [tokens.get(id) for id in ids]

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        """Return the id of one token, or of each token in a sequence, as transformers does.

        A token outside the vocabulary gets the unknown token's id, or None without such a token.
        """
        if isinstance(tokens, str):
            id = self.token_to_id(tokens)
            return self.unk_id if id is None else id
        return [self.convert_tokens_to_ids(token) for token in tokens]

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Number of token ids."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each text."""
        return [self.encode(text) for text in texts]

    def encode_prompt(self, text: str) -> list[int]:
        """Return the token ids of a prompt, including added special tokens such as BOS.

        The ids equal those of transformers' ``tokenizer(text).input_ids``. OpenBMB's own tokenizers
        add no special tokens, because the prompt formats of their models contain them.
        """
        return self.encode(text)

    @cached_property
    def prompt_prefix(self) -> list[int]:
        """Ids of the special tokens that `encode_prompt` prepends to a text, such as BOS."""
        body, prompt = self.encode("a"), self.encode_prompt("a")
        starts = range(len(prompt) - len(body) + 1)
        return next((prompt[:at] for at in starts if prompt[at : at + len(body)] == body), [])

    def escape_specials(self, text: str) -> str:
        """Escape names of special tokens in a text, so that `encode_chat` encodes them as text."""
        return text

    def encode_chat(self, text: str) -> list[int]:
        """Return the token ids of a conversation rendered by a chat template.

        Names of special tokens are encoded as special tokens, except where `escape_specials`
        escaped them. No special tokens are added, because the template contains them.
        """
        return self.encode(text)

    def encode_plain(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of untrusted texts, all below `vocab_size`.

        Names of special tokens in the texts are encoded as characters.
        """
        return self.encode_batch(texts)

    def cut_text(self, text: str) -> Iterator[str]:
        """Yield pieces of a text whose `encode_plain` ids, joined, are those of the whole text.

        By default, the whole text; `FastTokenizer` cuts long texts, which limits memory.
        """
        yield text

    def save_pretrained(self, directory: str | os.PathLike[str]) -> None:
        """Write the vocabulary files and a tokenizer_config.json into `directory`.

        Raises:
            ConfigError: a file exists with other contents; nothing is written then.
        """
        config = {"tokenizer_class": type(self).__name__, **self._settings()}
        text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
        save_files(directory, {CONFIG_FILE: text.encode(), **self._files()})

    def _settings(self) -> dict[str, Any]:
        """Return additional entries for tokenizer_config.json."""
        return {}

    def _role_tokens(self) -> Mapping[str, str]:
        """Return a mapping from role to special token."""
        return self.roles

    def role_id(self, role: str) -> int | None:
        """Return the id of the special token for a role; None if there is none."""
        token = self._role_tokens().get(role)
        return None if token is None else self.token_to_id(token)

    @property
    def pad_id(self) -> int | None:
        """Id of the padding token."""
        return self.role_id("pad")

    @property
    def bos_id(self) -> int | None:
        """Id of the beginning-of-sequence token."""
        return self.role_id("bos")

    @property
    def eos_id(self) -> int | None:
        """Id of the end-of-sequence token."""
        return self.role_id("eos")

    @property
    def unk_id(self) -> int | None:
        """Id of the unknown token, for text that the vocabulary cannot represent."""
        return self.role_id("unk")

    @property
    def mask_id(self) -> int | None:
        """Id of the mask token."""
        return self.role_id("mask")

    @property
    def pad_token_id(self) -> int | None:
        """Id of the padding token; same as `pad_id`, with the name used by transformers."""
        return self.pad_id

    @property
    def eos_token_id(self) -> int | None:
        """Id of the end-of-sequence token; same as `eos_id`, with the name used by transformers."""
        return self.eos_id

    @property
    def special_ids(self) -> dict[str, int]:
        """Mapping from role to the id of its special token."""
        ids = {role: self.role_id(role) for role in self._role_tokens()}
        return {role: id for role, id in ids.items() if id is not None}

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Ids of all special tokens, including those without a role."""
        return frozenset(self.special_ids.values())

    def __len__(self) -> int:
        return self.vocab_size


class VocabularyTokenizer(Tokenizer):
    """Base class of tokenizers with a vocabulary in Python, which subclasses store in id order."""

    _vocabulary: dict[str, int]

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return len(self._vocabulary)

    def token_to_id(self, token: str) -> int | None:
        """Return the id of a token, or None if the vocabulary lacks the token."""
        return self._vocabulary.get(token)

    def get_vocab(self) -> dict[str, int]:
        """Return the vocabulary as a dict from token to id."""
        return dict(self._vocabulary)


def check_tokens(tokens: Iterable[str], vocabulary: Container[str], path: Path, model: str) -> None:
    """Raise `DataError` if the vocabulary in a file lacks a token that a model needs."""
    missing = [token for token in tokens if token not in vocabulary]
    if missing:
        raise DataError(
            f"{str(path)!r} lacks the tokens {missing}, which {model} needs. Use the {path.name} "
            "of the original model."
        )


def unreadable_text(texts: Sequence[str], error: Exception) -> DataError:
    """Return a `DataError` for texts that a tokenizer library could not encode."""
    for text in texts:
        for at, character in enumerate(text):
            if "\ud800" <= character <= "\udfff":
                return DataError(
                    f"character {at} of the text {text[:40]!r} is an unpaired surrogate, "
                    "which is not a valid character. Clean the text, for example with "
                    "text.encode('utf-8', 'replace').decode('utf-8')."
                )
    return DataError(f"the text has an unsupported type ({error}). Pass a str.")


def open_directory(directory: str | os.PathLike[str]) -> Path:
    """Return `directory` as a `Path`, after checking that it is a directory.

    Raises:
        DataError: `directory` is not a directory.
    """
    path = Path(directory)
    if not path.is_dir():
        advice = "Pass the directory with the tokenizer's files."
        if path.is_file():
            advice = f"Pass the directory of the tokenizer's files: {str(path.parent)!r}."
        raise DataError(f"{str(path)!r} is not a directory. {advice}")
    return path


def parse_vocabulary(
    content: bytes, path: Path, *, skip_empty: bool = False, strip: bool = True
) -> dict[str, int]:
    """Parse a vocabulary file with one token per line; return a dict from token to id.

    Args:
        content: contents of the file.
        path: path of the file, for error messages.
        skip_empty: True to skip empty lines; False to parse each as an empty token.
        strip: True to strip whitespace around tokens.

    Raises:
        DataError: the file is not UTF-8, is empty, or has a duplicate token.
    """
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{str(path)!r} is not UTF-8 text ({error}). Download the file again."
        ) from error
    lines = text.replace("\r\n", "\n").removesuffix("\n").split("\n")
    lines = [line.strip() for line in lines] if strip else lines
    numbers = [number for number, line in enumerate(lines) if line or not skip_empty]
    vocabulary = {lines[number]: id for id, number in enumerate(numbers)}
    if not vocabulary or not text:
        raise DataError(
            f"{str(path)!r} is empty (needed: one token per line). Download the file again."
        )
    if len(vocabulary) != len(numbers):
        at = next(n for id, n in enumerate(numbers) if vocabulary[lines[n]] != id)
        raise DataError(
            f"{str(path)!r} contains the token {lines[at]!r} twice, in lines {at + 1} and "
            f"{numbers[vocabulary[lines[at]]] + 1} (needed: one token per line, no duplicates)."
        )
    return vocabulary


def save_files(directory: str | os.PathLike[str], files: dict[str, bytes]) -> None:
    """Write files into a directory, unless this would change an existing file.

    Raises:
        ConfigError: a file exists with other contents; nothing is written then.
    """
    folder = Path(directory)
    taken = [
        name
        for name, content in files.items()
        if (folder / name).exists() and (folder / name).read_bytes() != content
    ]
    if taken:
        raise ConfigError(
            f"{str(folder)!r} already contains a different {' and '.join(taken)}. Save into a new "
            "directory, or remove the old files first."
        )
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        replace_file(folder / name, content)
