"""A template on a tokenizer and a model: examples in, pieces and token ids out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bmforge.errors import ConfigError
from bmforge.tokenizers import Tokenizer
from bmforge.tune.prompt.asking import (
    ASKINGS,
    Asking,
    find_asking,
    role_token,
    special_token,
)
from bmforge.tune.prompt.language import parse_template
from bmforge.tune.prompt.pieces import Piece, Wrapped
from bmforge.tune.prompt.soft import SoftRow, number_rows, put_rows_
from bmforge.tune.prompt.truncate import Cut, cut_parts

__all__ = ["Encoded", "Template", "read_template"]


@dataclass(frozen=True)
class Encoded:
    """A prompt as a model reads it.

    Attributes:
        input_ids: T of them; from the vocabulary's size on they are soft rows.
        mask_at: where the M answers are predicted: positions of the input or, where the answer is
            written apart, of `decoder_input_ids`.
        decoder_input_ids: what a decoder of its own has read; empty without one.
        num_cut: tokens of the example that were left out.
    """

    input_ids: list[int]
    mask_at: list[int]
    decoder_input_ids: list[int] = field(default_factory=list)
    num_cut: int = 0


class Template:
    """A template's text for a tokenizer and a model.

    Args:
        text: in the template language (see `language`).
        tokenizer: that of the model.
        model: reads the prompts; where the template has soft pieces their rows are put into it
            (`nn.prompt`). A frozen one may stay frozen: the rows are trained.
        front: rows that stand before everything else, the first token included.
        encoder: "" trains the rows themselves; "lstm" or "mlp" trains what makes them (P-tuning).
        behind: "refuse" or "leave out" text behind the mask, where the model cannot read it.
        asking: a name of `ASKINGS` instead of what the model's family says.
        seed: of fresh rows.

    Raises:
        TemplateError: the text is no template.
        ConfigError: the model or the tokenizer cannot be asked so.
    """

    def __init__(
        self,
        text: str,
        tokenizer: Tokenizer,
        model: Any,
        *,
        front: int = 0,
        encoder: str = "",
        behind: str = "refuse",
        asking: str = "",
        seed: int = 0,
    ) -> None:
        if asking and asking not in ASKINGS:
            raise ConfigError(f"asking={asking!r} is unknown. Known: {', '.join(ASKINGS)}.")
        if behind not in ("refuse", "leave out"):
            raise ConfigError(f"behind={behind!r} must be 'refuse' or 'leave out'.")
        self.text, self.tokenizer, self.front, self.encoder = text, tokenizer, front, encoder
        self.pieces = parse_template(text)
        self.asking: Asking = ASKINGS[asking] if asking else find_asking(model)
        masks = sum(piece.kind == "mask" for piece in self.pieces)
        self.num_masks = masks if self.asking.reads_behind else 1
        self._check_masks(behind)
        rows, self._numbers = number_rows(self.pieces, tokenizer)
        self.rows: tuple[SoftRow, ...] = (SoftRow(),) * front + rows
        self.vocab_size = model.embed.num_embeddings if self.rows else 0
        if self.rows:
            self._prompt = put_rows_(model, self.rows, encoder, seed)
        self._begin = role_token(tokenizer, self.asking.begins)
        self._end = role_token(tokenizer, self.asking.ends)
        self._sentinel = getattr(getattr(model, "traits", None), "sentinel", "") or "<extra_id_{}>"
        config = getattr(model, "config", None)
        self._start = getattr(config, "decoder_start_token_id", None) or 0

    @property
    def soft_parameters(self) -> list[Any]:
        """What is trained of the template."""
        return list(self._prompt.parameters()) if self.rows else []

    def _check_masks(self, behind: str) -> None:
        """Refuse what a model cannot read."""
        if self.asking.reads_behind:
            return
        first = next(n for n, piece in enumerate(self.pieces) if piece.kind == "mask")
        rest = self.pieces[first + 1 :]
        if rest and behind == "refuse":
            raise ConfigError(
                f"the template has {rest[0].kind} {rest[0].value or ''!r} behind its mask, which a "
                f"model of the kind {self.asking.kind!r} never reads: let the mask stand last, or "
                "give behind='leave out'."
            )

    def wrap(self, example: Any) -> list[Wrapped]:
        """Return the pieces with an example's texts in them.

        Args:
            example: a `TaskExample`, a mapping of texts (with "meta", a mapping of more), or
                anything with text_a, text_b and meta.

        Raises:
            ConfigError: it lacks a field that the template names.
        """
        fields, meta = read_fields(example)
        return [
            one for number in range(len(self.pieces)) for one in self._fill(number, fields, meta)
        ]

    def _fill(
        self, number: int, fields: Mapping[str, str], meta: Mapping[str, str]
    ) -> Iterator[Wrapped]:
        piece: Piece = self.pieces[number]
        if piece.kind == "soft":
            for row in self._numbers[number]:
                word = self.rows[self.front + row - 1].word
                yield Wrapped(word, "soft", row, piece.shortenable)
            return
        if piece.kind in ("mask", "special"):
            text = "<mask>" if piece.kind == "mask" or piece.value == "<mask>" else piece.value
            yield Wrapped(text or "", piece.kind if text != "<mask>" else "mask")  # type: ignore[arg-type]
            return
        text = piece.value or ""
        if piece.kind != "text":
            text = _take(piece, fields, meta)
            text = text if piece.process is None else piece.process(text)
        yield Wrapped(" " + text if piece.spaced else text, shortenable=piece.shortenable)

    def encode(
        self, example: Any, max_seq_len: int = 512, cut: Cut = "tail", name: str = "the example"
    ) -> Encoded:
        """Return the ids of an example's prompt, the mask always among them.

        Args:
            example: as for `wrap`.
            max_seq_len: longest prompt in tokens, soft rows and marks included.
            cut: see `cut_parts`.
            name: of the example, for messages.

        Raises:
            ConfigError: what may not be cut is too long, or there is nothing before a mask.
        """
        parts: list[tuple[list[int], bool]] = []
        masks: list[int] = []  # parts that are masks
        for one in self.wrap(example):
            if one.kind == "mask":
                masks.append(len(parts))
                parts.append((self._mask_ids(len(masks) - 1), False))
                if not self.asking.reads_behind:
                    break
            else:
                parts.append((self._read(one), one.shortenable))
        around = (self._begin is not None) + (self._end is not None) + self.front
        kept = cut_parts(parts, max_seq_len - around, cut, name)
        ids = [self.vocab_size + row for row in range(self.front)]
        ids += [] if self._begin is None else [self._begin]
        places = []
        for number, part in enumerate(kept):
            if number in masks:
                places.append(len(ids))
            ids += part
        num_cut = sum(len(ids) for ids, _ in parts) - sum(map(len, kept))
        if self.asking.writes_apart:
            answers = [self._start, *(self._sentinel_id(n) for n in range(len(masks)))]
            places = list(range(1, len(answers)))
        elif not self.asking.shows_mask:
            places, answers = [len(ids) - 1], []
            if not ids:
                raise ConfigError(f"{name}: nothing stands before the mask; a token is needed.")
        else:
            answers = []
        ids += [] if self._end is None else [self._end]
        return Encoded(ids, places, answers, num_cut)

    def _read(self, one: Wrapped) -> list[int]:
        if one.kind == "soft":
            return [self.vocab_size + self.front + one.soft - 1]
        if one.kind == "special":
            return [special_token(self.tokenizer, one.text)]
        return self.tokenizer.encode_plain([one.text])[0] if one.text else []

    def _mask_ids(self, number: int) -> list[int]:
        if not self.asking.shows_mask:
            return []
        if self.asking.writes_apart:
            return [self._sentinel_id(number)]
        return [special_token(self.tokenizer, "<mask>")]

    def _sentinel_id(self, number: int) -> int:
        token = self._sentinel.format(number)
        found = self.tokenizer.token_to_id(token)
        if found is None:
            raise ConfigError(f"the tokenizer has no {token}, which stands for a mask.")
        return found


def read_fields(example: Any) -> tuple[Mapping[str, str], Mapping[str, str]]:
    """Return the texts of an example by name, and its meta entries; text_a is the first text."""
    if isinstance(example, Mapping):
        fields = {k: v for k, v in example.items() if isinstance(v, str)}
        meta = example.get("meta") or {}
    elif hasattr(example, "fields"):
        fields, meta = dict(example.fields), example.fields
    elif hasattr(example, "text_a"):
        fields = {"text_a": example.text_a, "text_b": getattr(example, "text_b", "")}
        meta = getattr(example, "meta", None) or {}
    else:
        raise ConfigError(f"{type(example).__name__} is no example: give a TaskExample or a dict.")
    for name, value in zip(("text_a", "text_b"), list(fields.values()), strict=False):
        fields.setdefault(name, value)
    return fields, meta


def _take(piece: Piece, fields: Mapping[str, str], meta: Mapping[str, str]) -> str:
    places = (fields,) if piece.kind == "placeholder" else (meta, fields)
    for place in places:
        if piece.value is not None and piece.value in place:
            return str(place[piece.value])
    has = ", ".join(dict.fromkeys([*meta, *fields] if piece.kind == "meta" else fields))
    raise ConfigError(
        f"the template asks for the {piece.kind} {piece.value!r}, and the example has: {has}."
    )


def read_template(path: str | Path, choice: int = 0) -> str:
    """Return a template's text from a file with one a line; empty lines are none.

    Raises:
        ConfigError: there is no such line.
    """
    lines = [line for line in Path(path).read_text("utf-8").splitlines() if line.strip()]
    if not 0 <= choice < len(lines):
        raise ConfigError(
            f"{str(path)!r} has {len(lines)} templates; choice={choice} must be below that."
        )
    return lines[choice]
