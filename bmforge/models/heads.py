"""Task heads of all families: descriptions, losses, and selection of hidden states.

`ModelConfig.head` names the head; the family's table `heads` maps it to its names in transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from bmforge.batch import IGNORE_INDEX
from bmforge.device import accumulation_dtype
from bmforge.errors import ConfigError, ShapeError
from bmforge.models.output import ModelOutput

__all__ = [
    "Head",
    "check_head",
    "check_labels",
    "check_logits_at",
    "classification_loss",
    "classifier_heads",
    "find_last_token",
    "finish_classes",
    "finish_spans",
    "pick_states",
    "span_loss",
]


@dataclass(frozen=True)
class Head:
    """Description of a task head of a model family, with transformers' names.

    Args:
        architecture: name of the transformers class, as in config.json.
        names: mapping from bmforge's name of each parameter of the head to its name in checkpoints.
        prefix: prefix of the body's parameter names; if None, the family's default.
        aliases: names of other classes whose checkpoints this head can load.
        optional: parameters that are initialized if a checkpoint lacks them.
    """

    architecture: str
    names: Mapping[str, str] = field(default_factory=dict)
    prefix: str | None = None
    aliases: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()


def classifier_heads(
    stem: str, sequence: str, token: str, question: str, *, sequence_bias: bool = True
) -> dict[str, Head]:
    """Return a dict of heads for sequence and token classification, and question answering.

    Args:
        stem: prefix of the class names, such as ``"Llama"``.
        sequence: module name of the sequence classifier in checkpoints; "" to omit this head.
        token: module name of the token classifier in checkpoints; "" to omit this head.
        question: module name of the question answering head in checkpoints; "" to omit this head.
        sequence_bias: True if the sequence classifier has a bias.
    """

    def linear(module: str, bias: bool = True) -> dict[str, str]:
        kinds = ("weight", "bias") if bias else ("weight",)
        return {f"classifier.{kind}": f"{module}.{kind}" for kind in kinds}

    heads = {
        "sequence_classification": (
            sequence,
            Head(f"{stem}ForSequenceClassification", linear(sequence, sequence_bias)),
        ),
        "token_classification": (token, Head(f"{stem}ForTokenClassification", linear(token))),
        "question_answering": (question, Head(f"{stem}ForQuestionAnswering", linear(question))),
    }
    return {name: head for name, (module, head) in heads.items() if module}


def classification_loss(
    logits: Tensor, labels: Tensor, problem_type: str = "", num_items: float | Tensor | None = None
) -> Tensor:
    """Return the loss of a classifier, as in transformers.

    Args:
        logits: logits of L classes.
        labels: class indices for single-label classification (-100 is ignored), 0 or 1 as
            floats for multi-label classification; regression targets if L = 1.
        problem_type: "regression", "single_label_classification" or
            "multi_label_classification"; "" infers it from L and the labels' dtype.
        num_items: divisor of the summed loss; if None, the loss is the mean.

    Shape:
        logits: (B, L) or (B, T, L); labels: (B,), (B, T) or (B, L)
    """
    width = logits.shape[-1]
    if not problem_type:
        several = "multi" if labels.is_floating_point() else "single"
        problem_type = "regression" if width == 1 else f"{several}_label_classification"
    wide = logits.to(accumulation_dtype(logits.dtype))
    if problem_type == "regression":
        total = F.mse_loss(wide.squeeze(-1), labels.to(wide.dtype).view_as(wide.squeeze(-1)))
        return total if num_items is None else total * labels.shape[0] / num_items
    if problem_type == "multi_label_classification":
        total = F.binary_cross_entropy_with_logits(wide, labels.to(wide.dtype))
        return total if num_items is None else total * labels.shape[0] / num_items
    flat = labels.flatten()
    total = F.cross_entropy(wide.flatten(0, -2), flat, ignore_index=IGNORE_INDEX, reduction="sum")
    return total / ((flat != IGNORE_INDEX).sum().clamp(min=1) if num_items is None else num_items)


def span_loss(
    logits: Tensor, starts: Tensor, ends: Tensor, num_items: float | Tensor | None = None
) -> Tensor:
    """Return the question-answering loss: the mean of the cross-entropies of start and end.

    Positions outside of the sequence are ignored, as in transformers.

    Shape:
        logits: (B, T, 2); starts, ends: (B,)
    """
    length = logits.shape[1]
    losses = []
    for column, position in ((0, starts), (1, ends)):
        inside = torch.where(
            position.clamp(0, length) == length, IGNORE_INDEX, position.clamp(min=0)
        )
        losses.append(classification_loss(logits[..., column], inside, "single", num_items))
    return (losses[0] + losses[1]) / 2


def finish_classes(
    out: ModelOutput,
    logits: Tensor,
    labels: Tensor | None,
    problem_type: str,
    num_items: float | Tensor | None,
) -> ModelOutput:
    """Add a classifier's logits and loss to the model output."""
    loss = None
    if labels is not None:
        loss = classification_loss(logits, labels, problem_type, num_items)
    return out._replace(logits=logits, loss=loss)


