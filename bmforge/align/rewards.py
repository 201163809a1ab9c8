"""Rewards for generated answers: Python functions, verifiers, reward models, HTTP servers.

A reward function has TRL's signature: ``f(prompts, completions, completion_ids, **columns)``
returns one number, or None, per completion; columns are the prompts' other fields. If a call hangs,
raises an error, or returns something else, its answers have no reward: the failure is counted and
logged with the function's name, and the run continues.
"""

from __future__ import annotations

import json
import math
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from bmforge.align.reward_calls import STATE_ARGUMENT, RewardReply, call_reward
from bmforge.align.reward_names import name_of, name_rewards, read_weight
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
# Time limit in seconds for starting a function's process; imports may take long.
_START_TIMEOUT_S = 60.0


class Scorer(Protocol):
    """Interface of reward sources, which score batches of answers.

    If a source has the attribute `renders_prompts` set to True, its batches also have the entry
    `TEMPLATE_OPTIONS` (see `RewardSet.score_and_log`).
    """

    def score(self, batch: Mapping[str, Any], timeout_s: float) -> Any:
        """Return a batch's rewards, or a `RewardReply`; raise an exception if the call fails."""

    def close(self) -> None:
        """Release the processes and models of the source."""


class RewardProcess:
    """Runs a reward function in a separate process, which is killed after a time limit.

    Args:
        spec: specification of the function; see `reward_worker.load_function`.
        timeout_s: time limit for the start in seconds.

    Raises:
        ConfigError: the function cannot be loaded.
    """

    _mode: tuple[str, ...] = ()

    def __init__(self, spec: str, timeout_s: float = 60.0) -> None:
        self.spec = spec
        self.schema: dict[str, Any] | None = None
        self._process: subprocess.Popen[str] | None = None
        self._replies: queue.Queue[str] = queue.Queue()
        self._start(timeout_s)

    def score(self, batch: Mapping[str, Any], timeout_s: float) -> Any:
        """Return a `RewardReply` with the reward of each answer.

        Raises:
            TimeoutError: the function has not returned in time; its process is killed.
            RuntimeError: the function raised an error, or its process has ended.
        """
        return RewardReply(**self._exchange(batch, timeout_s))

    def _exchange(self, values: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """Send a call and return the reply; start the process if it has ended."""
        if self._process is None or self._process.poll() is not None:
            self._start(_START_TIMEOUT_S)
        process = self._process
        assert process is not None
        assert process.stdin is not None
        # Write in a thread, since the call would block if the process does not read.
        line = json.dumps(values, default=str) + "\n"
        threading.Thread(target=_write, args=(process, line), daemon=True).start()
        reply = self._read(timeout_s)
        if "error" in reply:
            raise RuntimeError(reply["error"])
        return reply

    def close(self) -> None:
        """Kill the process, and the programs that the function has started."""
        if self._process is not None:
            if hasattr(os, "killpg"):
                with suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)  # the process leads its group
            self._process.kill()
            self._process.wait()
            self._process = None

    def _start(self, timeout_s: float) -> None:
        root = str(Path(__file__).resolve().parents[2])
        paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bmforge.align.reward_worker", self.spec, *self._mode],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            # Ctrl-C must not reach the process; `close` kills the whole new process group.
            start_new_session=True,
        )
        self._replies = queue.Queue()
        reader = threading.Thread(
            target=_read_lines, args=(self._process, self._replies), daemon=True
        )
        reader.start()
        try:
            reply = self._read(timeout_s)
        except (TimeoutError, RuntimeError) as error:
            raise ConfigError(
                f"the process of the function {self.spec!r} did not start: {error} Check the "
                "imports of its module."
            ) from error
        if "error" in reply:
            self.close()
            raise ConfigError(reply["error"])
        self.schema = reply.get("schema")

    def _read(self, timeout_s: float) -> dict[str, Any]:
        try:
            line = self._replies.get(timeout=timeout_s)
        except queue.Empty:
            self.close()
            raise TimeoutError(
                f"the function {self.spec!r} ran longer than {timeout_s:g} seconds. Raise "
                "reward_timeout_s, or make the function faster."
            ) from None
        if not line:
            self.close()
            raise RuntimeError(
                f"the process of {self.spec!r} exited without a result. Check that the function "
                "does not end the process."
            )
        reply: dict[str, Any] = json.loads(line)
        return reply


class ToolProcess(RewardProcess):
    """Runs a tool function in a separate process, which is killed after a time limit.

    Args:
        spec: ``module:function`` or ``file.py:function``.

    Attributes:
        schema: JSON schema of the function.

    Raises:
        ConfigError: the function cannot be loaded.
    """

    _mode = ("tool",)

    def call(self, arguments: Mapping[str, Any], timeout_s: float) -> str:
        """Call the function; return its result as text.

        Raises:
            TimeoutError: the function has not returned in time; its process is killed.
            RuntimeError: the function raised an error, or its process has ended.
        """
        return str(self._exchange(arguments, timeout_s)["result"])


def _read_lines(process: subprocess.Popen[str], replies: queue.Queue[str]) -> None:
    """Put the output lines of a process into a queue, and an empty line when the output ends."""
    assert process.stdout is not None
    for line in process.stdout:
        replies.put(line)
    replies.put("")


def _write(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    with suppress(OSError, ValueError):  # the process has ended, which the reader reports
        process.stdin.write(line)
        process.stdin.flush()


class CallableReward:
    """Reward source that calls a Python function in a thread; a hanging call is abandoned.

    Args:
        function: reward function with TRL's signature, sync or async.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

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
            raise RuntimeError(f"the reward function raised {error!r}.") from error
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
            what = f"{len(wrong)} of {count} rewards are not finite numbers, such as {wrong[0]!r}"
            self._report(name, what)
        return rewards, reply

    def _report(self, name: str, what: str) -> None:
        self.failures[name] += 1
        get_logger().warning(
            "reward %s failed (%d times so far), so the answers get no score from this reward: %s.",
            *(name, self.failures[name], what.rstrip(".")),
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
