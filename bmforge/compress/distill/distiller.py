"""Adds distillation losses to a training objective; start reading at `Distiller.objective`.

The teacher runs when the student's forward pass reaches its head, so that in a pipeline only the
last stage runs the teacher. The recorded tensors of student and teacher are compared after the
student's forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bmforge.batch import Batch
from bmforge.compress.distill.answers import TeacherAnswers
from bmforge.compress.distill.capture import (
    Prediction,
    Recorder,
    cross_entropy_of,
    find_attention,
    take_prediction,
)
from bmforge.compress.distill.check import (
    check_answers,
    check_students_layout,
    check_teacher,
    relation_heads,
)
from bmforge.compress.distill.config import DistillConfig, DistillLoss
from bmforge.compress.distill.losses import (
    compare_attention,
    compare_relations,
    compare_states,
    compare_values,
)
from bmforge.compress.distill.maps import find_pairs
from bmforge.compress.distill.outputs import compare_outputs
from bmforge.compress.distill.tokens import spread_items
from bmforge.device import accumulation_dtype
from bmforge.nn import HeadInput, LMHead, linear_distillation
from bmforge.nn.part import tensor_notes
from bmforge.nn.random_init import init_from_note_
from bmforge.nn.shard_hooks import VocabCut
from bmforge.nn.top_k_distillation import linear_answers
from bmforge.surgery import freeze_

__all__ = ["Distiller"]

Objective = Callable[[nn.Module, Batch, float], Any]


class Distiller:
    """Trains a student on a teacher's outputs, in a Trainer or in a custom loop.

    Args:
        student: any model, not parallelized yet; hooks and projections are added to it.
        teacher: any model with the same vocabulary or classes; it is frozen. It must be
            parallelized like the student or complete on every process, and may be streamed or
            quantized to save memory. For logit losses, saved answers (`write_answers`) are
            accepted.
        config: distillation settings.

    Attributes:
        step: number of completed optimizer steps, used by the weight schedules.
        parts: dict from the kind of a loss to its last unweighted value on this process.
        task: last value of the task's loss on this process.

    Raises:
        ConfigError: teacher and student have different vocabularies, heads or depths, or modules
            are missing.
    """

    name = "distill"

    def __init__(
        self,
        student: nn.Module,
        teacher: nn.Module | TeacherAnswers,
        config: DistillConfig | None = None,
    ) -> None:
        self.config, self.student = config or DistillConfig(), student
        self.answers: TeacherAnswers | None = None
        if isinstance(teacher, TeacherAnswers):
            check_answers(student, teacher, self.config)
            self.answers, teacher = teacher, nn.Identity()  # no teacher runs
        else:
            check_teacher(student, teacher, self.config)
            freeze_(teacher)
        self.teacher = teacher
        self.step, self.parts = 0, dict[str, Tensor]()
        self.task: Tensor | None = None
        self._pairs = {
            loss: find_pairs(student, teacher, loss)
            for loss in self.config.losses
            if loss.kind != "logits"
        }
        self._logits = next((entry for entry in self.config.losses if entry.kind == "logits"), None)
        self._heads = _find_head(student), _find_head(teacher)
        self._mine, self._theirs = Recorder(student), Recorder(teacher)
        self._ask: Callable[[], None] | None = None
        self._taught: Tensor | None = None
        self._watch_()
        self.init_()

    def _watch_(self) -> None:
        """Install recording hooks in student and teacher."""
        for loss, pairs in self._pairs.items():
            for student_name, teacher_name in pairs:
                if loss.kind == "hidden":
                    width, teacher_width = (_width(model) for model in (self.student, self.teacher))
                    if width and teacher_width and width != teacher_width:
                        self._mine.watch_projected_(
                            self.student, student_name, width, teacher_width
                        )
                    else:
                        self._mine.watch_state_(self.student, student_name)
                    self._theirs.watch_state_(self.teacher, teacher_name)
                else:
                    self._mine.watch_attention_(self.student, student_name)
                    self._theirs.watch_attention_(self.teacher, teacher_name)
        head, other = self._heads
        if head is not None:
            self._mine.watch_head_(head, self._measure)
        if other is not None:
            self._theirs.watch_head_(other, partial(take_prediction, self._theirs))

    def init_(self, seed: int = 0) -> None:
        """Initialize the projections to the teacher's width, with equal values on every layout."""
        for name, part in self._turning():
            for key, note in tensor_notes(part).items():
                tensor = getattr(part, key)
                if not tensor.is_meta:
                    init_from_note_(tensor, f"{name}.{key}", note, 0.0, seed)

    def _turning(self) -> Iterator[tuple[str, nn.Module]]:
        for name, module in self.student.named_modules():
            if getattr(module, "recorder", None) is self._mine:
                yield name, module

    def objective(self, inner: Objective) -> Objective:
        """Return the task's objective plus the distillation losses.

        In evaluation mode the objective returns only the task's loss.

        Args:
            inner: task's objective: (model, batch, number of items) -> loss; its call of the
                student also runs the teacher.
        """
        return partial(self._distil, inner)

    def _distil(self, inner: Objective, model: nn.Module, batch: Batch, num_items: float) -> Any:
        if not model.training:
            return inner(model, batch, num_items)
        check_students_layout(model, self.teacher, self.config, self.answers is not None)
        with self._mine.recording(), self._theirs.recording():
            self._ask = None
            if self.answers is None:
                self._ask = partial(self._run_teacher, inner, batch, num_items)
            task = inner(model, batch, num_items)
            if task is None:  # a pipeline stage before the last
                return None
            self._let_teacher_run()
            total = self._add_up(task, num_items)
        self._taught = None
        return total

    def _let_teacher_run(self) -> None:
        if self._ask is not None:
            ask, self._ask = self._ask, None
            ask()

    @torch.no_grad()
    def _run_teacher(self, inner: Objective, batch: Batch, num_items: float) -> None:
        self.teacher.eval()
        inner(self.teacher, batch, num_items)

    def _measure(
        self,
        head_input: HeadInput,
        labels: Tensor,
        num_items: float | Tensor | None,
        vocab: VocabCut | None,
    ) -> Tensor:
        """Compute the loss of the student's head, run the teacher, and compute the logit loss."""
        task = cross_entropy_of(head_input, labels, num_items, vocab)
        if not self._mine.is_recording:
            return task
        self._mine.prediction = Prediction(head_input.detach(), labels, num_items, vocab)
        if self.answers is not None and self._logits is not None:
            self._taught = linear_answers(
                head_input,
                self.answers.look_up(self._mine.inputs, head_input.hidden.shape[0]),
                labels,
                temperature=self._logits.temperature,
                num_items=num_items,
            )
            return task
        self._let_teacher_run()
        teacher_prediction = self._theirs.prediction
        if self._logits is not None and teacher_prediction is not None:
            self._taught = linear_distillation(
                head_input,
                teacher_prediction.given,
                labels,
                temperature=self._logits.temperature,
                num_items=num_items,
                vocab=vocab,
            )
        return task

    def _add_up(self, task: Tensor, num_items: float) -> Tensor:
        """Return the weighted sum of the task's loss and all distillation losses."""
        self.task = task.detach()
        total = task * self.config.task_weight
        values: dict[str, Tensor] = {}
        for loss in self.config.losses:
            loss_value = self._compare(loss, num_items)
            values[loss.kind] = values.get(loss.kind, 0) + loss_value.detach()
            weight = loss.weight_at(self.step)
            if weight:
                total = total + weight * loss_value
        self.parts = values
        return total

    def _compare(self, loss: DistillLoss, num_items: float) -> Tensor:
        if loss.kind != "logits":
            return self._compare_inside(loss, num_items)
        if self._taught is not None:
            return self._taught
        sides = self._mine, self._theirs, self.student
        return compare_outputs(*sides, loss.temperature, num_items)

    def _compare_inside(self, loss: DistillLoss, num_items: float) -> Tensor:
        """Return a loss on internal tensors, averaged over pairs of modules and over items."""
        pairs = self._pairs[loss]
        parts = [
            self._compare_pair(loss, student_name, teacher_name)
            for student_name, teacher_name in pairs
        ]
        return torch.stack(parts).sum() / len(pairs) / num_items

    def _compare_pair(self, loss: DistillLoss, student_name: str, teacher_name: str) -> Tensor:
        """Return the loss of one pair of modules, summed over tokens."""
        if loss.kind == "hidden":
            states = self._mine.states[student_name], self._theirs.states[teacher_name]
            weights = self._weights(student_name, states[0][..., 0])
            return (compare_states(*states, weights, loss.form) * weights).sum()
        inputs = self._mine.attention[student_name], self._theirs.attention[teacher_name]
        attn: Any = find_attention(self.student, student_name)
        share = attn.head_share[1]
        if loss.kind == "attention":
            distances = compare_attention(*inputs, attn.num_heads)
        elif loss.kind == "relation":
            heads = relation_heads(loss, attn)
            distances = compare_relations(*inputs, loss.of, heads, share)
        else:
            distances = compare_values(
                *inputs, inputs[0].value.shape[1] * inputs[0].value.shape[3] * share
            )
        return self._sum_heads((distances * self._weights(student_name, distances)).sum(), share)

    def _weights(self, module_name: str, like: Tensor) -> Tensor:
        """Return the weight of each token, (B, T), on the device of `like`."""
        weights = spread_items(self._mine, self.student, module_name, like.shape)
        return weights.to(like.device, accumulation_dtype(like.dtype))

    def _sum_heads(self, part: Tensor, share: int) -> Tensor:
        """Sum a loss over tensor-parallel heads; gradients are those of the local heads."""
        prediction = self._mine.prediction
        if share == 1 or prediction is None or prediction.vocab is None:
            return part
        local = part.detach()
        return part + (prediction.vocab.sum_(local.clone()) - local)

    def after_step_(self) -> None:
        """Count an optimizer step; for custom training loops."""
        self.step += 1

    def __call__(self, trainer: Any, row: Any) -> None:
        """Trainer callback: set the number of completed steps."""
        self.step = trainer.step

    def state_dict(self) -> dict[str, Any]:
        """Return the current step of the schedules."""
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from the result of `state_dict`."""
        self.step = int(state["step"])

    def leave_(self) -> None:
        """Remove all hooks and projections from student and teacher."""
        self._mine.leave_()
        self._theirs.leave_()


def _find_head(model: nn.Module) -> LMHead | None:
    """Return the LM head of a bmforge language model; None for other models."""
    return next((module for module in model.modules() if isinstance(module, LMHead)), None)


def _width(model: nn.Module) -> int:
    """Return the hidden size of a model; 0 if its config does not have one."""
    return int(getattr(getattr(model, "config", None), "hidden_size", 0))
