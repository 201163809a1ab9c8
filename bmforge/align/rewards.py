"""Rewards for generated answers: Python functions, verifiers, reward models, HTTP servers.

A reward function has TRL's signature: ``f(prompts, completions, completion_ids, **columns)``
returns one number, or None, per completion; columns are the prompts' other fields. If a call hangs,
raises an error, or returns something else, its answers have no reward: the failure is counted and
logged with the function's name, and the run continues.
"""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

from bmforge.align.reward_calls import (
    STATE_ARGUMENT,
    RewardReply,
    call_reward,
    describe_error,
    find_required_columns,
)
from bmforge.align.reward_names import name_of, name_rewards, read_weight
from bmforge.align.reward_process import RewardProcess, ToolProcess
from bmforge.errors import ConfigError
from bmforge.logging import get_logger

__all__ = [
    "CallableReward",
    "RewardProcess",
    "RewardSet",
    "Scorer",
    "TEMPLATE_OPTIONS",
    "ToolProcess",
    "open_rewards",
]

Rewards = list[float | None]
# Entry of a reward model's batch: tools and template variables of each prompt.
TEMPLATE_OPTIONS = "template_options"
# Number of rollouts in a row without any reward after which a run ends with an error.
_MAX_UNSCORED = 3


class Scorer(Protocol):
    """Interface of reward sources, which score batches of answers.

    If a source has the attribute `renders_prompts` set to True, its batches also have the entry
    `TEMPLATE_OPTIONS` (see `RewardSet.score_and_log`).
    """

    def score(self, batch: Mapping[str, Any], timeout_s: float) -> Any:
        """Return a batch's rewards, or a `RewardReply`; raise an exception if the call fails."""

    def close(self) -> None:
        """Release the processes and models of the source."""


class CallableReward:
    """Reward source that calls a Python function in a thread; a hanging call is abandoned.

    Args:
        function: reward function with TRL's signature, sync or async.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.required_columns = find_required_columns(function)

    def score(self, batch: Mapping[str, Any], timeout_s: float) -> Any:
        """Return a `RewardReply`; raise the function's exception or `TimeoutError`."""
        results: queue.Queue[tuple[Any, BaseException | None]] = queue.Queue()

        def work() -> None:
            try:
                results.put((call_reward(self._function, batch), None))
            except BaseException as error:  # a user's function may raise anything
                results.put((None, error))

        threading.Thread(target=work, daemon=True).start()
        try:
            out, error = results.get(timeout=timeout_s)
        except queue.Empty:
            raise TimeoutError(
                f"the reward function ran longer than {timeout_s:g} seconds. Raise "
                "reward_timeout_s, or make the function faster."
            ) from None
        if error is not None:
            raise RuntimeError(describe_error(error)) from error
        return out

    def close(self) -> None:
        """Do nothing, because a function in this process has no resources to release."""


