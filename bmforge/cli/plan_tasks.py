"""Tasks of `bmforge plan`: the loss of a micro-batch, and the other models in memory.

The planner traces the same log-probabilities, rewards and divergences as the recipes' objectives,
but not their metrics, which are a few numbers per token.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bmforge.align.scoring import score_tokens
from bmforge.errors import ConfigError
from bmforge.nn import HeadInput
from bmforge.nn.jensen_shannon import generalized_jsd, linear_jsd
from bmforge.nn.subset_logprobs import linear_subset_logprobs
from bmforge.parallel import Layout
from bmforge.parallel.planner.workload import Resident
from bmforge.recipes.reference_model import store_reference_
from bmforge.recipes.resident_models import (
    reference_copy,
    rollout_cache,
    rollout_copy,
    teacher_copy,
    value_model,
)

__all__ = [
    "DATA_VARIABLES",
    "TASK_STEPS",
    "TaskStep",
    "check_task",
    "head_of_task",
    "plan_residents",
    "supports_layout",
    "task_step",
    "traced_task",
]

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class TaskStep:
    """Micro-batch format and loss of a task, which the planner traces to estimate memory.

    Args:
        run: function that returns the loss, for the model and a micro-batch.
        sequences: number of sequences per example; 2 for a pair of answers.
        has_mask: whether the model receives an attention mask.
    """

    run: Callable[[nn.Module, Batch], Tensor]
    sequences: int = 1
    has_mask: bool = False

    def make_batch(self, length: int, rows: int) -> Batch:
        """Return a micro-batch of `rows` examples, whose sequences have `length` tokens."""
        ids = torch.zeros(rows * self.sequences, length, dtype=torch.long)
        mask = {"attention_mask": torch.ones_like(ids)} if self.has_mask else {}
        return {"input_ids": ids, "labels": ids.clone(), **mask}


def _cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    loss: Tensor = model(**batch, num_items_in_batch=1.0).loss
    return loss


def _logprobs(model: nn.Module, batch: Batch) -> Tensor:
    inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
    scores = score_tokens(model, inputs, batch["labels"])
    assert scores is not None  # the planner traces models without pipeline stages
    return scores.logprobs.sum()


def _reward(model: nn.Module, batch: Batch) -> Tensor:
    inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
    loss: Tensor = model(**inputs).logits.float().sum()
    return loss


def _top_k_divergence(top_k: int, model: nn.Module, batch: Batch) -> Tensor:
    """Return a loss like `_divergence` that compares k tokens of every position."""

    def measure(head: HeadInput, targets: Tensor, num_items: Any, vocab: Any) -> Tensor:
        count = min(top_k, head.weight.shape[0] if vocab is None else vocab.rows)
        ids = torch.zeros(len(targets), count, dtype=torch.long, device=targets.device)
        own = linear_subset_logprobs(head, ids, vocab=vocab)
        return generalized_jsd(own, torch.zeros_like(own), 1.0)[None]

    loss: Tensor = model(**batch, num_items_in_batch=measure).loss.sum()
    return loss


def _divergence(model: nn.Module, batch: Batch) -> Tensor:
    """Return a loss that needs as much memory as distillation; the student is its own teacher."""

    def measure(head: HeadInput, targets: Tensor, num_items: Any, vocab: Any) -> Tensor:
        return linear_jsd(head, head.detach(), 1.0, 1.0)

    scores = model(**batch, num_items_in_batch=measure).loss
    loss: Tensor = scores[0].sum()
    return loss


TASK_STEPS: Mapping[str, TaskStep] = {
    "pretrain": TaskStep(_cross_entropy),
    "conversations": TaskStep(_cross_entropy),
    "preferences": TaskStep(_logprobs, sequences=2),
    "reward": TaskStep(_reward, sequences=2, has_mask=True),
    # `train reward --supervision process`, which is not a task of `bmforge plan`
    "process-reward": TaskStep(_reward, has_mask=True),
    "rl": TaskStep(_logprobs, has_mask=True),
    "distill": TaskStep(_divergence, has_mask=True),
}


def task_step(task: str) -> TaskStep:
    """Return the step of a task: a key of `TASK_STEPS`, or distill:K for K tokens per position."""
    name, _, top_k = task.partition(":")
    if not top_k:
        return TASK_STEPS[name]
    return dataclasses.replace(TASK_STEPS[name], run=partial(_top_k_divergence, int(top_k)))


def traced_task(command: Any) -> str:
    """Return the task of a `PlanCommand` as `task_step` takes it."""
    return f"{command.task}:{command.distill_top_k}" if command.distill_top_k else command.task


# Task -> shell variable for the data, which a plan does not know.
DATA_VARIABLES: Mapping[str, str] = {
    "pretrain": "${CORPUS:?what bmforge prepare wrote}",
    "conversations": "${CHATS:?file with conversations}",
    "preferences": "${PAIRS:?file with preferences}",
    "reward": "${PAIRS:?file with preferences}",
    "rl": "${PROMPTS:?file with prompts}",
    "distill": "${PROMPTS:?file with prompts}",
}


def supports_layout(task: str, layout: Layout, processes: int) -> bool:
    """Return True if a task supports a layout.

    Distillation over the whole vocabulary supports only data parallelism and ZeRO.
    """
    return task != "distill" or layout.row_groups(processes) == processes


def check_task(command: Any) -> None:
    """Raise `ConfigError` for an option that has no effect on the planned task."""
    task, is_rollout = command.task, command.task in ("rl", "distill")
    references = {"preferences": ("adapter", "copy", "precomputed"), "rl": ("adapter", "copy")}
    if command.reference is not None and command.reference not in references.get(task, ()):
        allowed = ", ".join(references.get(task, ())) or "none"
        raise ConfigError(
            f"--reference {command.reference} has no effect with --task {task} (allowed: "
            f"{allowed}). Leave it out."
        )
    _check_reference_copy(command)
    if command.reference == "adapter" and command.adapter is None:
        raise ConfigError(
            "--reference adapter needs an adapter. Add --adapter lora, or use --reference copy."
        )
    if command.value_model and task != "rl":
        raise ConfigError(f"--value-model has no effect with --task {task}. Leave it out.")
    if (command.teacher is not None) != (task == "distill"):
        raise ConfigError(
            "--teacher MODEL is required with --task distill, and has no effect with other "
            f"tasks (this is --task {task}). Pass or remove --teacher."
        )
    if command.distill_top_k and (task != "distill" or command.distill_top_k < 0):
        raise ConfigError(
            f"--distill-top-k {command.distill_top_k} is not allowed with --task {task} "
            "(allowed: 0 or more, only with --task distill). Correct the value, or leave the "
            "option out."
        )
    if command.max_num_seqs is not None and not is_rollout:
        raise ConfigError(
            "--max-num-seqs has no effect without --task rl or distill. Leave it out."
        )


def _is_copied(command: Any) -> bool:
    """Return True if the planned run has a copy of the model as its reference."""
    is_default = command.reference is None and command.adapter is None
    return command.reference == "copy" or (command.task == "preferences" and is_default)


def _check_reference_copy(command: Any) -> None:
    """Raise `ConfigError` for options of the reference copy that have no effect."""
    options = {"--reference-dtype": command.reference_dtype}
    options["--reference-offload"] = command.reference_offload or None
    for name, value in options.items():
        if value is not None and (command.task != "preferences" or not _is_copied(command)):
            raise ConfigError(
                f"{name} has no effect without --task preferences and a copy of the model as the "
                f"reference (--reference copy). Leave {name} out."
            )
    if command.reference_dtype is not None and (command.adapter or command.changes):
        raise ConfigError(
            f"--reference-dtype {command.reference_dtype} is supported only for full "
            "fine-tuning, without --adapter and --changes. With an adapter, use --reference "
            "adapter, which needs no memory for the reference."
        )


def _reference(command: Any, model: nn.Module, precision: str) -> Resident:
    is_quantized = command.reference_dtype is not None
    if is_quantized:
        store_reference_(model, command.reference_dtype, precision)
    return reference_copy(model, is_stored=is_quantized, is_offloaded=command.reference_offload)


def head_of_task(task: str, config: Any) -> Any:
    """Return the model's config with the head that the task needs."""
    if task == "reward":
        return config.replace(head="sequence_classification", num_labels=1)
    return config


