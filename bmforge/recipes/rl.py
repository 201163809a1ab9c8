"""Reinforcement learning (`bmforge train rl`): the model writes answers, rewards score them.

GRPO, Dr. GRPO, DAPO, RLOO, GSPO, CISPO and REINFORCE++; `--method` selects a published combination,
whose parts are fields of `rl`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from bmforge.align.answer_writer import AnswerWriter
from bmforge.align.policy import Policy, PolicyConfig
from bmforge.align.reinforcement import PolicyObjective, PolicyScores, open_reference
from bmforge.align.rewards import RewardSet, open_rewards
from bmforge.align.rollout_batches import RolloutAnswer
from bmforge.align.rollout_metrics import CompletionLog, metric_names
from bmforge.align.rollouts import RolloutConfig, RolloutLoader
from bmforge.device import parse_dtype
from bmforge.errors import ConfigError
from bmforge.files import replace_file
from bmforge.infer import GenerationConfig
from bmforge.parallel import World
from bmforge.recipes.adapters import attach_adapter
from bmforge.recipes.base_weights import store_frozen_
from bmforge.recipes.inputs.pieces import open_tokenizer
from bmforge.recipes.inputs.prompt_rows import (
    PromptConfig,
    encode_prompts,
    find_stops,
    make_decoder,
    open_template,
    read_all,
)
from bmforge.recipes.run import RunConfig, RunResult, TrainingData, run_recipe
from bmforge.recipes.start import check_length, family_of, traits_of, with_changes
from bmforge.tokenizers.chat_template import TEMPLATE_FILE
from bmforge.train import OptimConfig, ScheduleConfig, TrainConfig

__all__ = ["ReinforcementConfig", "check_rl", "train_rl"]


def _train_defaults() -> TrainConfig:
    """Return TRL's defaults: a constant learning rate of 1e-6, and no dropout."""
    return TrainConfig(
        optim=OptimConfig(lr=1e-6, weight_decay=0.0),
        schedule=ScheduleConfig(kind="constant"),
        disable_dropout=True,
    )


