"""Computes the losses of transformers models, with one convention for all architectures.

transformers' own losses differ: some old decoders do not shift labels, fifteen model types ignore
`num_items_in_batch`, and most compute all logits in fp32 at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bmforge.batch import IGNORE_INDEX
from bmforge.device import accumulation_dtype
from bmforge.errors import ConfigError
from bmforge.models.heads import classification_loss, span_loss
from bmforge.models.transformers.calls import (
    ReplacedChild,
    call_arguments,
    hidden_of,
    with_hidden,
)
from bmforge.models.transformers.probe import Behavior
from bmforge.models.transformers.structure import Structure
from bmforge.nn import HeadInput, Measure, linear_cross_entropy
from bmforge.nn.part import adapters_of

__all__ = ["LanguageLoss", "head_loss", "is_seq2seq"]

_TARGET_HEADS = ("sequence_to_sequence", "speech_to_text", "image_text_to_text")
# Encoder-decoders whose forward does not derive the decoder's input from labels. The forward of the
# others also derives masks, which is why it is left to them.
_UNSHIFTED = frozenset({"fsmt"})
# Number of logits per chunk if the model computes them: 32 Mi fp32 numbers are 128 MiB.
_LOGITS_AT_ONCE = 1 << 25


@dataclass(frozen=True)
class LanguageLoss:
    """Next-token loss of a causal language model.

    Args:
        foreign: transformers model.
        structure: names of the model's main modules.
        behavior: behavior observed by `probe`, such as how logits are computed from hidden states.
    """

    foreign: Any
    structure: Structure
    behavior: Behavior

    def __call__(
        self, arguments: dict[str, Any], labels: Tensor, num_items: float | Tensor | Measure | None
    ) -> Tensor:
        """Return the summed cross-entropy divided by `num_items`.

        If `num_items` is a function (`nn.Measure`), return the K scores that it computes for every
        token, such as log-probabilities, instead of the loss.

        Shape:
            labels: (B, T), not shifted; returns a scalar, or scores (K, B * T)
        """
        targets = F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)
        if callable(num_items):
            return self._measure(arguments, targets, num_items)
        own_items = (targets != IGNORE_INDEX).sum()
        num_items = own_items.clamp(min=1) if num_items is None else num_items
        if self._balances() or self.behavior.head == "whole":
            return self._whole(arguments, targets, num_items, own_items)
        body = self.foreign.get_submodule(self.structure.body)
        out = body(**call_arguments(body, arguments, cached=False))
        hidden = hidden_of(out)[:, -targets.shape[1] :]  # GIT has those of image patches before
        if self.behavior.head == "linear" and self._is_plain_head():
            return self._linear(hidden, targets, num_items)
        return self._by_chunks(with_hidden(out, hidden), arguments, targets, num_items)

    def _balances(self) -> bool:
        """Return True if the model adds a load-balancing loss for its experts."""
        config = self.foreign.config.get_text_config(decoder=True)
        return bool(getattr(config, "output_router_logits", False))

    def _is_plain_head(self) -> bool:
        """Return True if the output layer's weight can be used without calling the layer."""
        head: Any = self.foreign.get_submodule(self.structure.head)
        is_whole = type(_local(head.weight)) in (nn.Parameter, Tensor)
        return type(head) is nn.Linear and is_whole and not list(adapters_of(head))

    def _measure(self, inputs: dict[str, Any], targets: Tensor, measure: Measure) -> Tensor:
        """Return the per-token scores of `measure`, without a load-balancing loss.

        Raises:
            ConfigError: the head is not an unmodified linear layer.
        """
        if self.behavior.head != "linear" or not self._is_plain_head():
            raise ConfigError(
                f"{type(self.foreign).__name__} does not compute its logits with a single "
                "unmodified linear layer, so the transformers backend cannot compute "
                "log-probabilities of tokens. Remove adapters from the LM head, or use a model "
                "that bmforge implements (backend='native')."
            )
        body = self.foreign.get_submodule(self.structure.body)
        hidden = hidden_of(body(**call_arguments(body, inputs, cached=False)))
        return measure(HeadInput(*self._head_inputs(hidden)), targets.flatten(), 1.0, None)

    def _linear(self, hidden: Tensor, targets: Tensor, num_items: float | Tensor) -> Tensor:
        flat, weight, bias = self._head_inputs(hidden)
        return linear_cross_entropy(flat, weight, targets.flatten(), bias, num_items)

    def _head_inputs(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the hidden states as (B * T, D), and the weight and bias of the linear head."""
        head: Any = self.foreign.get_submodule(self.structure.head)
        factor = self.behavior.factor
        flat, bias = hidden.flatten(0, 1), None if head.bias is None else _local(head.bias)
        if factor != 1.0:
            flat, bias = flat * factor, None if bias is None else bias * factor
        return flat, _local(head.weight), bias

    def _by_chunks(
        self, out: Any, arguments: dict[str, Any], targets: Tensor, num_items: float | Tensor
    ) -> Tensor:
        """Compute the loss in chunks of positions; backward recomputes a chunk's logits."""
        hidden = hidden_of(out)
        size = max(1, _LOGITS_AT_ONCE // (hidden.shape[0] * self._vocabulary()))
        total: Any = 0.0
        for start in range(0, hidden.shape[1], size):
            part = hidden[:, start : start + size]
            goal = targets[:, start : start + size]
            total = total + checkpoint(self._chunk, out, arguments, part, goal, use_reentrant=False)
        return total / num_items

    def _vocabulary(self) -> int:
        return int(
            getattr(self.foreign.config.get_text_config(decoder=True), "vocab_size", 1 << 17)
        )

    def _chunk(self, out: Any, arguments: dict[str, Any], hidden: Tensor, goal: Tensor) -> Tensor:
        if self.behavior.head == "linear":  # OPT's code calls children of the body, not the body
            head = self.foreign.get_submodule(self.structure.head)
            return sum_cross_entropy(head(hidden) * self.behavior.factor, goal)
        ids = {"input_ids": goal.clamp(min=0)} if arguments.get("input_ids") is not None else {}
        with ReplacedChild(self.foreign, self.structure.body, with_hidden(out, hidden)):
            predicted = self.foreign(**call_arguments(self.foreign, ids, cached=False))
        return sum_cross_entropy(predicted.logits, goal)

    def _whole(
        self, arguments: dict[str, Any], targets: Tensor, num_items: float | Tensor, own: Tensor
    ) -> Tensor:
        """Compute the loss from all logits at once, including the weighted load-balancing loss.

        `own` is the number of labels in this micro-batch.
        """
        out = self.foreign(**call_arguments(self.foreign, arguments, cached=False))
        logits = out.logits[:, -targets.shape[1] :]  # GIT has those of image patches before them
        loss = sum_cross_entropy(logits, targets) / num_items
        aux = getattr(out, "aux_loss", None)
        if aux is None:
            return loss
        config = self.foreign.config.get_text_config(decoder=True)
        weight = getattr(config, "router_aux_loss_coef", 0.0)
        return loss + weight * aux * (own / num_items)


def _local(parameter: Any) -> Any:
    """Return the local tensor of a replicated DTensor; return other parameters unchanged."""
    placements = getattr(parameter, "placements", None)
    is_replicated = placements is not None and all(p.is_replicate() for p in placements)
    return parameter.to_local() if is_replicated else parameter


def sum_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the summed cross-entropy in fp32 or wider; targets of -100 are ignored."""
    wide = logits.to(accumulation_dtype(logits.dtype)).flatten(0, -2)
    return F.cross_entropy(wide, targets.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")


def is_seq2seq(foreign: Any) -> bool:
    """Return True for an encoder-decoder of transformers."""
    return bool(getattr(foreign.config, "is_encoder_decoder", False))


def head_loss(
    foreign: Any,
    config: Any,
    arguments: dict[str, Any],
    labels: Tensor | None,
    num_items: float | Tensor | None,
) -> Tensor:
    """Return the loss of a model that does not predict the next token of its input.

    Args:
        foreign: transformers model.
        config: `TransformersConfig` of the model.
        arguments: arguments of the call, without labels.
        labels: labels in transformers' format.
        num_items: divisor of the summed loss; if None, the loss is the mean.

    Raises:
        ConfigError: labels are missing, or the head has no loss.
    """
    if config.head == "question_answering":
        starts, ends = arguments.pop("start_positions"), arguments.pop("end_positions")
        out = foreign(**call_arguments(foreign, arguments, cached=False))
        return span_loss(
            torch.stack((out.start_logits, out.end_logits), -1), starts, ends, num_items
        )
    if labels is None:
        raise ConfigError(f"head={config.head!r} needs labels to compute a loss. Pass labels.")
    if config.head == "ctc":
        out = foreign(**call_arguments(foreign, {**arguments, "labels": labels}, cached=False))
        return out.loss if num_items is None else out.loss * (labels.shape[0] / num_items)
    if config.head in _TARGET_HEADS and is_seq2seq(foreign):
        arguments = {**arguments, "labels": labels}  # shifted, they are the decoder's input
        needs_ids = foreign.config.model_type in _UNSHIFTED
        if needs_ids and arguments.get("decoder_input_ids") is None:
            # The function changes its argument.
            shifted = foreign.prepare_decoder_input_ids_from_labels(labels.clone())
            arguments["decoder_input_ids"] = shifted
    out = foreign(**call_arguments(foreign, arguments, cached=False))
    if getattr(out, "logits", None) is None:
        raise ConfigError(
            f"head={config.head!r} has no loss in the transformers backend. Use another head."
        )
    if config.head in ("sequence_classification", "token_classification", "image_classification"):
        return classification_loss(out.logits, labels, config.problem_type, num_items)
    count = (labels != IGNORE_INDEX).sum().clamp(min=1) if num_items is None else num_items
    return sum_cross_entropy(out.logits, labels) / count