def plan_residents(
    command: Any,
    make_policy: Callable[[], nn.Module],
    make_value: Callable[[], nn.Module],
    make_teacher: Callable[[str], nn.Module],
    precision: str,
    row_tokens: int,
) -> tuple[Resident, ...]:
    """Return the other models and caches that a run of the planned task keeps in memory.

    Args:
        command: a `PlanCommand`.
        make_policy: function that builds the trained model on the meta device.
        make_value: function that builds the value model on the meta device.
        make_teacher: function that builds the model of a given name on the meta device.
        precision: precision of the computation.
        row_tokens: sequence length in tokens, of prompt and answer together.
    """
    residents = [_reference(command, make_policy(), precision)] if _is_copied(command) else []
    if command.task not in ("rl", "distill"):
        return tuple(residents)
    if command.teacher is not None:
        is_sharded = command.distill_top_k > 0 and command.gpus > 1
        residents.append(teacher_copy(make_teacher(command.teacher), is_sharded=is_sharded))
    if command.value_model:
        residents.append(value_model(make_value()))
    policy = make_policy()
    if command.gpus > 1 or precision != "fp32":
        residents.append(rollout_copy(policy, precision))
    config: Any = policy.config
    rows = command.max_num_seqs or 64
    return (*residents, rollout_cache(config, precision, rows, row_tokens))
