"""On-policy distillation (`bmforge train distill`): the student generates the answers.

The loss compares the student's distribution with the teacher's at every token.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bmforge.align.distillation import DistillationObjective, check_vocabularies
from bmforge.align.policy import Policy
from bmforge.align.rollout_config import RolloutConfig
from bmforge.align.rollout_metrics import metric_names
from bmforge.errors import ConfigError
from bmforge.models import AutoModel
from bmforge.models.hub import find_model
from bmforge.parallel import World, init_distributed
from bmforge.recipes.inputs.prompt_rows import PromptConfig
from bmforge.recipes.rollout_run import RolloutRun, default_training
from bmforge.recipes.run import RunConfig, RunResult, TrainingData, run_recipe
from bmforge.recipes.start import traits_of
from bmforge.tokenizers import AutoTokenizer
from bmforge.train import TrainConfig

__all__ = ["OnPolicyDistillationConfig", "describe_teacher", "train_distill"]


@dataclass(kw_only=True)
class OnPolicyDistillationConfig(RunConfig):
    """Config to distill a teacher into a student that generates the answers.

    The fields not described here are `RunConfig`'s.

    Args:
        data: files of prompts, their encoding, and batch sizes.
        teacher: directory, hub id or short name of the teacher, with the student's tokenizer.
        jsd_beta: interpolation coefficient of the generalized Jensen-Shannon divergence: 0 is the
            forward KL divergence, 1 the reverse KL divergence, and 0.5 is symmetric.
        distill_temperature: divisor of both models' logits in the loss.
        rollout: options for generating answers.
        template: chat template for prompts that are conversations, as in `train conversations`.
    """

    data: PromptConfig = field(default_factory=PromptConfig)
    train: TrainConfig = field(default_factory=default_training)
    teacher: str | None = None
    jsd_beta: float = 1.0
    distill_temperature: float = 1.0
    rollout: RolloutConfig = field(default_factory=lambda: RolloutConfig(num_generations=1))
    template: Path | None = None


def train_distill(config: Any) -> RunResult:
    """Run or resume distillation of a teacher into a student that generates the answers.

    Args:
        config: an `OnPolicyDistillationConfig` whose `model` is a decoder's config.

    Raises:
        BmforgeError: the teacher's vocabulary differs; also for the reasons given in `run_recipe`.
    """
    return run_recipe(config, _open_data, head=traits_of(config.model).generation_head)


def describe_teacher(config: Any) -> tuple[Path, Any]:
    """Return a run's teacher: its directory, and the model on the meta device.

    Raises:
        ConfigError: the run has no teacher.
    """
    if config.teacher is None:
        raise ConfigError("distill needs a teacher. Pass --teacher DIRECTORY_OR_HUB_ID.")
    directory = find_model(config.teacher)
    return directory, AutoModel.describe_pretrained(directory)[0]


def _check_layout(config: Any) -> None:
    """Raise `ConfigError` for layouts and options that distillation does not support."""
    processes = init_distributed().size
    if config.layout.row_groups(processes) != processes:
        raise ConfigError(
            "on-policy distillation supports data parallelism and layout.zero, but not tensor, "
            "pipeline or context parallelism. Set layout.tp=1, layout.pp=1 and layout.cp=1."
        )
    for name in ("exact_logprobs", "tools", "mask_truncated_completions", "overlong_tokens"):
        if getattr(config.rollout, name):
            raise ConfigError(f"rollout.{name} has no effect in distillation. Leave it out.")


def _open_data(config: Any, rows: World) -> TrainingData:
    if not 0 <= config.jsd_beta <= 1:
        raise ConfigError(f"jsd_beta={config.jsd_beta} must be from 0 to 1.")
    if not config.distill_temperature > 0:
        raise ConfigError(f"distill_temperature={config.distill_temperature} must be above 0.")
    _check_layout(config)
    directory, described = describe_teacher(config)
    run = RolloutRun(config, rows)
    vocabularies = run.tokenizer.get_vocab(), AutoTokenizer.from_pretrained(directory).get_vocab()
    check_vocabularies(config.model, described.config, vocabularies)
    teacher = AutoModel.from_pretrained(directory, dtype=torch.float32, device=rows.device)
    loader = run.open_loader(None, Policy())
    objective = DistillationObjective(
        teacher.eval().requires_grad_(False),
        config.jsd_beta,
        config.distill_temperature,
        (metric_names([]), lambda: loader.metrics),
    )
    return run.training_data(objective, lambda model: None)
