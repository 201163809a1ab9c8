"""On-policy distillation: the teacher's distributions are the targets on the student's answers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bmforge.align.rollout_batches import INPUT_NAMES
from bmforge.batch import IGNORE_INDEX, Batch
from bmforge.errors import ConfigError
from bmforge.nn import HeadInput
from bmforge.nn.jensen_shannon import linear_jsd
from bmforge.surgery import evaluating
from bmforge.train.metric_sums import MetricKind
from bmforge.train.objective import LossAndMetrics

__all__ = ["DistillationObjective", "check_vocabularies"]


def check_vocabularies(student: Any, teacher: Any, vocabularies: tuple[Any, Any]) -> None:
    """Raise `ConfigError` if student and teacher do not have the same tokens.

    Args:
        student: config of the student.
        teacher: config of the teacher.
        vocabularies: dicts from token to id, for student and teacher.
    """
    sizes = student.vocab_size, teacher.vocab_size
    if sizes[0] != sizes[1]:
        raise ConfigError(
            f"the student has vocab_size={sizes[0]}, but the teacher has vocab_size={sizes[1]}, "
            "so their distributions cannot be compared. Use models with the same tokenizer and "
            "vocabulary size."
        )
    if vocabularies[0] != vocabularies[1]:
        counts = [len(vocabulary) for vocabulary in vocabularies]
        raise ConfigError(
            "the tokenizers of student and teacher do not map the same tokens to the same ids "
            f"(vocabularies of {counts[0]} and {counts[1]} tokens). Use models with the same "
            "tokenizer."
        )


class DistillationObjective:
    """Training objective: mean generalized Jensen-Shannon divergence over the answers' tokens.

    Args:
        teacher: causal language model, which is not trained.
        beta: 0 is the forward KL, 1 the reverse KL; see `generalized_jsd`.
        temperature: divisor of both models' logits.
        rollout_metrics: names of the rollout's metrics, and a function that returns their current
            values.
    """

    def __init__(
        self, teacher: Any, beta: float, temperature: float, rollout_metrics: Any = ((), dict)
    ) -> None:
        self._teacher, self._beta, self._temperature = teacher, beta, temperature
        names, self._rollout_metrics = rollout_metrics
        self.metrics: dict[str, MetricKind] = dict.fromkeys((*names, "kl"), "mean")

    def __call__(self, model: Any, batch: Batch, num_items: float) -> LossAndMetrics:
        """Return the divergence summed over tokens and divided by `num_items`."""
        inputs = {name: batch[name] for name in INPUT_NAMES}
        labels = batch["labels"]
        with torch.no_grad(), evaluating(self._teacher):
            teacher = _read_head(self._teacher, inputs, labels)

        def measure(head: HeadInput, targets: Tensor, num_items: Any, vocab: Any) -> Tensor:
            if vocab is not None:
                raise ConfigError(
                    "on-policy distillation does not support layout.tp above 1. Set layout.tp=1."
                )
            is_scored = targets != IGNORE_INDEX
            return linear_jsd(head.select(is_scored), teacher, self._beta, self._temperature)

        scores = model(**inputs, labels=labels, num_items_in_batch=measure).loss
        metrics = {"kl": (scores[1].detach().sum(), float(scores.shape[1]))}
        metrics |= {name: (value, 1.0) for name, value in self._rollout_metrics().items()}
        return LossAndMetrics(scores[0].sum() / num_items, metrics)


def _read_head(model: Any, inputs: Any, labels: Tensor) -> HeadInput:
    """Run a model; return the inputs of its LM head at the positions that predict a label."""
    heads: list[HeadInput] = []

    def measure(head: HeadInput, targets: Tensor, num_items: Any, vocab: Any) -> Tensor:
        heads.append(head.select(targets != IGNORE_INDEX))
        return targets.new_zeros((1, len(targets)))

    model(**inputs, labels=labels, num_items_in_batch=measure)
    return heads[0]
