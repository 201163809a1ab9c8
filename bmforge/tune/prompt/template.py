"""Templates bound to a tokenizer and a model, which encode examples as token ids."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bmforge.errors import ConfigError
from bmforge.tokenizers import Tokenizer
from bmforge.tune.prompt.language import parse_template
from bmforge.tune.prompt.pieces import Piece, Wrapped
from bmforge.tune.prompt.prompt_assembly import Encoded, Text, assemble_prompt, make_frame
from bmforge.tune.prompt.prompt_formats import (
    PROMPT_FORMATS,
    PromptFormat,
    check_marks,
    find_prompt_format,
    special_token,
)
from bmforge.tune.prompt.soft import SoftRow, number_rows, put_rows_, token_table
from bmforge.tune.prompt.truncate import Cut, cut_parts

__all__ = ["Encoded", "Template", "read_fields", "read_template"]

_BEHIND = ("refuse", "leave out", "score")


class Template:
    """A template for prompts, bound to a tokenizer and a model.

    Args:
        text: text in the template language (see `language`).
        tokenizer: the model's tokenizer.
        model: model that reads the prompts; soft tokens of the template are attached to the model
            (`nn.prompt`) and trained, even if the model is frozen. If the model is on the meta
            device, the soft tokens are too; `draw_rows_` initializes them later.
        front: number of soft tokens at the start of the prompt (for CPM models, after the first
            special tokens).
        encoder: "" to train the soft tokens' embeddings directly; "lstm" or "mlp" to train a
            P-tuning encoder.
        behind: handling of text after the mask if the model does not read it: "refuse" raises an
            error, "leave out" drops the text, and "score" scores the text after each word, for a
            verbalizer with "joint" words.
        prompt_format: name in `PROMPT_FORMATS` that overrides the format of the model's family.
        seed: random seed of new soft tokens.

    Attributes:
        shown: demonstrations (examples with answers) before every prompt.
        blanks: sentinel tokens used for the masks.

    Raises:
        TemplateError: the text is not a valid template.
        ConfigError: the model or the tokenizer does not support the template.
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
        prompt_format: str = "",
        seed: int = 0,
    ) -> None:
        if prompt_format and prompt_format not in PROMPT_FORMATS:
            raise ConfigError(
                f"unknown format: prompt_format={prompt_format!r} (supported: "
                f"{', '.join(PROMPT_FORMATS)})."
            )
        if behind not in _BEHIND:
            raise ConfigError(f"behind={behind!r} must be one of {', '.join(_BEHIND)}.")
        self.text, self.tokenizer, self.front, self.encoder = text, tokenizer, front, encoder
        self.pieces = parse_template(text)
        self.prompt_format: PromptFormat = (
            PROMPT_FORMATS[prompt_format] if prompt_format else find_prompt_format(model)
        )
        masks = sum(_is_mask(piece) for piece in self.pieces)
        self.num_masks = masks if self.prompt_format.reads_after_mask else 1
        self.behind = self._check_masks(behind)
        check_marks(self.prompt_format, tokenizer, model)
        rows, self._numbers = number_rows(self.pieces, tokenizer)
        self.rows: tuple[SoftRow, ...] = (SoftRow(),) * front + rows
        self.vocab_size = token_table(model).num_embeddings if self.rows else 0
        if self.rows:
            self._prompt = put_rows_(model, self.rows, encoder, seed)
        self._sentinel = getattr(getattr(model, "traits", None), "sentinel", "") or "<extra_id_{}>"
        config = getattr(model, "config", None)
        start = getattr(config, "decoder_start_token_id", None) or 0
        self._frame = make_frame(self.prompt_format, tokenizer, config, self.num_masks)
        self.blanks: list[int] = []
        if self.prompt_format.has_decoder:
            self.blanks = [self._sentinel_id(n) for n in range(self.num_masks)]
        skipped = int(self.prompt_format.start_is_blank)
        self._begun = [start, *self.blanks[skipped:]]
        self.shown: list[list[Wrapped]] = []

    @property
    def soft_parameters(self) -> list[Any]:
        """Trained parameters of the template's soft tokens."""
        return list(self._prompt.parameters()) if self.rows else []

    def _check_masks(self, behind: str) -> str:
        """Raise an error for unsupported masks; return the effective value of `behind`."""
        if self.prompt_format.reads_after_mask:
            return "refuse"
        first = next(n for n, piece in enumerate(self.pieces) if _is_mask(piece))
        following = self.pieces[first + 1 :]
        if following and behind == "refuse":
            raise ConfigError(
                f"the template has {following[0].kind} {following[0].value or ''!r} after its "
                f"mask, but a {self.prompt_format.kind!r} model cannot use text after the mask. "
                "Put the mask last, or pass behind='leave out' or behind='score'."
            )
        if behind == "score" and (not following or self.prompt_format.form != "row"):
            raise ConfigError(
                "behind='score' has no effect, because no text follows the mask of a causal "
                "model. Leave behind out."
            )
        if behind == "score" and any(map(_is_mask, following)):
            raise ConfigError(
                "behind='score' supports only templates with one mask. Remove the other masks, or "
                "leave behind out."
            )
        return behind

    def show(self, examples: Sequence[Any], answers: Sequence[str], between: str = "\n") -> None:
        """Prepend demonstrations (examples with their answers) to all later prompts.

        Args:
            examples: examples in any form that `wrap` accepts.
            answers: text at the mask of each example.
            between: text after each example.

        Raises:
            ConfigError: the number of answers differs from the number of examples.
        """
        if len(examples) != len(answers):
            raise ConfigError(
                f"there are {len(examples)} examples, but {len(answers)} answers. Pass one answer "
                "per example."
            )
        first = next(piece for piece in self.pieces if _is_mask(piece))
        self.shown = []
        for example, answer in zip(examples, answers, strict=True):
            answer_piece = Wrapped(" " + answer if first.spaced else answer)
            row = [
                answer_piece if shown_piece.kind == "mask" else shown_piece
                for shown_piece in self.wrap(example)
            ]
            fixed = (
                Wrapped(shown_piece.text, shown_piece.kind, shown_piece.soft) for shown_piece in row
            )  # never truncated
            self.shown.append([*fixed, Wrapped(between)])

    def wrap(self, example: Any) -> list[Wrapped]:
        """Insert an example's texts into the template; return the filled pieces.

        Args:
            example: a `TaskExample`, a mapping from field name to text (and from "meta" to a
                mapping of further entries), or an object with text_a, text_b and meta.

        Raises:
            ConfigError: the example lacks a field that the template names.
        """
        fields, meta = read_fields(example)
        return [
            piece
            for number in range(len(self.pieces))
            for piece in self._fill(number, fields, meta)
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
        text = fill_piece(piece, fields, meta)
        yield Wrapped(" " + text if piece.spaced else text, shortenable=piece.shortenable)

    def encode(
        self,
        example: Any,
        max_seq_len: int = 512,
        cut: Cut = "tail",
        name: str = "the example",
        answer: Sequence[int] = (),
    ) -> Encoded:
        """Encode the prompt for an example; the mask is never truncated.

        Args:
            example: example in any form that `wrap` accepts.
            max_seq_len: maximum length of a prompt in tokens, including soft and special tokens.
            cut: truncation of long prompts, as in `cut_parts`.
            name: name of the example, used in messages.
            answer: target tokens at the only mask; () to predict one token.

        Raises:
            ConfigError: the pieces that may not be truncated are too long, or no token precedes
                a mask.
        """
        parts: list[tuple[list[int], bool]] = [
            (self._read(piece), False) for row in self.shown for piece in row
        ]
        masks: list[int] = []  # indices of the parts that are masks
        for piece in self.wrap(example):
            if piece.kind == "mask":
                masks.append(len(parts))
                parts.append((self._mask_ids(len(masks) - 1, answer), False))
                if not self.prompt_format.reads_after_mask and (
                    self.behind != "score" or not answer
                ):
                    break
            else:
                parts.append((self._read(piece), piece.shortenable))
        around = len(self._frame) + self.front
        if self.prompt_format.form in ("behind", "document"):
            around += max(0, len(answer) - 1)
        truncated = cut_parts(parts, max_seq_len - around, cut, name)
        ids: list[int] = []
        places = []
        for number, part in enumerate(truncated):
            if number in masks:
                places.append(len(ids))
            ids += part
        front = [self.vocab_size + row for row in range(self.front)]
        text = Text(ids, places, answer)
        laid = assemble_prompt(self.prompt_format, self._frame, text, front, self._begun, name)
        num_cut = sum(len(ids) for ids, _ in parts) - sum(map(len, truncated))
        return Encoded(
            laid.input_ids, laid.mask_at, laid.decoder_input_ids, num_cut,
            laid.columns, laid.fixed, laid.predicted,
        )  # fmt: skip

    def question_of(self, answer: Sequence[int]) -> tuple[int, ...]:
        """Return a key: answers with equal keys are scored in the same prompt."""
        if self.behind == "score":
            return tuple(answer)
        return tuple(answer[:-1]) if self.prompt_format.is_autoregressive else (0,) * len(answer)

    def _read(self, piece: Wrapped) -> list[int]:
        if piece.kind == "soft":
            return [self.vocab_size + self.front + piece.soft - 1]
        if piece.kind == "special":
            return [special_token(self.tokenizer, piece.text)]
        return self.tokenizer.encode_plain([piece.text])[0] if piece.text else []

    def _mask_ids(self, number: int, answer: Sequence[int]) -> list[int]:
        form = self.prompt_format.form
        if (form == "hidden" and answer) or (form == "row" and not self.prompt_format.shows_mask):
            return list(answer)
        if not self.prompt_format.shows_mask:
            return []
        if form == "apart":
            return [self.blanks[number]]
        times = max(1, len(answer)) if form == "row" else 1
        return [special_token(self.tokenizer, "<mask>")] * times

    def sentinel(self, number: int) -> str:
        """Return the token of a mask in the input of an encoder-decoder."""
        return self._sentinel.format(number)

    def _sentinel_id(self, number: int) -> int:
        token = self.sentinel(number)
        id = self.tokenizer.token_to_id(token)
        if id is None:
            raise ConfigError(
                f"the tokenizer has no mask token {token}. Use the tokenizer of the model."
            )
        return id


def _is_mask(piece: Piece) -> bool:
    return piece.kind == "mask" or (piece.kind == "special" and piece.value == "<mask>")


def read_fields(example: Any) -> tuple[Mapping[str, str], Mapping[str, str]]:
    """Return a dict from name to text of an example, and a dict with its meta entries.

    The first two texts are also named text_a and text_b. The choices of a `TaskExample` are the
    meta entries choice1, choice2, ...
    """
    if isinstance(example, Mapping):
        fields = {k: v for k, v in example.items() if isinstance(v, str)}
        meta = example.get("meta") or {}
    elif hasattr(example, "fields"):
        choices = {f"choice{n}": text for n, text in enumerate(example.choices, 1)}
        fields, meta = dict(example.fields), {**choices, **example.fields}
    elif hasattr(example, "text_a"):
        fields = {"text_a": example.text_a, "text_b": getattr(example, "text_b", "")}
        meta = getattr(example, "meta", None) or {}
    else:
        raise ConfigError(
            f"an example must be a TaskExample or a dict, not a {type(example).__name__}."
        )
    for name, value in zip(("text_a", "text_b"), list(fields.values()), strict=False):
        fields.setdefault(name, value)
    return fields, meta


def fill_piece(piece: Piece, fields: Mapping[str, Any], meta: Mapping[str, Any]) -> str:
    """Return the text of a template piece (literal, placeholder or meta field) for an example.

    Raises:
        ConfigError: the example lacks the field.
    """
    if piece.kind == "text":
        return piece.value or ""
    places = (fields,) if piece.kind == "placeholder" else (meta, fields)
    for values in places:
        if piece.value is not None and piece.value in values:
            return _process_value(piece, values[piece.value])
    has = ", ".join(dict.fromkeys([*meta, *fields] if piece.kind == "meta" else fields))
    raise ConfigError(
        f"the template needs the {piece.kind} {piece.value!r}, but the example has only {has}. "
        "Add the entry to the example, or change the template."
    )


def _process_value(piece: Piece, value: Any) -> str:
    """Convert a field's value to text, with the piece's `post_processing`.

    Raises:
        ConfigError: the value is a list or an object, and no function converts it to text.
    """
    value = str(value) if isinstance(value, int | float) else value
    try:
        if piece.process is not None:
            return piece.process(value)
        if isinstance(value, str):
            return value
        problem = f"it is a {type(value).__name__}"
    except (TypeError, ValueError) as error:
        problem = str(error)
    raise ConfigError(
        f"the {piece.kind} {piece.value!r} cannot be inserted into the template: {problem}. Add a "
        "post_processing that returns a string."
    )


def read_template(path: str | Path, choice: int = 0) -> str:
    """Read a template from a file with one template per line; empty lines are skipped.

    Raises:
        ConfigError: the file has no template with the index `choice`.
    """
    lines = [line for line in Path(path).read_text("utf-8").splitlines() if line.strip()]
    if not 0 <= choice < len(lines):
        raise ConfigError(
            f"choice={choice} is out of range for {str(path)!r}, which has {len(lines)} templates "
            f"(allowed: 0 to {len(lines) - 1})."
        )
    return lines[choice]