def finish_spans(
    out: ModelOutput,
    logits: Tensor,
    starts: Tensor | None,
    ends: Tensor | None,
    num_items: float | Tensor | None,
) -> ModelOutput:
    """Add the logits (B, T, 2) and the loss of question answering to the model output."""
    loss = None
    if starts is not None and ends is not None:
        loss = span_loss(logits, starts, ends, num_items)
    return out._replace(start_logits=logits[..., 0], end_logits=logits[..., 1], loss=loss)


def find_last_token(inputs: Tensor, attention_mask: Tensor | None, padding: int | None) -> Tensor:
    """Return (B,): the index of the last token of every sequence.

    With `attention_mask`, this is the last unmasked token. Without a mask, it is the last token
    other than `padding`; if `padding` is None or the inputs are embeddings, the last position.

    Shape:
        inputs: (B, T) ids or (B, T, D) embeddings
    """
    real, (rows, length) = attention_mask, inputs.shape[:2]
    if real is None and padding is not None and inputs.dim() == 2:
        real = inputs != padding
    if real is None:
        return torch.full((rows,), length - 1, device=inputs.device)
    positions = torch.arange(length, device=inputs.device)
    return (positions * (real != 0)).argmax(-1)


def check_head(family: str, head: str, heads: Mapping[str, Head]) -> None:
    """Raise `ConfigError` if a family does not have a head named `head`."""
    if head not in heads:
        raise ConfigError(f"{family} has no head {head!r} (available: {', '.join(heads)}).")


def check_labels(labels: Tensor, rows: int) -> None:
    """Raise `ShapeError` unless the batch size of the labels is `rows`."""
    if labels.shape[0] != rows:
        raise ShapeError(
            f"labels have the batch size {labels.shape[0]}, but the inputs have the batch size "
            f"{rows}. Pass one entry of labels for every sequence."
        )


_TOKEN_HEADS = ("masked_lm", "language_model", "sequence_to_sequence")


def check_logits_at(
    head: str,
    labels: Tensor | None,
    logits_at: Tensor | None,
    allowed: tuple[str, ...] = _TOKEN_HEADS,
) -> None:
    """Raise `ShapeError` if `logits_at` is used with labels or with a head without token logits.

    Args:
        head: name of the model's head.
        labels: labels passed to the model, or None.
        logits_at: positions passed to the model, or None.
        allowed: names of the heads that compute logits at every token.
    """
    if logits_at is None:
        return
    if labels is not None or head not in allowed:
        conflict = "with labels" if labels is not None else f"with the head {head!r}"
        raise ShapeError(
            f"logits_at selects positions of token logits and has no effect {conflict}. Leave "
            "logits_at out."
        )


def pick_states(x: Tensor, last: int | None, logits_at: Tensor | None) -> Tensor:
    """Select the hidden states whose logits are computed.

    Args:
        x: hidden states of all positions.
        last: number of trailing positions; None means all.
        logits_at: positions to select in each sequence; None means all.

    Shape:
        x: (B, T, D); logits_at: (B, M); returns (B, T, D), (B, last, D) or (B, M, D)

    Raises:
        ShapeError: both `last` and `logits_at` are set, or `logits_at` has a different shape.
    """
    if logits_at is None:
        return x if last is None else x[:, -last:]
    if last is not None or logits_at.dim() != 2 or logits_at.shape[0] != x.shape[0]:
        raise ShapeError(
            f"logits_at must have the shape (B={x.shape[0]}, M) and is supported only without "
            f"logits_to_keep, but has the shape {tuple(logits_at.shape)} with "
            f"logits_to_keep={last}."
        )
    return x[torch.arange(x.shape[0], device=x.device)[:, None], logits_at]
