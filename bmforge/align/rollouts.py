"""Data loader of reinforcement learning, which generates new answers when all have been used.

`RolloutLoader` is an ordinary data loader for the `Trainer`, which handles checkpoints, signals,
metrics and reports. Its state is the number of rollouts and the answers that have not been used.
Each random choice depends only on (seed, prompt index, answer index, token index), so answers are
the same for any number of processes and after a resume.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.distributed as dist

from bmforge.align.advantages import compute_advantages, weigh_rewards
from bmforge.align.answer_writer import AnswerWriter
from bmforge.align.policy import Policy
from bmforge.align.rewards import RewardSet
from bmforge.align.rollout_batches import RolloutAnswer, collate_answers, read_rows
from bmforge.align.rollout_config import PromptRow, RolloutConfig
from bmforge.align.rollout_metrics import measure_rollout
from bmforge.align.token_advantages import set_token_advantages
from bmforge.align.tool_turns import ToolTurns
from bmforge.batch import Batch
from bmforge.data.load.order import derive_key, permute
from bmforge.errors import ConfigError

__all__ = ["RolloutLoader", "RolloutRanks", "Scores"]


class RolloutRanks(NamedTuple):
    """Position of a process in the layout of a run.

    Args:
        rank, size: data-parallel rank and size; these ranks train on different rows.
        process, processes: global rank and world size; all processes generate different answers.
    """

    rank: int = 0
    size: int = 1
    process: int = 0
    processes: int = 1


class Scores(Protocol):
    """Interface that computes log-probabilities and values of answers."""

    def score(self, batch: Batch) -> Mapping[str, torch.Tensor]:
        """Return the scores that the run uses: ``old``, ``reference``, ``values``, (B, T) each."""


class RolloutLoader:
    """Endless iterator over optimizer steps; an item is a list of this rank's micro-batches.

    Args:
        prompts: prompts of the run.
        rewards: reward functions; None for distillation, which needs no rewards.
        config: options of the rollouts.
        policy: settings of the policy loss, which determine how rewards become advantages.
        sizes: config with ``global_batch_size`` (answers per optimizer step), ``micro_batch_size``
            and ``seed``.
        decode: function that returns the text for the token ids of an answer.
        ranks: position of this process in the layout.
        tools: runner of the tool calls in answers; None without tools.

    Attributes:
        metrics: metrics of the last rollout, under TRL's names.
        rollouts: number of rollouts so far.

    Raises:
        ConfigError: the sizes do not divide each other.
    """

    is_endless = True

    def __init__(
        self,
        prompts: Sequence[PromptRow],
        rewards: RewardSet | None,
        config: RolloutConfig,
        policy: Policy,
        sizes: Any,
        decode: Callable[[Sequence[int]], str],
        ranks: RolloutRanks = RolloutRanks(),  # noqa: B008
        tools: ToolTurns | None = None,
    ) -> None:
        config.check()
        self._prompts, self._rewards, self._config = prompts, rewards, config
        self._policy, self._sizes, self._decode = policy, sizes, decode
        self._rank, self._world, self._process, self._processes = ranks
        self._tools = tools
        total = sizes.global_batch_size * config.steps_per_generation
        self.prompts_per_rollout, remainder = divmod(total, config.num_generations)
        if remainder:
            raise ConfigError(
                f"data.global_batch_size={sizes.global_batch_size} times "
                f"rollout.steps_per_generation={config.steps_per_generation} must be a multiple "
                f"of rollout.num_generations={config.num_generations}. Change one of the three "
                "values."
            )
        self._writer: AnswerWriter | None = None
        self._scores: Scores | None = None
        self._watch: Callable[[int, Sequence[RolloutAnswer], Mapping[str, Any]], None] | None = None
        self._answers: list[RolloutAnswer] = []
        self._used = 0  # number of optimizer steps that have used the current answers
        self.rollouts = 0
        self._max_steps = 0
        self.metrics: dict[str, float] = {}

    @property
    def steps_per_rollout(self) -> int:
        """Number of optimizer steps that train on one rollout."""
        return self._config.steps_per_generation * self._config.num_iterations

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the log-probabilities and values in every micro-batch."""
        needs_old = self.steps_per_rollout > 1 and self._rewards is not None
        needs_reference = bool(self._policy.beta)
        has_values = self._policy.advantage == "gae"
        pairs = (("old", needs_old), ("reference", needs_reference), ("values", has_values))
        names = [name for name, is_needed in pairs if is_needed]
        return ("sampler", *names, *(["returns"] if has_values else []))

    def begin(
        self,
        writer: AnswerWriter,
        scores: Scores | None,
        watch: Callable[[int, Sequence[RolloutAnswer], Mapping[str, Any]], None] | None = None,
        max_steps: int = 0,
    ) -> None:
        """Set the answer generator and the scorer, which are created after the model.

        Args:
            writer: generator of answers.
            scores: object that computes log-probabilities and values; None if they are not needed.
            watch: function to call with (first step, answers, metrics) after every rollout.
            max_steps: number of optimizer steps of the run, for reward functions.
        """
        self._writer, self._scores, self._watch = writer, scores, watch
        self._max_steps = max_steps

    def __iter__(self) -> Iterator[list[Batch]]:
        return self

    def __next__(self) -> list[Batch]:
        """Return the micro-batches of the next optimizer step, after a rollout if necessary."""
        if not self._answers or self._used == self.steps_per_rollout:
            self._fill()
        step = self._used % self._config.steps_per_generation
        self._used += 1
        return [collate_answers(rows, self.names) for rows in self._divide(step)]

    def _divide(self, step: int) -> Iterator[list[RolloutAnswer | None]]:
        """Yield the answers of each micro-batch of this rank; None is a padding sequence."""
        size, total = self._sizes.micro_batch_size, self._sizes.global_batch_size
        answers = self._answers[step * total : (step + 1) * total]
        for start in range(0, total, size * self._world):
            first = start + self._rank * size
            yield [answers[n] if n < total else None for n in range(first, first + size)]

    def _fill(self) -> None:
        """Generate and score the answers of the next rollout."""
        if self._writer is None:
            raise ConfigError(
                "the RolloutLoader has no answer writer. Call begin(writer, ...) before training."
            )
        first = self.rollouts * self.prompts_per_rollout
        numbers = range(first, first + self.prompts_per_rollout)
        groups = self._gather(self._write(numbers[self._process :: self._processes]))
        self._answers = [answer for _, group in sorted(groups.items()) for answer in group]
        self._used = 0
        self.rollouts += 1
        if self._rewards is not None:
            self._set_rewards(self._rewards)
        is_scored = bool(set(self.names) - {"sampler"})
        scores = self._score_policies() if is_scored else {}
        if self._rewards is not None:
            self._set_advantages(scores)
        names = [] if self._rewards is None else self._rewards.names
        failures = {} if self._rewards is None else dict(self._rewards.failures)
        everywhere = self._gather({self._process: failures})
        self.metrics = measure_rollout(self._answers, names, self._config, everywhere)
        if self._watch is not None:
            step = (self.rollouts - 1) * self.steps_per_rollout + 1
            self._watch(step, self._answers, self.metrics)

    def prompt(self, number: int) -> PromptRow:
        """Return a prompt by its index in the run; every epoch has a new random order."""
        epoch, index = divmod(number, len(self._prompts))
        key = derive_key("prompts", self._sizes.seed, epoch)
        return self._prompts[int(permute(np.array([index]), len(self._prompts), key)[0])]

    def _write(self, numbers: Sequence[int]) -> dict[int, list[RolloutAnswer]]:
        """Generate answers with their rewards; return a dict from prompt index to answers."""
        assert self._writer is not None
        rows = [self.prompt(number) for number in numbers]
        keys = [derive_key("answers", self._sizes.seed, number) for number in numbers]
        seeds = [int.from_bytes(key[:8], "little") >> 1 for key in keys]
        groups = self._writer.write([row.ids for row in rows], seeds, self._config.num_generations)
        answers = [
            RolloutAnswer(
                number,
                list(row.ids),
                list(completion.ids),
                self._decode(completion.ids),
                [token.logprob for token in completion.logprobs or ()],
                completion.finish_reason,
            )
            for number, row, group in zip(numbers, rows, groups, strict=True)
            for completion in group
        ]
        each = [row for row in rows for _ in range(self._config.num_generations)]
        if self._tools is not None:
            limit = self._config.max_new_tokens
            self._tools.continue_answers(
                answers, each, self._writer, limit, partial(self._turn_seed, answers)
            )
        if self._rewards is not None:
            self._reward(self._rewards, answers, each)
        return {number: [a for a in answers if a.prompt == number] for number in numbers}

    def _turn_seed(self, answers: Sequence[RolloutAnswer], index: int, turn: int) -> int:
        """Return the seed of a turn, derived from the indices of prompt, answer and turn."""
        number, own = answers[index].prompt, index % self._config.num_generations
        key = derive_key("turns", self._sizes.seed, number, own, turn)
        return int.from_bytes(key[:8], "little") >> 1

    def _reward(
        self, rewards: RewardSet, answers: Sequence[RolloutAnswer], rows: Sequence[PromptRow]
    ) -> None:
        names = sorted({name for row in rows for name in row.columns})
        is_chat = [not isinstance(row.content, str) for row in rows]
        messages = [
            answer.messages or [{"role": "assistant", "content": answer.text}] for answer in answers
        ]
        batch: dict[str, Any] = {
            "prompts": [row.content for row in rows],
            "completions": [
                message if chat else answer.text
                for answer, message, chat in zip(answers, messages, is_chat, strict=True)
            ],
            "completion_ids": [answer.ids for answer in answers],
            **{name: [row.columns.get(name) for row in rows] for name in names},
        }
        done = self.rollouts * self.steps_per_rollout
        state = {"global_step": done, "max_steps": self._max_steps}
        scored, logged = rewards.score_and_log(batch, state, [row.template_options for row in rows])
        for name, values in scored.items():
            for answer, value in zip(answers, values, strict=True):
                answer.rewards[name] = value
        for number, answer in enumerate(answers):
            answer.logged = {name: values[number] for name, values in logged.columns.items()}
            answer.logged_metrics = dict(logged.metrics)

    def _gather(self, own: dict[int, Any]) -> dict[int, Any]:
        """Return a dict with the entries of all ranks' dicts `own`.

        Comm: an all-gather of objects over the data-parallel ranks.
        """
        if self._processes == 1:
            return own
        parts: list[Any] = [None] * self._processes
        dist.all_gather_object(parts, own)
        return {number: value for part in reversed(parts) for number, value in part.items()}

    def _set_rewards(self, rewards: RewardSet) -> None:
        """Set each answer's weighted reward, minus a penalty for length; check that one exists."""
        names, limit = rewards.names, self._config.max_new_tokens
        table = [[a.rewards[name] for a in self._answers] for name in names]
        plain = [[torch.nan if v is None else v for v in row] for row in table]
        values = torch.tensor(plain, dtype=torch.float64).view(len(names), 1, -1)
        weights = torch.tensor(rewards.weights, dtype=torch.float64)
        soft = self._config.overlong_tokens
        for answer, total in zip(
            self._answers, weigh_rewards(values, weights)[0].tolist(), strict=True
        ):
            answer.reward = None if total != total else total
            if answer.reward is not None and soft:
                answer.reward -= max(0.0, (len(answer.ids) - (limit - soft)) / soft)
            is_cut = answer.finish_reason != "stop"
            is_left_out = is_cut and self._config.mask_truncated_completions
            answer.is_masked = answer.reward is None or is_left_out
        has_reward = any(answer.reward is not None for answer in self._answers)
        failures = self._gather({self._process: rewards.last_failure})
        is_last = 0 < self._max_steps <= self.rollouts * self.steps_per_rollout
        rewards.check_scored(has_reward, list(failures.values()), self.rollouts, is_last)

    def _score_policies(self) -> dict[str, dict[int, list[float]]]:
        """Set the answers' log-probabilities and values; return those that advantages depend on.

        The forward passes use the micro-batches of the update, so that the ratio of the first
        update is exactly 1: other shapes could lead to slightly different results.

        Returns:
            dict with ``kl`` and ``values``, each a dict from answer index to the values of its
            tokens

        Comm: an all-gather of objects, if there are several ranks.
        """
        assert self._scores is not None
        numbers = {id(answer): number for number, answer in enumerate(self._answers)}
        tables: dict[str, dict[int, list[float]]] = {"kl": {}, "values": {}}
        for step in range(self._config.steps_per_generation):
            for rows in self._divide(step):
                scores = dict(self._scores.score(collate_answers(rows, ("sampler",))))
                for name in ("old", "reference", "values"):
                    if name in scores:
                        for answer, values in read_rows(rows, scores[name]):
                            setattr(answer, name, values)
                if "old" in scores and "reference" in scores:
                    scores["kl"] = scores["old"] - scores["reference"]
                for name in tables.keys() & scores.keys():
                    for answer, values in read_rows(rows, scores[name]):
                        tables[name][numbers[id(answer)]] = values
        needed = {"kl": self._policy.kl_in == "reward", "values": "values" in self.names}
        return {name: self._gather(tables[name]) for name in tables if needed[name]}

    def _set_advantages(self, scores: Mapping[str, Mapping[int, list[float]]]) -> None:
        """Compute and set the advantage of every token.

        A group's statistics include the rewards of truncated answers that are left out of the loss.
        """
        answers, policy = self._answers, self._policy
        rewards = torch.tensor(
            [torch.nan if a.reward is None else a.reward for a in answers], dtype=torch.float64
        )
        is_masked = torch.tensor([a.is_masked for a in answers])
        if policy.advantage in ("gae", "whitened"):
            set_token_advantages(answers, rewards.where(~is_masked, torch.nan), scores, policy)
            return
        if policy.kl_in == "reward" and policy.beta:
            sums = [sum(scores["kl"][n]) for n in range(len(answers))]
            rewards -= policy.beta * torch.tensor(sums)
        groups = rewards.view(-1, self._config.num_generations)
        advantages = compute_advantages(groups, policy.advantage).flatten()
        for answer, advantage in zip(
            answers, advantages.where(~is_masked, 0).tolist(), strict=True
        ):
            answer.advantage = [advantage] * len(answer.ids)

    def state_dict(self) -> dict[str, Any]:
        """Return the number of finished rollouts, and the answers that are still needed."""
        is_used = self._used == self.steps_per_rollout
        return {
            "rollouts": self.rollouts,
            "used": 0 if is_used else self._used,
            "answers": [] if is_used else [a.to_state() for a in self._gather_answers()],
            "metrics": {} if is_used else self.metrics,
            "unscored": self._rewards.unscored if self._rewards else 0,
            **self._identity(),
        }

    def _gather_answers(self) -> list[RolloutAnswer]:
        """Return all answers, including the log-probabilities that other ranks have computed.

        Comm: an all-gather of objects, if there are several ranks.
        """
        if self._processes == 1 or not self._answers:
            return self._answers
        steps = range(self._config.steps_per_generation)
        own = {
            id(a) for step in steps for rows in self._divide(step) for a in rows if a is not None
        }
        answers = {n: a for n, a in enumerate(self._answers) if id(a) in own}
        self._answers = [answer for _, answer in sorted(self._gather(answers).items())]
        return self._answers

    def _identity(self) -> dict[str, Any]:
        digest = derive_key("prompt ids", *(str(row.ids) for row in self._prompts))
        config = self._config
        sizes = (config.num_generations, config.steps_per_generation, config.num_iterations)
        return {
            "seed": self._sizes.seed,
            "dataset": digest.hex()[:32],
            "sizes": [self._sizes.global_batch_size, *sizes],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume exactly after the last step of a saved run, with any number of ranks.

        Raises:
            ConfigError: the state belongs to other prompts, another seed or other sizes.
        """
        for key, value in self._identity().items():
            if state.get(key) != value:
                raise ConfigError(
                    f"the checkpoint has {key}={state.get(key)}, but this run has "
                    f"{key}={value}, so the rollouts cannot be resumed. Restore the prompts and "
                    "options, or start a new run."
                )
        self.rollouts, self._used = state["rollouts"], state["used"]
        self._answers = [RolloutAnswer(**values) for values in state["answers"]]
        self.metrics = dict(state["metrics"])
        if self._rewards is not None:
            self._rewards.unscored = state.get("unscored", 0)