@dataclass(kw_only=True)
class ReinforcementConfig(RunConfig):
    """Learn from rewards; the fields not named here are `RunConfig`'s.

    Args:
        data: prompts, with any further columns for the reward functions.
        method: published method: grpo, dr_grpo, dapo, rloo, gspo, cispo or reinforce++.
        rl: parts of the loss, instead of the method's.
        rollout: writing of answers.
        reward: reward functions NAME[=WEIGHT]: module:function or file.py:function with TRL's
            signature; the verifiers exact:COLUMN, number:COLUMN, choice:COLUMN, regex:PATTERN,
            length:TOKENS and json_schema:FILE; dir:REWARD_MODEL; or an http address.
        reward_timeout_s: time limit of a call of a reward function in seconds; its answers are then
            not scored by it (default: 60).
        template: chat template of prompts that are conversations, as in `train conversations`.
    """

    data: PromptConfig = field(default_factory=PromptConfig)
    train: TrainConfig = field(default_factory=_train_defaults)
    method: str = "grpo"
    rl: PolicyConfig = field(default_factory=PolicyConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reward: tuple[str, ...] = ()
    reward_timeout_s: float = 60.0
    template: Path | None = None


def train_rl(config: Any) -> RunResult:
    """Train a model by reinforcement learning, or resume such a run.

    Args:
        config: a `ReinforcementConfig` with the `model` of a decoder.

    Raises:
        BmforgeError: see `run_recipe`; a reward function cannot be opened.
    """
    return run_recipe(config, _open_data, head=traits_of(config.model).writing_head)


def check_rl(config: Any, policy: Policy) -> None:
    """Raise `ConfigError` for options that exclude each other, before anything is opened."""
    config.data.check()
    config.rollout.check()
    check_length(config)
    limit = traits_of(config.model).row_limit(config.model)
    longest = config.data.seq_len + config.rollout.max_new_tokens
    if limit is not None and longest > limit:
        raise ConfigError(
            f"data.seq_len={config.data.seq_len} + rollout.max_new_tokens="
            f"{config.rollout.max_new_tokens} is more than model.max_seq_len={limit}. Shorten one."
        )
    if not config.train.disable_dropout:
        raise ConfigError(
            "train.disable_dropout=False: dropout would make the policy of the loss another one "
            "than that of the rollouts. Leave it on."
        )
    if config.layout.pp > 1 or config.layout.tp > 1 or config.layout.cp > 1 or config.layout.ep > 1:
        raise ConfigError(
            "train rl supports one process, data parallelism and layout.zero, not layout.tp, pp, "
            "cp or ep above 1 yet. Leave them out."
        )
    if policy.beta and config.adapter.modules_to_save:
        raise ConfigError(
            "rl.beta above 0 with adapter.modules_to_save: the reference is the base without its "
            "adapter, and these modules are trained in place. Leave one out."
        )


def _open_data(config: Any, rows: World) -> TrainingData:
    policy = config.rl.resolve(config.method)
    check_rl(config, policy)
    tokenizer = open_tokenizer(config)
    found = read_all(config.data)
    template = open_template(config, tokenizer, found)
    prompts = encode_prompts(found, config.data, tokenizer, template)
    stops = find_stops(config.model, tokenizer, template)
    decode = make_decoder(tokenizer, stops)
    rewards = open_rewards(config.reward, config.reward_timeout_s)
    place = (rows.rank, rows.size)
    loader = RolloutLoader(prompts, rewards, config.rollout, policy, config.data, decode, place)
    names = metric_names(rewards.names)
    rollout = config.rollout
    objective = PolicyObjective(
        policy, rollout.temperature, rollout.max_new_tokens, (names, lambda: loader.metrics)
    )
    run = _Run(config, policy, loader, rewards, stops, rows)

    def save(directory: Path) -> None:
        tokenizer.save_pretrained(directory)
        if template is not None:
            replace_file(directory / TEMPLATE_FILE, template.source)

    return TrainingData(
        loader,
        config.data.seq_len + rollout.max_new_tokens,
        objective=objective,
        save_tokenizer=save,
        begin=run.begin,
        close=run.close,
        epoch_rows=len(prompts) * rollout.num_generations,
    )


class _Run:
    """Opens what needs the model when training begins, and closes it at the end.

    Args:
        config: the run's config.
        policy: loss of the run.
        loader: loader of the run.
        rewards: reward functions.
        stops: ids of tokens that end an answer.
        rows: data-parallel rank and size.
    """

    def __init__(
        self,
        config: Any,
        policy: Policy,
        loader: RolloutLoader,
        rewards: RewardSet,
        stops: Sequence[int],
        rows: World,
    ) -> None:
        self._config, self._policy, self._loader = config, policy, loader
        self._rewards, self._stops, self._rows = rewards, tuple(stops), rows
        self._writer: AnswerWriter | None = None
        self._log: CompletionLog | None = None

    def begin(self, model: Any) -> None:
        """Open the engine and the reference of a model with its initial weights."""
        config, rollout = self._config, self._config.rollout
        options = GenerationConfig(
            max_new_tokens=rollout.max_new_tokens,
            do_sample=True,
            temperature=rollout.temperature,
            top_k=0,
            top_p=1.0,
            min_p=0.0,
            repetition_penalty=1.0,
            eos_token_id=self._stops,
            logprobs=0,
            logprobs_mode="processed_logprobs",
        )
        longest = config.data.seq_len + rollout.max_new_tokens
        self._writer = AnswerWriter(
            model,
            rollout.max_num_seqs,
            longest,
            options,
            partial(_make_copy, config, self._rows.device),
        )
        is_adapter = config.adapter.kind is not None
        reference = open_reference(model, not is_adapter) if self._policy.beta else None
        with_old = "old" in self._loader.names or self._policy.kl_in == "reward"
        scores = PolicyScores(model, rollout.temperature, with_old, reference)
        self._loader.begin(self._writer, scores, self._note)

    def _note(
        self, step: int, answers: Sequence[RolloutAnswer], metrics: Mapping[str, Any]
    ) -> None:
        """Write the first answers of a rollout into the run directory."""
        if self._rows.rank or not self._config.rollout.log_completions:
            return
        if self._log is None:
            count = self._config.rollout.log_completions
            self._log = CompletionLog(self._config.run_dir, count, step)
        self._log.write(step, answers, [self._loader.prompt(a.prompt).content for a in answers])

    def close(self) -> None:
        """End the engine and the processes of reward functions."""
        self._rewards.close()
        if self._writer is not None:
            self._writer.close()


def _make_copy(config: Any, device: Any) -> Any:
    """Return a plain model of the run's structure, whose weights are filled before each rollout."""
    sizes = with_changes(config)
    model = family_of(sizes).from_config(sizes, device="meta")
    attach_adapter(model, config)
    store_frozen_(model, config)
    if config.train.precision != "fp32":
        model = model.to(parse_dtype(config.train.precision))
    return model.to_empty(device=device).eval().requires_grad_(False)