class RewardSet:
    """Named, weighted reward sources of a run.

    Args:
        sources: dict from name to reward source, in the order of the weights.
        weights: weight of each source in the sum.
        timeout_s: time limit for a call in seconds.

    Attributes:
        failures: dict from source name to the number of failed calls.
        last_failure: description of the last failed call of this rollout; empty if none failed.
        unscored: number of rollouts in a row without any reward.
    """

    def __init__(
        self, sources: Mapping[str, Scorer], weights: Sequence[float], timeout_s: float = 60.0
    ) -> None:
        if not sources:
            raise ConfigError(
                "no reward is set. Pass --reward module:function, or a verifier such as "
                "--reward exact:answer."
            )
        self._sources, self.weights, self._timeout_s = dict(sources), list(weights), timeout_s
        self.failures = dict.fromkeys(self._sources, 0)
        self.last_failure, self.unscored = "", 0

    @property
    def names(self) -> list[str]:
        """Names of the reward functions."""
        return list(self._sources)

    def score(self, batch: Mapping[str, Any]) -> dict[str, Rewards]:
        """Return a dict from source name to rewards; see `score_and_log`."""
        return self.score_and_log(batch)[0]

    def score_and_log(
        self,
        batch: Mapping[str, Any],
        state: Mapping[str, int] | None = None,
        template_options: Sequence[Mapping[str, Any]] = (),
    ) -> tuple[dict[str, Rewards], RewardReply]:
        """Return the rewards of every source, None for unscored answers, and the logged values.

        Args:
            batch: ``prompts``, ``completions``, ``completion_ids`` and columns, of equal lengths.
            state: fields of ``trainer_state``, for functions that accept it.
            template_options: for each prompt, the tools and variables with which the policy's chat
                template rendered it; only reward models get them, since functions have the columns.

        Returns:
            dict from source name to rewards, and a reply with the columns and metrics that the
            sources logged
        """
        if state is not None:
            batch = {**batch, STATE_ARGUMENT: dict(state)}
        logged, rewards = RewardReply(None, {}, {}), {}
        rendered = {**batch, TEMPLATE_OPTIONS: template_options}
        for name, source in self._sources.items():
            arguments = rendered if getattr(source, "renders_prompts", False) else batch
            rewards[name], reply = self._score(name, arguments, len(batch["completions"]))
            logged.columns.update(reply.columns)
            logged.metrics.update(reply.metrics)
        return rewards, logged

    def _score(
        self, name: str, batch: Mapping[str, Any], count: int
    ) -> tuple[Rewards, RewardReply]:
        nothing = RewardReply([], {}, {})
        if not count:
            return [], nothing
        try:
            out = self._sources[name].score(batch, self._timeout_s)
            reply = out if isinstance(out, RewardReply) else nothing._replace(rewards=out)
            values = list(reply.rewards)
        except Exception as error:  # a reward must never stop the run
            self._report(name, f"{error}")
            return [None] * count, nothing
        if len(values) != count:
            self._report(name, f"the function returned {len(values)} rewards for {count} answers")
            return [None] * count, nothing
        rewards = [_read_reward(value) for value in values]
        wrong = [v for v, r in zip(values, rewards, strict=True) if r is None and v is not None]
        if wrong:
            self._report(
                name,
                f"{len(wrong)} of {count} rewards are not finite numbers, such as "
                f"{wrong[0]!r:.80} (expected numbers or None)",
            )
        return rewards, reply

    def _report(self, name: str, what: str) -> None:
        self.failures[name] += 1
        self.last_failure = f"{name}: {what.rstrip('.')}"
        get_logger().warning(
            "reward %s failed (%d times so far), so the answers get no score from this reward: %s.",
            *(name, self.failures[name], what.rstrip(".")),
        )

    def check_columns(self, columns: Collection[str]) -> None:
        """Raise `ConfigError` if a function has a required argument that is no column.

        Args:
            columns: names of the prompts' columns.
        """
        for name, source in self._sources.items():
            for column in getattr(source, "required_columns", ()):
                if column not in columns:
                    raise ConfigError(
                        f"the function {name} needs the column {column!r} (columns: "
                        f"{', '.join(sorted(columns)) or 'none'}). Add the column to the data, or "
                        "give the argument a default."
                    )

    def check_scored(
        self, has_reward: bool, failures: Sequence[str], rollouts: int, is_last: bool
    ) -> None:
        """Count rollouts without any reward; raise an error if the run cannot learn.

        A single failed rollout is allowed, since a reward server may be down for a short time.

        Args:
            has_reward: whether an answer of the rollout has a reward.
            failures: last failure of every rank; empty texts for ranks without failures.
            rollouts: number of rollouts of the run so far.
            is_last: whether the rollout is the last of the run.

        Raises:
            ConfigError: all calls of `_MAX_UNSCORED` rollouts in a row failed, or the run ends and
                no rollout had a reward.
        """
        self.unscored = 0 if has_reward else self.unscored + 1
        last = next(filter(None, failures), "")
        self.last_failure = ""
        is_failing = self.unscored >= _MAX_UNSCORED and bool(last)
        if has_reward or not (is_failing or (is_last and self.unscored >= rollouts)):
            return
        reason = f"the last failure is {last}" if last else "the functions returned only None"
        raise ConfigError(
            f"no answer of the last {self.unscored} rollouts has a reward, so the model is not "
            f"trained ({reason}). Correct the reward function or the data."
        )

    def close(self) -> None:
        """Close all sources."""
        for source in self._sources.values():
            source.close()


def _read_reward(value: Any) -> float | None:
    """Convert a reward to a finite number; None for any other value."""
    try:
        number = None if value is None or isinstance(value, str | bytes) else float(value)
    except Exception:  # a huge integer, or any error of an object's conversion
        return None
    return number if number is not None and math.isfinite(number) else None


def open_rewards(
    rewards: Sequence[str | Callable[..., Any]],
    timeout_s: float = 60.0,
    open_model: Callable[[str], Scorer] | None = None,
) -> RewardSet:
    """Load the reward functions of a run.

    Args:
        rewards: functions, or specifications ``NAME[=WEIGHT]``: ``module:function``,
            ``file.py:function``, a verifier such as ``exact:answer``, ``dir:REWARD_MODEL``, or an
            HTTP address.
        timeout_s: time limit for a call in seconds.
        open_model: function that loads a reward model from its directory.

    Raises:
        ConfigError: no reward is given, or a reward cannot be loaded.
    """
    if not 0 < timeout_s <= threading.TIMEOUT_MAX:
        raise ConfigError(f"reward_timeout_s={timeout_s} must be above 0, and finite.")
    sources: dict[str, Scorer] = {}
    pairs = [read_weight(r) if isinstance(r, str) else (name_of(r), 1.0) for r in rewards]
    names = name_rewards([spec for spec, _ in pairs])
    try:
        for reward, name, (spec, weight) in zip(rewards, names, pairs, strict=True):
            sources[name] = _open(reward if callable(reward) else spec, timeout_s, open_model)
            get_logger().info("reward %s: %s, with weight %g", name, spec, weight)
        return RewardSet(sources, [weight for _, weight in pairs], timeout_s)
    except BaseException:
        for source in sources.values():
            source.close()
        raise


def _open(
    reward: str | Callable[..., Any],
    timeout_s: float,
    open_model: Callable[[str], Scorer] | None,
) -> Scorer:
    if not isinstance(reward, str):
        return CallableReward(reward)
    if reward.startswith("dir:"):
        if open_model is None:
            raise ConfigError(
                f"--reward {reward} names a reward model, but open_model=None, so no reward "
                "model can be loaded. Pass open_model, or a reward function."
            )
        return open_model(reward.removeprefix("dir:"))
    return RewardProcess(reward, timeout_s)
