"""Reinforcement learning (`bmforge train rl`) from rewards for generated answers.

GRPO, Dr. GRPO, DAPO, RLOO, GSPO, CISPO, REINFORCE++ and PPO; `--method` selects a published
combination of the options in `rl`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from bmforge.align.advantages import check_group_size
from bmforge.align.policy import PolicyConfig
from bmforge.align.reinforcement import PolicyObjective, PolicyScores, open_reference
from bmforge.align.rollout_config import RolloutConfig
from bmforge.align.rollout_metrics import metric_names
from bmforge.align.value import ValueConfig
from bmforge.errors import ConfigError
from bmforge.parallel import World
from bmforge.recipes.inputs.prompt_rows import PromptConfig
from bmforge.recipes.reference_model import make_reference_copy
from bmforge.recipes.reward_scores import StepAggregation, check_columns, open_reward_sources
from bmforge.recipes.rollout_run import RolloutRun, check_rollouts, default_training
from bmforge.recipes.run import Launch, RunConfig, RunResult, TrainingData, run_recipe
from bmforge.recipes.start import traits_of
from bmforge.recipes.value_model import check_value, open_value
from bmforge.train import TrainConfig

__all__ = ["ReinforcementConfig", "train_rl"]


@dataclass(kw_only=True)
class ReinforcementConfig(RunConfig):
    """Config of reinforcement learning; the other fields are those of `RunConfig`.

    Args:
        data: prompts, with further fields for the reward functions.
        method: published method, which sets the defaults of `rl`: grpo, dr_grpo, dapo, rloo, gspo,
            cispo, reinforce++ or ppo.
        rl: options of the loss; each overrides the method's default.
        value: value model of ppo.
        rollout: options for generating answers.
        reward: reward functions, each as NAME or NAME=WEIGHT. NAME is a function with TRL's
            signature (module:function or file.py:function), a verifier (exact:COLUMN,
            number:COLUMN, choice:COLUMN, regex:PATTERN, length:TOKENS or json_schema:FILE), a
            reward model (dir:REWARD_MODEL) or the http address of a reward server.
        step_aggregation: aggregation of the step rewards of a process reward model to the reward of
            an answer: min, product, mean or last (if None: min).
        reward_timeout_s: time limit in seconds for a call of a reward function; the answers of a
            call that times out get no reward.
        template: chat template for prompts that are conversations: a file, or a name such as chatml
            or llama3 (if None: the template of the tokenizer).
    """

    data: PromptConfig = field(default_factory=PromptConfig)
    train: TrainConfig = field(default_factory=default_training)
    method: str = "grpo"
    rl: PolicyConfig = field(default_factory=PolicyConfig)
    value: ValueConfig = field(default_factory=ValueConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reward: tuple[str, ...] = ()
    step_aggregation: StepAggregation | None = None
    reward_timeout_s: float = 60.0
    template: Path | None = None


def train_rl(config: Any, launch: Launch = run_recipe) -> RunResult:
    """Run or resume reinforcement learning.

    Args:
        config: a `ReinforcementConfig` whose `model` is a decoder's config.

    Raises:
        BmforgeError: a reward function cannot be loaded; also for the reasons given in
            `run_recipe`.
    """
    return launch(config, _open_data, _check, head=traits_of(config.model).generation_head)


def _check(config: Any, processes: int) -> None:
    """Raise `ConfigError` for options that conflict or have no effect."""
    policy = config.rl.resolve(config.method)
    if policy.beta and config.adapter.modules_to_save:
        raise ConfigError(
            f"rl.beta={policy.beta:g} cannot be used with adapter.modules_to_save: the reference "
            "is the model without its adapter, but these modules are trained in place. Set "
            "rl.beta=0, or leave adapter.modules_to_save out."
        )
    if policy.correction != "none" and config.rollout.exact_logprobs:
        raise ConfigError(
            f"rl.correction={policy.correction} has no effect with rollout.exact_logprobs=True, "
            "because sampler and policy then have equal log-probabilities. Leave one of them "
            "out."
        )
    check_group_size(policy.advantage, config.rollout.num_generations)
    check_value(config, policy)
    check_rollouts(config)


def _open_data(config: Any, rows: World) -> TrainingData:
    policy, run = config.rl.resolve(config.method), RolloutRun(config, rows)
    check_columns(config.reward, run.columns)
    rewards = open_reward_sources(
        config.reward, config.reward_timeout_s, config.step_aggregation, rows.device
    )
    try:
        rewards.check_columns(run.columns)
    except ConfigError:
        rewards.close()
        raise
    loader, rollout = run.open_loader(rewards, policy), config.rollout
    metrics = metric_names(rewards.names), lambda: loader.metrics
    objective = PolicyObjective(
        policy,
        rollout.temperature,
        rollout.max_new_tokens,
        metrics,
        run.score_rows if rollout.exact_logprobs else None,
    )

    def open_scores(model: Any) -> PolicyScores:
        trains_base = config.adapter.kind is None
        make_copy = partial(make_reference_copy, config, rows)
        reference = open_reference(model, trains_base, make_copy) if policy.beta else None
        with_old = "old" in loader.names or policy.kl_in == "reward"
        if policy.advantage == "gae":
            objective.companion = open_value(config, model)
        return PolicyScores(
            model,
            rollout.temperature,
            with_old,
            reference,
            rollout.exact_logprobs,
            objective.companion,
        )

    return run.training_data(objective, open_scores)
