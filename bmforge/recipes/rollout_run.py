"""Common setup of runs that generate their own answers: prompts, engine, and answer log."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bmforge.align.answer_writer import AnswerWriter
from bmforge.align.rewards import RewardSet
from bmforge.align.rollout_batches import RolloutAnswer
from bmforge.align.rollout_metrics import CompletionLog
from bmforge.align.rollouts import RolloutLoader, RolloutRanks, Scores
from bmforge.device import default_device, is_host, parse_dtype
from bmforge.errors import ConfigError
from bmforge.infer import GenerationConfig
from bmforge.infer.engine.native_step import load_step
from bmforge.models.init import materialize_
from bmforge.parallel import World, joined_world
from bmforge.recipes.adapters import attach_adapter
from bmforge.recipes.base_weights import store_frozen_
from bmforge.recipes.inputs.document_segments import open_tokenizer
from bmforge.recipes.inputs.prompt_rows import (
    encode_prompts,
    find_stops,
    make_decoder,
    open_template,
    read_all,
)
from bmforge.recipes.rollout_tools import open_functions, open_turns
from bmforge.recipes.run import TrainingData
from bmforge.recipes.start import (
    family_of,
    soft_prompt_length,
    traits_of,
    with_changes,
)
from bmforge.train import OptimConfig, ScheduleConfig, TrainConfig

__all__ = ["RolloutRun", "check_rollouts", "default_training"]


def default_training() -> TrainConfig:
    """Return the training defaults of TRL: a constant learning rate of 1e-6, and no dropout."""
    return TrainConfig(
        optim=OptimConfig(lr=1e-6, weight_decay=0.0),
        schedule=ScheduleConfig(kind="constant"),
        disable_dropout=True,
    )


def check_rollouts(config: Any) -> None:
    """Raise `ConfigError` for options that cannot be combined, before anything is loaded."""
    config.rollout.check()
    limit = traits_of(config.model).row_limit(config.model)
    prompt = soft_prompt_length(config)
    longest = prompt + config.data.seq_len + config.rollout.max_new_tokens
    if limit is not None and longest > limit:
        added = f"adapter.length={prompt} + " if prompt else ""
        raise ConfigError(
            f"{added}data.seq_len={config.data.seq_len} + "
            f"rollout.max_new_tokens={config.rollout.max_new_tokens} is more than "
            f"model.max_seq_len={limit}. Reduce one of them."
        )
    if not config.train.disable_dropout:
        raise ConfigError(
            "train.disable_dropout=False is not supported: with dropout, the policy of the "
            "loss would differ from the policy of the rollouts. Leave it out."
        )
    if config.train.eval_every_steps is not None:
        raise ConfigError(
            f"train.eval_every_steps={config.train.eval_every_steps} has no effect in a run that "
            "generates its own answers. Leave it out, and evaluate the exported model with "
            "`bmforge evaluate`."
        )
    if config.rollout.exact_logprobs:
        _check_exact(config, longest, limit)


def _check_exact(config: Any, longest: int, limit: int | None) -> None:
    """Raise `ConfigError` if the native kernels cannot compute `rollout.exact_logprobs`."""
    if config.adapter.kind is not None:
        raise ConfigError(
            "rollout.exact_logprobs=True is not supported with "
            f"adapter.kind={config.adapter.kind!r}, because native kernels do not run blocks "
            "with adapters. Leave one out."
        )
    if limit is not None and longest + 1 > limit:
        raise ConfigError(
            "rollout.exact_logprobs=True needs one position more than data.seq_len + "
            f"rollout.max_new_tokens={longest}, but model.max_seq_len={limit}. Reduce one of "
            "them."
        )
    if not is_host(default_device()) or load_step() is None:
        raise ConfigError(
            "rollout.exact_logprobs=True needs the native CPU kernels: a CPU as device and a "
            "C++ compiler. Leave it out; the metric sampling/sampling_logp_difference shows "
            "how far the log-probabilities of sampling and training differ."
        )


class RolloutRun:
    """Resources of a run that generates its own answers: tokenizer, prompts, engine and log.

    Args:
        config: config with ``data`` (`PromptConfig`), ``rollout`` and ``template``.
        rows: data-parallel rank and size.

    Attributes:
        tokenizer: tokenizer of the run.
        columns: names of the prompts' columns.
        loader: loader of the run, after `open_loader`.
    """

    loader: RolloutLoader

    def __init__(self, config: Any, rows: World) -> None:
        self._config, self._rows = config, rows
        self.tokenizer = open_tokenizer(config)
        prompts = read_all(config.data)
        self.columns = frozenset(name for prompt in prompts for name in prompt.columns)
        self._template = open_template(config, self.tokenizer, prompts)
        self._functions = open_functions(config, self._template)
        schemas = [process.schema for process in self._functions.values() if process.schema]
        self._prompts = encode_prompts(
            prompts, config.data, self.tokenizer, self._template, schemas or None
        )
        self._stops = tuple(find_stops(config.model, self.tokenizer, self._template))
        self._rewards: RewardSet | None = None
        self._writer: AnswerWriter | None = None
        self._log: CompletionLog | None = None

    def open_loader(self, rewards: RewardSet | None, policy: Any) -> RolloutLoader:
        """Create the loader of the run; the reward functions are closed when the run ends."""
        config, rows = self._config, self._rows
        world = joined_world(rows)
        self._rewards = rewards
        decode = make_decoder(self.tokenizer, self._stops)
        tools = None
        if self._functions:
            assert self._template is not None  # checked by `open_functions`
            tools = open_turns(self._functions, config, self.tokenizer, self._template, self._stops)
        self.loader = RolloutLoader(
            self._prompts,
            rewards,
            config.rollout,
            policy,
            config.data,
            decode,
            RolloutRanks(rows.rank, rows.size, world.rank, world.size),
            tools,
        )
        return self.loader

    def training_data(
        self, objective: Any, open_scores: Callable[[Any], Scores | None]
    ) -> TrainingData:
        """Return the `TrainingData` of the run.

        Args:
            objective: objective of the Trainer.
            open_scores: function that takes the model with its initial weights, and returns the
                `Scores` of the rollouts; None if they need no scores.
        """
        rollout = self._config.rollout
        return TrainingData(
            self.loader,
            self._config.data.seq_len + rollout.max_new_tokens,
            objective=objective,
            save_tokenizer=self._save_tokenizer,
            begin=partial(self._begin, open_scores),
            close=self._close,
            epoch_rows=len(self._prompts) * rollout.num_generations,
        )

    def _save_tokenizer(self, directory: Path) -> None:
        self.tokenizer.save_pretrained(directory)
        if self._template is not None:
            self._template.save(directory)

    def _begin(self, open_scores: Callable[[Any], Scores | None], model: Any) -> None:
        """Start the generation engine, and call `open_scores` with the initial model."""
        config, rollout = self._config, self._config.rollout
        options = GenerationConfig(
            max_new_tokens=rollout.max_new_tokens,
            **_PLAIN_SAMPLING,
            temperature=rollout.temperature,
            eos_token_id=self._stops,
        )
        longest = config.data.seq_len + rollout.max_new_tokens + rollout.exact_logprobs
        longest += soft_prompt_length(config)
        copy = partial(_make_copy, config, self._rows.device)
        self._writer = AnswerWriter(model, rollout.max_num_seqs, longest, options, copy)
        if rollout.exact_logprobs and not self._writer.runs_natively:
            raise ConfigError(
                "rollout.exact_logprobs=True is not supported, because the native kernels do not "
                f"support the blocks of this {type(model).__name__}. Leave it out."
            )
        steps = self._config.train.steps
        self.loader.begin(self._writer, open_scores(model), self._note, steps)

    def score_rows(self, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return the log-probabilities of token sequences under the engine's model.

        Call this method only after training has begun.
        """
        assert self._writer is not None
        return self._writer.score(rows)

    def _note(
        self, step: int, answers: Sequence[RolloutAnswer], metrics: Mapping[str, Any]
    ) -> None:
        """Log the first answers of a rollout to the run directory."""
        count = self._config.rollout.log_completions
        if joined_world(self._rows).rank or not count:
            return
        if self._log is None:
            self._log = CompletionLog(self._config.run_dir, count, step)
        self._log.write(step, answers, [self.loader.prompt(a.prompt).content for a in answers])

    def _close(self) -> None:
        """Close the engine, and end the processes of tools and reward functions."""
        for process in self._functions.values():
            process.close()
        if self._rewards is not None:
            self._rewards.close()
        if self._writer is not None:
            self._writer.close()


# The sampled policy must be the trained one, so generation_config.json is ignored.
_PLAIN_SAMPLING: Mapping[str, Any] = {
    "do_sample": True,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "no_repeat_ngram_size": 0,
    "bad_words_ids": (),
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "begin_suppress_tokens": (),
    "min_new_tokens": 0,
    "num_beams": 1,
    "logprobs": 0,
    "logprobs_mode": "processed_logprobs",
}


def _make_copy(config: Any, device: Any) -> Any:
    """Build a second model of the run's structure; its weights are copied before each rollout."""
    sizes = with_changes(config)
    model = family_of(sizes).from_config(sizes, device="meta")
    attach_adapter(model, config)
    store_frozen_(model, config)
    if config.train.precision != "fp32":
        model = model.to(parse_dtype(config.train.precision))
    materialize_(model, device)  # unlike `to_empty`, it keeps tied weights tied
    return model.eval().requires_grad_(False)
