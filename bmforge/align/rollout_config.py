"""Options of rollouts, and the type of their prompts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bmforge.errors import ConfigError
from bmforge.value_ranges import check_values

__all__ = ["PromptRow", "RolloutConfig"]


@dataclass(frozen=True)
class PromptRow:
    """Prompt of a rollout with its token ids.

    Args:
        ids: token ids.
        content: text or messages, as passed to reward functions.
        columns: further fields for reward functions.
        template_options: tools and variables with which the chat template rendered the prompt.
    """

    ids: tuple[int, ...]
    content: Any
    columns: Mapping[str, Any]
    template_options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class RolloutConfig:
    """Options for generating and scoring answers.

    Args:
        num_generations: number of answers that are generated for each prompt.
        max_new_tokens: maximum length of an answer in tokens.
        temperature: sampling temperature; the same divisor of the logits is used in the loss.
            Top-k, top-p and penalties have no options, because the sampled policy would differ from
            the trained policy.
        steps_per_generation: number of optimizer steps for which one rollout generates answers.
        num_iterations: number of training epochs over the answers of a rollout.
        mask_truncated_completions: leave answers that reached max_new_tokens out of the loss; their
            rewards still count in the mean and standard deviation of their group.
        overlong_tokens: number of tokens before max_new_tokens over which a length penalty on the
            reward rises linearly from 0 to 1 (DAPO); 0 disables the penalty.
        max_num_seqs: maximum number of answers that are generated concurrently.
        tools: functions that the model may call, as module:function or file.py:function, with type
            annotations and a docstring; prompts must be conversations (if empty: no tools).
        max_turns: maximum number of turns that the model writes in a conversation with tools, at
            least 2.
        tool_timeout_s: time limit in seconds for a tool call.
        exact_logprobs: compute the log-probabilities in the loss with the kernels of the sampler,
            so that the ratio of sampler and trained policy is exactly 1 at the first update. For
            CPUs; costs one more forward pass per update.
        log_completions: number of prompts per rollout whose answers are written to
            ``completions.jsonl``.
    """

    num_generations: int = 8
    max_new_tokens: int = 512
    temperature: float = 1.0
    steps_per_generation: int = 1
    num_iterations: int = 1
    mask_truncated_completions: bool = False
    overlong_tokens: int = 0
    max_num_seqs: int = 64
    tools: tuple[str, ...] = ()
    max_turns: int = 5
    tool_timeout_s: float = 10.0
    exact_logprobs: bool = False
    log_completions: int = 4

    def check(self) -> None:
        """Raise `ConfigError` for a number out of range."""
        check_values(self, "rollout.")
        wrong = []
        if self.max_turns < 2 and self.tools:
            wrong.append(
                f"rollout.max_turns={self.max_turns} must be at least 2 if rollout.tools is set"
            )
        for name in ("max_turns", "tool_timeout_s"):
            value = getattr(self, name)
            if not self.tools and value != getattr(RolloutConfig, name):
                wrong.append(f"rollout.{name}={value} has no effect without rollout.tools")
        if self.overlong_tokens > self.max_new_tokens:
            wrong.append(
                f"rollout.overlong_tokens={self.overlong_tokens} must be at most "
                f"rollout.max_new_tokens={self.max_new_tokens}"
            )
        if self.num_generations > self.max_num_seqs:
            wrong.append(
                f"rollout.max_num_seqs={self.max_num_seqs} must be at least "
                f"rollout.num_generations={self.num_generations}"
            )
        if wrong:
            raise ConfigError(f"{'; '.join(wrong)}.")
