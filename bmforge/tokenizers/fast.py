"""`FastTokenizer`, which wraps tokenizers of the ``tokenizers`` library."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from bmforge.errors import DataError
from bmforge.gguf_header import read_gguf_header
from bmforge.tokenizers.base import (
    Tokenizer,
    open_directory,
    save_files,
    unreadable_text,
)
from bmforge.tokenizers.chat_messages import THOUGHT_MARKS
from bmforge.tokenizers.gguf_read import read_gguf_tokenizer
from bmforge.tokenizers.text_pieces import PIECE_CHARACTERS, cut_text, find_separators
from bmforge.tokenizers.tokenizer_json import (
    ROLE_FILES,
    TEMPLATE_FILE,
    TOKENIZER_FILE,
    find_named_templates,
    find_tokenizer_json,
    open_tokenizer_json,
    read_role_tokens,
)

__all__ = ["FastTokenizer"]

# Unicode noncharacters, which do not occur in texts: prefix of aliases of special tokens, prefix of
# tokens that no text may match, and character that is inserted into escaped names.
_UNSEEN, _HIDDEN, _ESCAPE = "\U0010ffff", "\U0010fffe", "\U000ffffe"
_THOUGHT_MARKS = frozenset(mark for pair in THOUGHT_MARKS for mark in pair)


class FastTokenizer(Tokenizer):
    """Tokenizer of a Hugging Face model directory.

    Args:
        content: contents of a tokenizer.json.
        roles: mapping from role to its special token.
        companions: mapping from name to contents of further files to save.
        path: path of the file, for error messages.

    Raises:
        DataError: the content is not a valid tokenizer.json.
    """

    def __init__(
        self,
        content: bytes,
        roles: dict[str, str] | None = None,
        companions: dict[str, bytes] | None = None,
        path: Path = Path(TOKENIZER_FILE),
    ) -> None:
        self._tokenizer = open_tokenizer_json(content, path)
        self._content = content
        self._companions = companions or {}
        self._roles = roles or {}

    @classmethod
    def from_pretrained(cls, directory: str | os.PathLike[str]) -> Self:
        """Load ``tokenizer.json``, and the special tokens in transformers' other files.

        A ``chat_template.jinja`` and further named templates are saved with the tokenizer.

        If only ``vocab.json`` with ``merges.txt`` (GPT-2, OPT, RoBERTa), BERT's ``vocab.txt`` or
        T5's ``spiece.model`` exists, a tokenizer.json is built from these files, and is saved
        instead of them.
        """
        folder = open_directory(directory)
        content = find_tokenizer_json(folder)
        if content is None:
            raise DataError(
                f"{str(folder)!r} contains neither {TOKENIZER_FILE} nor older tokenizer files that "
                "can be converted. Save the tokenizer with transformers' save_pretrained."
            )
        names = [n for n in (*ROLE_FILES, TEMPLATE_FILE) if (folder / n).exists()]
        names += find_named_templates(folder)
        companions = {name: (folder / name).read_bytes() for name in names}
        roles = read_role_tokens(folder)
        # Write the tokenizer.json built from the older files.
        if not (folder / TOKENIZER_FILE).exists():
            tokens = {f"{role}_token": token for role, token in roles.items()}
            companions.setdefault(ROLE_FILES[1], (json.dumps(tokens, indent=2) + "\n").encode())
        return cls(content, roles, companions, folder / TOKENIZER_FILE)

    @classmethod
    def from_gguf(cls, path: str | os.PathLike[str]) -> Self:
        """Load the tokenizer in a GGUF file's metadata; `save_pretrained` writes a tokenizer.json.

        Raises:
            CheckpointError: the file is damaged.
            DataError: the file has no tokenizer, or an unsupported tokenizer.
        """
        stored = read_gguf_tokenizer(read_gguf_header(Path(path)))
        settings = {f"{role}_token": token for role, token in stored.roles.items()}
        text = json.dumps({**settings, **stored.settings}, indent=2, ensure_ascii=False) + "\n"
        return cls(stored.content, stored.roles, {ROLE_FILES[0]: text.encode()}, Path(path))

    @property
    def definition(self) -> str:
        """Contents of a tokenizer.json for this tokenizer, as text."""
        return str(self._tokenizer.to_str())

    @property
    def settings(self) -> dict[str, Any]:
        """Parsed tokenizer.json, with the parsed tokenizer_config.json under the key "config"."""
        config = json.loads(self._companions.get(ROLE_FILES[0], b"{}"))
        return {**json.loads(self._content), "config": config}

    def _role_tokens(self) -> Mapping[str, str]:
        return self._roles

    def save_pretrained(self, directory: str | os.PathLike[str]) -> None:
        """Write the files from which this tokenizer was loaded.

        Raises:
            ConfigError: a file exists with other contents; nothing is written then.
        """
        save_files(directory, self._files())

    def _files(self) -> dict[str, bytes]:
        return {TOKENIZER_FILE: self._content, **self._companions}

    @property
    def vocab_size(self) -> int:
        """Number of token ids, including added tokens."""
        return self._tokenizer.get_vocab_size()

    def token_to_id(self, token: str) -> int | None:
        """Return the id of a token, or None if the vocabulary lacks the token."""
        return self._tokenizer.token_to_id(token)

    def get_vocab(self) -> dict[str, int]:
        """Return the vocabulary as a dict from token to id, including added tokens."""
        return self._tokenizer.get_vocab()

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, without adding special tokens."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each text.

        Raises:
            DataError: a text contains an unpaired surrogate.
        """
        try:
            encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        except (TypeError, UnicodeError) as error:
            raise unreadable_text(texts, error) from error
        return [encoding.ids for encoding in encoded]

    def encode_prompt(self, text: str) -> list[int]:
        """Return the token ids of a prompt, with the special tokens that the post-processor adds.

        If tokenizer_config.json contains ``add_bos_token`` or ``add_eos_token``, they are used
        instead of the post-processor, as in transformers.

        Raises:
            DataError: a text contains an unpaired surrogate.
        """
        settings = self.settings["config"]
        if "add_bos_token" in settings or "add_eos_token" in settings:
            begin = self.bos_id if settings.get("add_bos_token") else None
            end = self.eos_id if settings.get("add_eos_token") else None
            return [id for id in (begin, *self.encode(text), end) if id is not None]
        try:
            ids: list[int] = self._tokenizer.encode(text).ids
        except (TypeError, UnicodeError) as error:
            raise unreadable_text([text], error) from error
        return ids

    def escape_specials(self, text: str) -> str:
        """Escape names of special tokens in a text, so that `encode_chat` encodes them as text."""
        text = text.replace(_ESCAPE, "")
        if self._special_names is None:
            return text
        return self._special_names.sub(lambda name: name[0][0] + _ESCAPE + name[0][1:], text)

    def encode_chat(self, text: str) -> list[int]:
        """Return the token ids of a conversation rendered by a chat template.

        If a message contains the name of a special token, all special tokens that the template
        wrote are replaced with aliases, so that the name in the message is encoded as text.
        """
        if _ESCAPE not in text or self._special_names is None:
            return self.encode(text.replace(_ESCAPE, ""))
        text = self._special_names.sub(lambda name: _UNSEEN + name[0], text).replace(_ESCAPE, "")
        tokenizer, ids = self._aliased_tokenizer
        encoded = tokenizer.encode(text, add_special_tokens=False)
        return [ids.get(id, id) for id in encoded.ids]

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Ids of all special tokens, including those without a role."""
        added = self._tokenizer.get_added_tokens_decoder().items()
        return frozenset(id for id, token in added if token.special)

    @cached_property
    def _special_names(self) -> re.Pattern[str] | None:
        """Regular expression for the special tokens to escape, longest first; None if none.

        Delimiters of reasoning are left out: a message of an earlier answer contains them, as in
        training, and they cannot end a turn.
        """
        added = self._tokenizer.get_added_tokens_decoder().values()
        special = {token.content for token in added if token.special}
        names = sorted(special - _THOUGHT_MARKS, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, names))) if names else None

    @cached_property
    def _aliased_tokenizer(self) -> tuple[Any, dict[int, int]]:
        """Tokenizer with aliases of the special tokens, and a dict from its ids to token ids."""
        settings = json.loads(self._content)
        model = settings["model"]
        added_tokens = settings.get("added_tokens", ())
        special = {
            t["content"]: t
            for t in added_tokens
            if t["special"] and t["content"] not in _THOUGHT_MARKS
        }
        if model.get("type") == "Unigram":  # whose special tokens text must not match
            model["vocab"] = [
                [_HIDDEN + name if name in special else name, score]
                for name, score in model["vocab"]
            ]
        settings["added_tokens"] = [t for t in added_tokens if t["content"] not in special]
        settings["post_processor"] = None
        tokenizer = open_tokenizer_json(json.dumps(settings).encode(), Path(TOKENIZER_FILE))
        from tokenizers import AddedToken

        options = ("single_word", "lstrip", "rstrip", "normalized")
        tokenizer.add_special_tokens(
            [
                AddedToken(_UNSEEN + name, special=True, **{key: t[key] for key in options})
                for name, t in special.items()
            ]
        )
        added = {t["content"]: t["id"] for t in settings["added_tokens"]}
        ids = {tokenizer.token_to_id(_UNSEEN + name): t["id"] for name, t in special.items()}
        # Without the original special tokens, other added tokens may get lower ids.
        return tokenizer, ids | {tokenizer.token_to_id(name): id for name, id in added.items()}

    def encode_plain(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of texts; names of special tokens are encoded as characters.

        Raises:
            DataError: a text contains an unpaired surrogate.
        """
        tokenizer = self._plain_tokenizer
        try:
            encoded = tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        except (TypeError, UnicodeError) as error:
            raise unreadable_text(texts, error) from error
        return [encoding.ids for encoding in encoded]

    def cut_text(self, text: str) -> Iterator[str]:
        """Yield pieces of a text whose `encode_plain` ids, joined, are those of the whole text.

        A text is not cut if the tokenizer has no known place where it always splits.
        """
        if len(text) <= PIECE_CHARACTERS:
            yield text
        else:
            yield from cut_text(text, self._separators)

    @cached_property
    def _separators(self) -> str:
        return find_separators(self._plain_tokenizer)

    @cached_property
    def _plain_tokenizer(self) -> Any:
        """Tokenizer that encodes special-token strings in the input as ordinary text.

        A unigram vocabulary contains these strings as tokens; they are renamed so that no text
        matches.
        """
        settings = json.loads(self._content)
        model = settings["model"]
        if model.get("type") == "Unigram":
            special = {t["content"] for t in settings.get("added_tokens", ()) if t["special"]}
            model["vocab"] = [
                [_UNSEEN + text if text in special else text, score]
                for text, score in model["vocab"]
            ]
            settings["added_tokens"] = []
            settings["post_processor"] = None
        tokenizer = open_tokenizer_json(json.dumps(settings).encode(), Path(TOKENIZER_FILE))
        tokenizer.encode_special_tokens = True
        return tokenizer

    def decode(self, ids: Iterable[int]) -> str:
        """Decode token ids to text, including special tokens.

        Raises:
            DataError: an id is not in the vocabulary.
        """
        sequence = list(ids)
        wrong = [id for id in sequence if self._tokenizer.id_to_token(id) is None]
        if wrong:
            raise DataError(
                f"id={wrong[0]} is not in the vocabulary of {self.vocab_size} tokens. Use the "
                "tokenizer of the model that generated the id."
            )
        return self._tokenizer.decode(sequence, skip_special_tokens=False)
