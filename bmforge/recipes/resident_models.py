"""Memory of the models and caches of a post-training run, other than the trained model.

The planner and `--dry-run` include them: a frozen reference, a teacher, PPO's value model, the copy
of the weights that generates rollouts, and the KV cache of the generation engine.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from bmforge.device import parse_dtype
from bmforge.parallel.planner.workload import Resident
from bmforge.surgery import persistent_tensors

__all__ = [
    "list_resident_models",
    "planned_task",
    "reference_copy",
    "rollout_cache",
    "rollout_copy",
    "teacher_copy",
    "value_model",
]

_WIDE_BYTES = 4


def reference_copy(
    model: nn.Module, *, is_stored: bool = False, is_offloaded: bool = False
) -> Resident:
    """Return the memory of the policy's frozen reference, in the policy's layout.

    Args:
        model: reference on the meta device, or a model of the same sizes.
        is_stored: whether the weights have the dtypes of `model`; otherwise they are in fp32.
        is_offloaded: whether the weights are on the device only between steps.
    """
    tensors = persistent_tensors(model).values()
    stored = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    size = stored if is_stored else _fp32_bytes(model)
    return Resident("reference", size, is_sharded=True, is_offloaded=is_offloaded)


def teacher_copy(model: nn.Module, *, is_sharded: bool = False) -> Resident:
    """Return the memory of the distillation teacher, with fp32 weights.

    Args:
        model: teacher on the meta device.
        is_sharded: whether the teacher has the student's layout, not a copy per process.
    """
    return Resident("teacher", _fp32_bytes(model), is_sharded=is_sharded)


def value_model(model: nn.Module) -> Resident:
    """Return the memory of PPO's value model between its steps: weights and two AdamW states.

    The value model is updated before the policy. Its update needs about the same memory as that of
    the policy, so the peak is not higher; its gradients are freed after the step.

    Args:
        model: value model on the meta device, with `requires_grad` set to False for frozen
            parameters.
    """
    size = sum(
        3 * _WIDE_BYTES * tensor.numel()
        if tensor.requires_grad
        else tensor.numel() * tensor.element_size()
        for tensor in persistent_tensors(model).values()
    )
    return Resident("value model", size, is_sharded=True)


def rollout_copy(model: nn.Module, precision: str) -> Resident:
    """Return the memory of the unsharded model copy for rollouts, in the compute dtype."""
    width = parse_dtype(precision).itemsize
    size = sum(
        tensor.numel() * (width if tensor.dtype == torch.float32 else tensor.element_size())
        for tensor in persistent_tensors(model).values()
    )
    return Resident("rollout copy", size, is_sharded=False)


def rollout_cache(config: Any, precision: str, max_num_seqs: int, max_tokens: int) -> Resident:
    """Return the memory of the KV cache of the engine that generates rollouts.

    Args:
        config: config of the model.
        precision: dtype of keys and values.
        max_num_seqs: maximum number of answers that are generated at once.
        max_tokens: maximum length of a prompt with its answer, in tokens.
    """
    heads = getattr(config, "num_kv_heads", None) or config.num_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_heads
    # As in `AnswerWriter`: two more pages of 16 tokens per answer.
    tokens = max_num_seqs * (max_tokens + 32)
    size = 2 * config.num_layers * heads * width * tokens * parse_dtype(precision).itemsize
    return Resident("KV cache", size, is_sharded=False)


def list_resident_models(config: Any, policy: nn.Module, processes: int) -> tuple[Resident, ...]:
    """Return the memory of all models and caches of a run, except the trained model.

    Args:
        config: config of any recipe; without a reference model and rollouts the result is empty.
        policy: trained model on the meta device, with its adapter.
        processes: number of processes.
    """
    from bmforge.recipes.distill import (
        OnPolicyDistillationConfig,
        describe_teacher,
        shards_teacher,
    )
    from bmforge.recipes.preferences import PreferencesConfig, reference_kind
    from bmforge.recipes.rl import ReinforcementConfig
    from bmforge.recipes.value_model import describe_value_model

    if isinstance(config, PreferencesConfig):
        return (_copied_reference(config, policy),) if reference_kind(config) == "copy" else ()
    residents: list[Resident] = []
    if isinstance(config, OnPolicyDistillationConfig):
        is_sharded = shards_teacher(config, processes)
        residents.append(teacher_copy(describe_teacher(config)[1], is_sharded=is_sharded))
    elif isinstance(config, ReinforcementConfig):
        policy_loss = config.rl.resolve(config.method)
        if policy_loss.beta and config.adapter.kind is None:
            residents.append(reference_copy(policy))
        if policy_loss.advantage == "gae":
            residents.append(value_model(describe_value_model(config)))
    else:
        return ()
    precision, rollout = config.train.precision, config.rollout
    if processes > 1 or precision != "fp32":
        residents.append(rollout_copy(policy, precision))
    longest = config.data.seq_len + rollout.max_new_tokens
    cache = rollout_cache(config.model, precision, rollout.max_num_seqs, longest)
    return (*residents, cache)


def _copied_reference(config: Any, policy: nn.Module) -> Resident:
    from bmforge.recipes.reference_model import describe_reference

    if config.reference_dtype is None:
        return reference_copy(policy, is_offloaded=config.reference_offload)
    model = describe_reference(config)
    return reference_copy(model, is_stored=True, is_offloaded=config.reference_offload)


def planned_task(config: Any) -> tuple[str, int]:
    """Return the planner's task of a recipe's run, and its sequence length in tokens.

    The task distill:K compares K tokens of every position (`distill_top_k`).
    """
    from bmforge.recipes.distill import OnPolicyDistillationConfig
    from bmforge.recipes.preferences import PreferencesConfig
    from bmforge.recipes.reward import RewardConfig
    from bmforge.recipes.rl import ReinforcementConfig

    length = config.data.seq_len
    if isinstance(config, PreferencesConfig):
        return "preferences", length
    if isinstance(config, RewardConfig):
        return ("process-reward" if config.supervision == "process" else "reward"), length
    if isinstance(config, ReinforcementConfig):
        return "rl", length + config.rollout.max_new_tokens
    if isinstance(config, OnPolicyDistillationConfig):
        top_k = config.distill_top_k
        task = f"distill:{top_k}" if top_k else "distill"
        return task, length + config.rollout.max_new_tokens
    return "pretrain", length


def _fp32_bytes(model: nn.Module) -> int:
    return sum(_WIDE_BYTES * tensor.numel() for tensor in persistent_tensors(model).values())
