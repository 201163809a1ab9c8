"""GLM-10B's tokenizers: GPT-2's BPE (English) or sentencepiece (Chinese), with GLM's blanks.

A text has blanks ``[MASK]``, ``[sMASK]`` or ``[gMASK]``; `build_inputs_for_generation` builds the
model inputs for filling the first blank.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from bmforge.batch import IGNORE_INDEX
from bmforge.errors import ConfigError, DataError
from bmforge.files import read_json
from bmforge.tokenizers.base import Tokenizer, open_directory, unreadable_text
from bmforge.tokenizers.glm_text import TextPart, open_text_part
from bmforge.tokenizers.tokenizer_json import CONFIG_FILE

if TYPE_CHECKING:  # only methods that create tensors import torch
    from torch import Tensor

__all__ = ["GLMTokenizer"]

ADDED_FILE = "added_tokens.json"
_BLANKS = ("[MASK]", "[sMASK]", "[gMASK]")


class GLMTokenizer(Tokenizer):
    """Tokenizer of GLM-10B for texts with blanks, which also builds the inputs of the model.

    Args:
        text_part: tokenizer for the text between special tokens.
        added: mapping from special token to id, as in ``added_tokens.json``.
        strips_left: special tokens before which whitespace is stripped.

    Raises:
        DataError: a special token of GLM is missing.

    Source: ``tokenization_glm.py`` and ``data_utils/tokenization.py`` of THUDM/GLM. As in the
    original, whitespace before blanks is stripped, unless ``added_tokens_decoder`` contains other
    settings.
    """

    roles: ClassVar[Mapping[str, str]] = {
        "pad": "<|endoftext|>",
        "eos": "<|endoftext|>",
        "cls": "[CLS]",
        "sep": "[SEP]",
        "unk": "[UNK]",
        "mask": "[MASK]",
        "smask": "[sMASK]",
        "gmask": "[gMASK]",
        "bos": "<|startofpiece|>",
        "sop": "<|startofpiece|>",
        "eop": "<|endofpiece|>",
    }

    def __init__(
        self, text_part: TextPart, added: dict[str, int], strips_left: Iterable[str] = _BLANKS
    ) -> None:
        self._text = text_part
        self._added = dict(added)
        end = text_part.token_to_id(self.roles["eos"])
        self._specials = added if end is None else {**added, self.roles["eos"]: end}
        needed = ("<|endoftext|>", "[CLS]", "[MASK]", "<|startofpiece|>", "<|endofpiece|>")
        missing = [token for token in needed if token not in self._specials]
        if missing:
            raise DataError(
                f"the special tokens {missing}, which GLM needs, are not defined (defined: "
                f"{sorted(self._specials)}). Use the {ADDED_FILE} of the model."
            )
        self._by_id = {id: token for token, id in self._specials.items()}
        self._strips_left = frozenset(strips_left)
        longest_first = sorted(self._specials, key=len, reverse=True)
        self._split = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")")

    @classmethod
    def from_pretrained(cls, directory: str | os.PathLike[str]) -> Self:
        """Load the text tokenizer and the added tokens in a directory."""
        folder = open_directory(directory)
        config = read_json(folder / CONFIG_FILE) if (folder / CONFIG_FILE).exists() else {}
        added, strips_left = _added_tokens(folder, config)
        return cls(open_text_part(folder), added, strips_left)

    def _settings(self) -> dict[str, Any]:
        decoder = {
            str(id): {"content": token, "lstrip": token in self._strips_left, "special": True}
            for id, token in sorted((id, token) for token, id in self._added.items())
        }
        return {"tokenizer_class": self._text.tokenizer_class, "added_tokens_decoder": decoder}

    def _files(self) -> dict[str, bytes]:
        added = json.dumps(self._added, indent=2, ensure_ascii=False) + "\n"
        return {ADDED_FILE: added.encode(), **self._text.files}

    @property
    def vocab_size(self) -> int:
        """Highest token id plus one."""
        return max(self._text.vocab_size, *(id + 1 for id in self._specials.values()))

    @property
    def mask_ids(self) -> list[int]:
        """Ids of the blank tokens ([MASK], [sMASK], [gMASK]) that this vocabulary contains."""
        return [self._specials[token] for token in _BLANKS if token in self._specials]

    def token_to_id(self, token: str) -> int | None:
        """Return the id of a special or ordinary token; None if it is not in the vocabulary."""
        return self._specials.get(token, self._text.token_to_id(token))

    def get_vocab(self) -> dict[str, int]:
        """Return the vocabulary as a dict from token to id, including special tokens."""
        return {**self._text.get_vocab(), **self._specials}

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, in which names of special tokens are recognized.

        Raises:
            DataError: the text contains an unpaired surrogate.
        """
        parts = self._split.split(text)
        ids: list[int] = []
        for number, part in enumerate(parts):
            if number % 2:
                ids.append(self._specials[part])
                continue
            follows = parts[number + 1] if number + 1 < len(parts) else ""
            part = part.rstrip() if follows in self._strips_left else part
            ids += self._encode_part(part, text)
        return ids

    def _encode_part(self, part: str, text: str) -> list[int]:
        """Return the token ids of `part`, a part of `text` between special tokens."""
        try:
            return self._text.encode(part) if part else []
        except (RuntimeError, TypeError, UnicodeError) as error:
            raise unreadable_text([text], error) from error

    def encode_plain(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of texts; names of special tokens are encoded as characters.

        Raises:
            DataError: a text contains an unpaired surrogate.
        """
        return [self._encode_characters(text) for text in texts]

    def _encode_characters(self, text: str) -> list[int]:
        ids = self._encode_part(text, text)
        if self._by_id.keys().isdisjoint(ids):
            return ids
        # The names may be tokens of a sentencepiece model; splitting them prevents a match.
        parts = [
            half
            for number, part in enumerate(self._split.split(text))
            for half in ((part[:1], part[1:]) if number % 2 else (part,))
        ]
        return [id for part in parts for id in self._encode_part(part, text)]

    def decode(self, ids: Iterable[int]) -> str:
        """Decode token ids to text, including special tokens.

        Raises:
            DataError: an id is neither a special token's nor in the vocabulary.
        """
        parts: list[str] = []
        for special, group in groupby(ids, key=lambda id: id in self._by_id):
            members = list(group)
            wrong = [i for i in members if not special and not 0 <= i < self._text.vocab_size]
            if wrong:
                raise DataError(
                    f"id={wrong[0]} is not in the vocabulary of {self.vocab_size} tokens. Use "
                    "the tokenizer of the model that generated the id."
                )
            parts += [self._by_id[i] for i in members] if special else [self._text.decode(members)]
        return self._text.joint.join(parts)

    def prepare(self, texts: Sequence[str], max_length: int | None = None) -> dict[str, Tensor]:
        """Encode texts as ``[CLS] text <|endoftext|>``, padded on the right.

        Args:
            texts: texts with a blank.
            max_length: maximum length in tokens; the beginning of longer texts is removed.

        Returns:
            dict with input_ids and attention_mask (1 for tokens, 0 for padding), int64.

        Shape: both (B, T), where T is the length of the longest sequence.

        Raises:
            ConfigError: there are no texts, or `max_length` is below 3.
        """
        import torch

        if not texts or (max_length is not None and max_length < 3):
            raise ConfigError(
                "prepare needs at least one text and a max_length of at least 3, but was called "
                f"with {len(texts)} texts and max_length={max_length}."
            )
        encoded = self.encode_batch(texts)
        if max_length is not None:
            encoded = [ids[-(max_length - 2) :] for ids in encoded]
        head, tail = self._specials["[CLS]"], self._specials["<|endoftext|>"]
        rows = [torch.tensor([head, *ids, tail]) for ids in encoded]
        ones = [torch.ones_like(row) for row in rows]
        pad = torch.nn.utils.rnn.pad_sequence
        return {
            "input_ids": pad(rows, batch_first=True, padding_value=tail),
            "attention_mask": pad(ones, batch_first=True),
        }

    def build_inputs_for_generation(
        self,
        inputs: dict[str, Tensor],
        max_gen_length: int = 512,
        targets: Sequence[str] | None = None,
    ) -> dict[str, Tensor]:
        """Build the model inputs for filling the first blank of each sequence.

        Args:
            inputs: result of `prepare`.
            max_gen_length: maximum number G of tokens to generate; with targets, G is at most the
                length of the longest target.
            targets: texts that fill the blanks, for training.

        Returns:
            dict of tensors. Without targets: input_ids (B, T+1), which end in
            ``<|startofpiece|>``, position_ids (B, 2, T+G), generation_attention_mask
            (B, 1, T+G, T+G). With targets: input_ids (B, T+G), position_ids (B, 2, T+G),
            attention_mask (B, 1, T+G, T+G) and labels (B, T+G), aligned with the logits (not
            shifted), -100 for positions without a target.

        Shape: inputs (B, T). ``position_ids[:, 0]`` is the position in the text; for generated
        tokens, it is the position of the blank. ``position_ids[:, 1]`` is 0 in the text, and counts
        generated tokens from 1.

        Raises:
            ConfigError: a sequence has no blank, or the numbers of targets and sequences differ.
        """
        import torch

        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        rows, length = ids.shape
        out: dict[str, Tensor] = {}
        if targets is None:
            fill = ids.new_full((rows, 1), self._specials["<|startofpiece|>"])
        else:
            fill, labels = self._fill(ids, targets, max_gen_length)
            max_gen_length = fill.shape[1]
            out["labels"] = torch.cat((torch.full_like(ids, IGNORE_INDEX), labels), 1)
        out["input_ids"] = torch.cat((ids, fill), 1)
        out["position_ids"] = self._positions(ids, max_gen_length)
        total = length + max_gen_length
        seen = mask[:, None, None, :].expand(rows, 1, total, length)
        causal = torch.cat(
            (
                mask.new_zeros((length, max_gen_length)),
                mask.new_ones((max_gen_length, max_gen_length)).tril(),
            )
        )
        name = "generation_attention_mask" if targets is None else "attention_mask"
        out[name] = torch.cat((seen, causal.expand(rows, 1, -1, -1)), 3)
        return out

    def _fill(
        self, ids: Tensor, targets: Sequence[str], max_gen_length: int
    ) -> tuple[Tensor, Tensor]:
        """Return the input ids from ``<|startofpiece|>`` on, (B, G), and their labels (B, G)."""
        if isinstance(targets, str) or len(targets) != len(ids):
            raise ConfigError(
                f"targets={targets!r:.60} must be a list with one string for each of the "
                f"{len(ids)} inputs."
            )
        start, end = self._specials["<|startofpiece|>"], self._specials["<|endofpiece|>"]
        pad = self._specials["<|endoftext|>"]
        rows = [[*self.encode(text), end][:max_gen_length] for text in targets]
        longest = max(map(len, rows))
        fill = [([start, *row] + [pad] * (longest - len(row)))[:longest] for row in rows]
        labels = [row + [IGNORE_INDEX] * (longest - len(row)) for row in rows]
        return ids.new_tensor(fill), ids.new_tensor(labels)

    def _positions(self, ids: Tensor, max_gen_length: int) -> Tensor:
        """Return position_ids (B, 2, T+G); see `build_inputs_for_generation`."""
        import torch

        rows, length = ids.shape
        is_blank = torch.isin(ids, ids.new_tensor(self.mask_ids))
        bare = (~is_blank.any(1)).nonzero()
        if len(bare):
            raise ConfigError(
                f"input {int(bare[0])} has no blank to fill. Add one of {list(_BLANKS)} to the "
                "text, or raise max_length if the text was truncated."
            )
        blank = is_blank.int().argmax(1, keepdim=True)
        text = torch.arange(length, device=ids.device).expand(rows, length)
        inside = torch.arange(1, max_gen_length + 1, device=ids.device).expand(rows, -1)
        position = torch.cat((text, blank.expand(rows, max_gen_length)), 1)
        block = torch.cat((torch.zeros_like(text), inside), 1)
        return torch.stack((position, block), 1).to(ids.dtype)


def _added_tokens(folder: Path, config: dict[str, Any]) -> tuple[dict[str, int], list[str]]:
    """Return a dict from special token to id, and tokens before which whitespace is stripped."""
    decoder = config.get("added_tokens_decoder") or {}
    if decoder:
        added = {entry["content"]: int(id) for id, entry in decoder.items()}
        return added, [e["content"] for e in decoder.values() if e.get("lstrip")]
    path = folder / ADDED_FILE
    if not path.exists():
        raise DataError(
            f"{str(folder)!r} has neither {ADDED_FILE} nor added_tokens_decoder in "
            f"{CONFIG_FILE}, which define GLM's special tokens and their ids. Copy {ADDED_FILE} "
            "from the original model."
        )
    return {str(token): int(id) for token, id in read_json(path).items()}, list(_BLANKS)
