"""On-policy distillation (`bmforge train distill`): the student generates the answers.

The loss compares the student's distribution with the teacher's at every token.
"""

from __future__ import annotations

import dataclasses
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
from bmforge.parallel import World, build_mesh, init_distributed
from bmforge.recipes.adapters import AdapterConfig
from bmforge.recipes.build import build_model
from bmforge.recipes.inputs.prompt_rows import PromptConfig
from bmforge.recipes.rollout_run import RolloutRun, check_rollouts, default_training
from bmforge.recipes.run import Launch, RunConfig, RunResult, TrainingData, run_recipe
from bmforge.recipes.start import soft_prompt_length, traits_of
from bmforge.tokenizers import AutoTokenizer
from bmforge.train import TrainConfig

__all__ = [
    "OnPolicyDistillationConfig",
    "describe_teacher",
    "shards_teacher",
    "train_distill",
]


@dataclass(kw_only=True)
class OnPolicyDistillationConfig(RunConfig):
    """Config to distill a teacher into a student that generates the answers.

    The fields not described here are `RunConfig`'s.

    Args:
        data: files of prompts, their encoding, and batch sizes.
        teacher: teacher model, as a directory, hub id or short name; it must have the student's
            tokenizer.
        jsd_beta: interpolation coefficient of the generalized Jensen-Shannon divergence, from 0 to
            1: 0 is the forward KL divergence, 1 the reverse KL divergence, and 0.5 is symmetric.
        distill_temperature: temperature by which the logits of teacher and student are divided in
            the loss.
        distill_top_k: number of the teacher's most probable tokens that the loss compares at each
            position; all other tokens count as one outcome, as with TRL's loss_top_k and
            loss_add_tail. 0 compares the whole vocabulary. Tensor, pipeline and context parallelism
            require a value above 0; they also shard the teacher.
        rollout: options for generating answers.
        template: chat template for prompts that are conversations: a file, or a name such as chatml
            or llama3 (if None: the template of the tokenizer).
    """

    data: PromptConfig = field(default_factory=PromptConfig)
    train: TrainConfig = field(default_factory=default_training)
    teacher: str | None = None
    jsd_beta: float = 1.0
    distill_temperature: float = 1.0
    distill_top_k: int = 0
    rollout: RolloutConfig = field(default_factory=lambda: RolloutConfig(num_generations=1))
    template: Path | None = None


def train_distill(config: Any, launch: Launch = run_recipe) -> RunResult:
    """Run or resume distillation of a teacher into a student that generates the answers.

    Args:
        config: an `OnPolicyDistillationConfig` whose `model` is a decoder's config.

    Raises:
        BmforgeError: the teacher's vocabulary differs; also for the reasons given in `run_recipe`.
    """
    return launch(config, _open_data, _check, head=traits_of(config.model).generation_head)


def describe_teacher(config: Any) -> tuple[Path, Any]:
    """Return a run's teacher: its directory, and the model on the meta device.

    Raises:
        ConfigError: the run has no teacher.
    """
    if config.teacher is None:
        raise ConfigError("distill needs a teacher. Pass --teacher DIRECTORY_OR_HUB_ID.")
    directory = find_model(config.teacher)
    return directory, AutoModel.describe_pretrained(directory)[0]


def shards_teacher(config: Any, processes: int) -> bool:
    """Return True if a run's teacher has the layout of the student, not a copy per process."""
    return config.distill_top_k > 0 and processes > 1


def _check(config: Any, processes: int) -> None:
    """Raise `ConfigError` for layouts and options without support."""
    if not config.distill_top_k and config.layout.row_groups(processes) != processes:
        raise ConfigError(
            "on-policy distillation over the whole vocabulary supports data parallelism and "
            "layout.zero, but not tensor, pipeline or context parallelism. Set distill_top_k "
            "(--distill-top-k 64), or layout.tp=1, layout.pp=1 and layout.cp=1."
        )
    if config.layout.is_context_parallel and soft_prompt_length(config):
        raise ConfigError(
            "adapter.kind='soft-prompt' is not supported with layout.cp above 1 in distillation, "
            "because student and teacher would split their sequences at other tokens. Set "
            "layout.cp=1, or use another adapter."
        )
    for name in ("exact_logprobs", "tools", "mask_truncated_completions", "overlong_tokens"):
        if getattr(config.rollout, name):
            raise ConfigError(f"rollout.{name} has no effect in distillation. Leave it out.")
    check_rollouts(config)
    describe_teacher(config)


def _open_teacher(config: Any, directory: Path, described: Any, rows: World) -> Any:
    """Load the teacher: whole on every process, or with the student's layout."""
    world = init_distributed()
    if not shards_teacher(config, world.size):
        return AutoModel.from_pretrained(directory, dtype=torch.float32, device=rows.device)
    own = dataclasses.replace(
        config,
        init_from=str(directory),
        model=described.config.replace(raw={}),
        changes=(),
        adapter=AdapterConfig(),
        base_dtype=None,
        freeze_base=False,
        new_head=False,
    )
    return build_model(own, world, build_mesh(config.layout, rows.device))[0]


def _open_data(config: Any, rows: World) -> TrainingData:
    directory, described = describe_teacher(config)
    run = RolloutRun(config, rows)
    vocabularies = run.tokenizer.get_vocab(), AutoTokenizer.from_pretrained(directory).get_vocab()
    check_vocabularies(config.model, described.config, vocabularies)
    loader = run.open_loader(None, Policy())
    objective = DistillationObjective(
        None,
        config.jsd_beta,
        config.distill_temperature,
        (metric_names([]), lambda: loader.metrics),
        config.distill_top_k,
    )

    def open_teacher(model: Any) -> None:
        teacher = _open_teacher(config, directory, described, rows)
        objective.teacher = teacher.eval().requires_grad_(False)

    return run.training_data(objective, open_teacher)
