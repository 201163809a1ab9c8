"""Requests to encoders: embeddings, mask filling and classification."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from bmforge.errors import ConfigError, ShapeError
from bmforge.nn.prompt import count_ids, with_prompt
from bmforge.surgery import eval_mode
from bmforge.tokenizers.segments import encode_segments

__all__ = [
    "Filled",
    "Pooling",
    "check_pooling",
    "classify",
    "embed",
    "encode_text",
    "fill_mask",
    "name_inputs",
    "pool",
    "read_rows",
    "read_states",
]

Pooling: TypeAlias = Literal["mean", "first"]

# Texts with their tokenizer, token ids of rows, or a tensor of (B, T) ids or (B, C, H, W) pixels.
Inputs: TypeAlias = Sequence[tuple[str, Any] | list[int]] | Tensor


class Filled(NamedTuple):
    """Candidate token for a mask token.

    Attributes:
        token: decoded text, including spaces.
        probability: probability between 0 and 1.
    """

    token: str
    probability: float


@torch.no_grad()
def embed(
    model: Any,
    inputs: Inputs,
    *,
    pooling: Pooling = "mean",
    normalize: bool = True,
    max_rows: int = 1,
) -> Tensor:
    """Return one embedding per input, pooled from the last hidden states.

    Encoder-decoders use the encoder's states. Inputs of equal length are batched, so that no
    padding is needed.

    Args:
        model: any model.
        inputs: texts, token ids or pixels.
        max_rows: maximum batch size.
        pooling: "mean": mean of the tokens' states; "first": state of the first token.
        normalize: scale embeddings to length 1.

    Shape:
        returns (B, D) in fp32

    Raises:
        ConfigError: the pooling is unknown.
    """
    check_pooling(pooling)

    def read(rows: dict[str, Tensor]) -> Tensor:
        return pool(read_states(model, rows), pooling)

    out = _read_together(model, inputs, max_rows, read)
    return F.normalize(out, dim=-1) if normalize else out


def check_pooling(pooling: str) -> None:
    """Raise `ConfigError` if the pooling is unknown."""
    if pooling not in ("mean", "first"):
        raise ConfigError(f"unknown pooling: pooling={pooling!r} (supported: mean, first).")


def pool(states: Tensor, pooling: Pooling) -> Tensor:
    """Pool the hidden states of each sequence, in fp32: (B, T, D) -> (B, D)."""
    states = states.float()
    return states.mean(1) if pooling == "mean" else states[:, 0]


def read_states(model: Any, rows: dict[str, Tensor]) -> Tensor:
    """Return the last hidden states of a batch, (B, T, D), without those of the soft prompt."""
    rows, added = _prepend_prompt(model, rows)
    if model.traits.is_encoder_decoder:
        return model.encode(**rows).last_hidden_state[:, added:]
    more = {"logits_to_keep": 1} if model.traits.can_generate else {}
    return model(**rows, **more).last_hidden_state[:, added:]


def _prepend_prompt(model: Any, rows: dict[str, Tensor]) -> tuple[dict[str, Tensor], int]:
    """Prepend the model's soft prompt to a batch; return the new batch and the prompt's length."""
    if "input_ids" not in rows:
        return rows, 0
    ids, _, added = with_prompt(model.whole().embed, rows["input_ids"])
    return {**rows, "input_ids": ids}, added


def _read_together(
    model: Any, inputs: Inputs, max_rows: int, read: Callable[[dict[str, Tensor]], Tensor]
) -> Tensor:
    """Apply `read` to batches of inputs of equal shape; return the results in input order."""
    rows = read_rows(model, inputs)
    groups: dict[tuple[int, ...], list[int]] = {}
    for number, row in enumerate(rows):
        groups.setdefault(next(iter(row.values())).shape, []).append(number)
    results: dict[int, Tensor] = {}
    with eval_mode(model):
        for numbers in groups.values():
            for start in range(0, len(numbers), max_rows):
                some = numbers[start : start + max_rows]
                joined = {n: torch.cat([rows[i][n] for i in some]) for n in rows[some[0]]}
                results.update(zip(some, read(joined), strict=True))
    return torch.stack([results[number] for number in range(len(rows))])


@torch.no_grad()
def classify(model: Any, inputs: Inputs, *, max_rows: int = 1) -> Tensor:
    """Return class probabilities, per input or (for token classification) per token.

    Probabilities of exclusive classes sum to 1; multi-label probabilities are independent.

    Args:
        model: model with a classification head.
        inputs: texts, token ids or pixels.
        max_rows: maximum batch size.

    Shape:
        returns (B, L) or (B, T, L) in fp32 for L classes

    Raises:
        ConfigError: the model has no classification head.
    """
    if "classif" not in model.config.head:
        raise ConfigError(
            f"a {type(model).__name__} with the head {model.config.head!r} does not predict "
            "classes. Load it with head='sequence_classification'."
        )

    def read(rows: dict[str, Tensor]) -> Tensor:
        rows, added = _prepend_prompt(model, rows)
        logits = model(**rows).logits
        return logits[:, added:] if logits.dim() == 3 else logits

    logits = _read_together(model, inputs, max_rows, read).float()
    several = model.config.problem_type == "multi_label_classification"
    return logits.sigmoid() if several else logits.softmax(-1)


@torch.no_grad()
def fill_mask(
    model: Any, tokenizer: Any, texts: str | Sequence[str], *, top: int = 5
) -> list[list[list[Filled]]] | list[list[Filled]]:
    """Return the most likely tokens for every mask token of every text, best first.

    Args:
        model: model with a masked-LM head.
        tokenizer: the model's tokenizer; must have a mask token.
        texts: one text, or several.
        top: number of tokens per mask.

    Raises:
        ConfigError: the model has a different head, or a text has no mask token.
    """
    if model.config.head != "masked_lm" or tokenizer.mask_id is None:
        raise ConfigError(
            f"a {type(model).__name__} with the head {model.config.head!r} and a tokenizer with "
            f"mask token {tokenizer.mask_id} cannot fill masks. Load it with head='masked_lm', "
            "and use a tokenizer that has a mask token."
        )
    predictions = []
    with eval_mode(model):
        for text in [texts] if isinstance(texts, str) else texts:
            (row,) = read_rows(model, [(text, tokenizer)])
            row, _ = _prepend_prompt(model, row)
            places = row["input_ids"][0] == tokenizer.mask_id
            if not bool(places.any()):
                raise ConfigError(
                    f"{text[:60]!r} has no mask token. Add the mask token where the model is to "
                    "predict a token."
                )
            scores = model(**row).logits[0, places].float().softmax(-1)
            best = scores.topk(min(top, scores.shape[-1]), -1)
            predictions.append(
                [
                    [Filled(tokenizer.decode_written([i]), p) for p, i in zip(*pair, strict=True)]
                    for pair in zip(best.values.tolist(), best.indices.tolist(), strict=True)
                ]
            )
    return predictions[0] if isinstance(texts, str) else predictions


def read_rows(model: Any, inputs: Inputs) -> list[dict[str, Tensor]]:
    """Return a list with the model's keyword arguments for every input.

    Raises:
        ConfigError: an input is empty or longer than the model's maximum.
        ShapeError: ids are outside of the vocabulary.
    """
    if isinstance(inputs, Tensor):
        name = "pixel_values" if model.traits.has_images else "input_ids"
        rows = [{name: row[None]} for row in inputs]
    else:
        device = next(model.parameters()).device
        spelled = [
            entry if isinstance(entry, list) else encode_text(model, *entry) for entry in inputs
        ]
        rows = [{"input_ids": torch.tensor([ids], device=device)} for ids in spelled]
    for row in rows:
        if "input_ids" in row:
            _check_ids(model, row["input_ids"])
    return rows


def _check_ids(model: Any, ids: Tensor) -> None:
    """Raise an error if ids are outside of the vocabulary, or if there are none or too many."""
    limit, size = model.position_limit, count_ids(model.whole().embed)
    if not ids.numel() or (limit is not None and ids.shape[-1] > limit):
        raise ConfigError(
            f"a text has {ids.numel()} tokens (allowed: "
            f"{'at least 1' if limit is None else f'1 to {limit}'}). Truncate longer texts, and "
            "remove empty ones."
        )
    if ids.is_floating_point() or int(ids.min()) < 0 or int(ids.max()) >= size:
        raise ShapeError(
            f"token ids are out of range: {ids.min()} to {ids.max()} (vocab_size={size}). Use "
            "the model's own tokenizer."
        )


def encode_text(model: Any, text: str, tokenizer: Any) -> list[int]:
    """Tokenize a text with the special tokens that the model family expects."""
    if model.traits.attention == "bidirectional":
        longest = len(text) + 8
        return encode_segments([text], tokenizer, longest, model.traits.marks_between)[0]
    end = tokenizer.eos_id if model.traits.is_encoder_decoder else None
    return [*tokenizer.encode(text), *([] if end is None else [end])]


def name_inputs(inputs: Any, open_tokenizer: Callable[[], Any], device: torch.device) -> Inputs:
    """Convert inputs to a tensor, to texts with their tokenizer, or to lists of token ids.

    Args:
        inputs: a string, strings, lists of token ids, or a tensor.
        open_tokenizer: function that returns the model's tokenizer; called only for texts.
        device: compute device.

    Raises:
        ConfigError: there are no inputs, or an input is empty.
    """
    if isinstance(inputs, Tensor):
        return inputs.to(device)
    items = [inputs] if isinstance(inputs, str) else list(inputs)
    if not items or not all(item.strip() if isinstance(item, str) else len(item) for item in items):
        raise ConfigError(
            "the list of texts is empty or contains an empty string. Pass at least one non-empty "
            "string."
        )
    return [(item, open_tokenizer()) if isinstance(item, str) else list(item) for item in items]
