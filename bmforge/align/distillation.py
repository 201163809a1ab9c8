"""On-policy distillation: the teacher's distributions are the targets on the student's answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from bmforge.align.rollout_batches import INPUT_NAMES, mask_answers
from bmforge.batch import IGNORE_INDEX, Batch
from bmforge.errors import ConfigError
from bmforge.nn import HeadInput
from bmforge.nn.jensen_shannon import generalized_jsd, linear_jsd
from bmforge.nn.shard_hooks import VocabCut
from bmforge.nn.subset_logprobs import linear_subset_logprobs, linear_top_k
from bmforge.nn.top_k_distillation import TopKPredictions
from bmforge.parallel import reshard_
from bmforge.surgery import eval_mode
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

    With `top_k`, the outcomes are the teacher's k most likely tokens at each position, and all
    other tokens together. This divergence is at most that of the whole vocabulary, and equal to it
    if k is the size of the vocabulary. The teacher scores a step's micro-batches before the step,
    so it works on every layout, if student and teacher have the same layout.

    Args:
        teacher: causal language model, which is not trained.
        beta: 0 is the forward KL, 1 the reverse KL; see `generalized_jsd`.
        temperature: divisor of both models' logits.
        rollout_metrics: names of the rollout's metrics, and a function that returns their current
            values.
        top_k: number of the teacher's tokens per position; 0 means the whole vocabulary.

    Source: the outcomes are those of "Tail-aware top-k on-policy distillation" (arXiv 2608.14728)
    and of `loss_add_tail` in TRL's `ServerDistillationTrainer`.
    """

    def __init__(
        self,
        teacher: Any,
        beta: float,
        temperature: float,
        rollout_metrics: Any = ((), dict),
        top_k: int = 0,
    ) -> None:
        self.teacher, self._beta, self._temperature = teacher, beta, temperature
        self._top_k = top_k
        names, self._rollout_metrics = rollout_metrics
        self.metrics: dict[str, MetricKind] = dict.fromkeys((*names, "kl"), "mean")

    def prepare(self, model: Any, micro_batches: Sequence[Batch]) -> Sequence[Batch]:
        """Add the teacher's top-k predictions for this rank's tokens to the micro-batches."""
        if not self._top_k:
            return micro_batches
        prepared = [{**batch, **self._predict(batch)} for batch in micro_batches]
        reshard_(self.teacher)  # without a backward pass, gathered weights are not freed
        return prepared

    def _predict(self, batch: Batch) -> dict[str, Tensor]:
        """Return the teacher's predictions; a pipeline stage without its head has none."""

        def predict(head: HeadInput, vocab: VocabCut | None) -> TopKPredictions:
            return linear_top_k(head, self._top_k, temperature=self._temperature, vocab=vocab)

        results = self._run_teacher(batch, predict)
        return dict(zip(_PREDICTIONS, results[0], strict=True)) if results else {}

    def _run_teacher(
        self, batch: Batch, read: Callable[[HeadInput, VocabCut | None], Any]
    ) -> list[Any]:
        """Run the teacher; return `read`'s result for the scored tokens, if its head is here."""
        results: list[Any] = []

        def measure(head: HeadInput, targets: Tensor, num_items: Any, vocab: Any) -> Tensor:
            results.append(read(head.select(targets != IGNORE_INDEX), vocab))
            return targets.new_zeros((1, len(targets)), dtype=torch.float32)

        with torch.no_grad(), eval_mode(self.teacher):
            inputs, labels = _inputs_of(batch), batch["labels"]
            self.teacher(**inputs, labels=labels, num_items_in_batch=measure)
        return results

    def __call__(self, model: Any, batch: Batch, num_items: float) -> LossAndMetrics | None:
        """Return the divergence summed over tokens and divided by `num_items`."""
        heads = [] if self._top_k else self._run_teacher(batch, lambda head, vocab: head)

        def measure(head: HeadInput, targets: Tensor, num_items: Any, vocab: Any) -> Tensor:
            is_scored = targets != IGNORE_INDEX
            student = head.select(is_scored)
            if self._top_k:
                teacher = TopKPredictions(*(batch[name] for name in _PREDICTIONS))
                scores = self._compare_top_k(student, teacher, vocab)
            elif vocab is not None:
                raise ConfigError(
                    "on-policy distillation over the whole vocabulary does not support layout.tp "
                    "above 1. Set distill_top_k, or layout.tp=1."
                )
            else:
                scores = linear_jsd(student, heads[0], self._beta, self._temperature)
            every = scores.new_zeros(2, len(targets))
            every[:, is_scored] = scores
            return every

        labels = batch["labels"]
        scores = model(**_inputs_of(batch), labels=labels, num_items_in_batch=measure).loss
        if scores is None:  # a pipeline stage before the last
            return None
        metrics = {"kl": (scores[1].detach().sum(), mask_answers(labels).sum())}
        metrics |= {name: (value, 1.0) for name, value in self._rollout_metrics().items()}
        return LossAndMetrics(scores[0].sum() / num_items, metrics)

    def _compare_top_k(
        self, student: HeadInput, teacher: TopKPredictions, vocab: VocabCut | None
    ) -> Tensor:
        """Return the divergence and the reverse KL divergence over the k + 1 outcomes, (2, M)."""
        own = linear_subset_logprobs(
            student, teacher.ids, temperature=self._temperature, vocab=vocab
        )
        targets = torch.cat((teacher.log_probs, teacher.rest[:, None]), 1).to(own.dtype)
        reverse = generalized_jsd(own, targets, 1.0).detach()
        return torch.stack((generalized_jsd(own, targets, self._beta), reverse))


# Tensors of a micro-batch with the fields of `TopKPredictions`, for the scored tokens in order.
_PREDICTIONS = ("teacher_ids", "teacher_logprobs", "teacher_rest")
_INPUTS = (*INPUT_NAMES, "position_ids", "document_ids")


def _inputs_of(batch: Batch) -> Batch:
    """Return the arguments of the models, including those of packed rows."""
    return {name: batch[name] for name in _INPUTS if name in batch}
