"""Metrics of a rollout under TRL's names, and the log of its answers."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bmforge.align.rollout_batches import RolloutAnswer

__all__ = ["CompletionLog", "measure_rollout", "metric_names"]

FILE_NAME = "completions.jsonl"


def measure_rollout(
    answers: Sequence[RolloutAnswer],
    names: Sequence[str],
    config: Any,
    failures: Mapping[int, Mapping[str, int]],
) -> dict[str, float]:
    """Compute the metrics of a rollout: rewards, lengths, and fractions of answers.

    Args:
        answers: all answers, grouped by prompt.
        names: names of the reward functions.
        config: the `RolloutConfig`.
        failures: number of failed calls of each reward function, one dict per rank.
    """
    size = config.num_generations
    groups = [[a.reward for a in answers[n : n + size]] for n in range(0, len(answers), size)]
    scored = [[reward for reward in group if reward is not None] for group in groups]
    rewards = [reward for group in scored for reward in group]
    lengths = [sum(answer.mask) for answer in answers]
    ended = [sum(answer.mask) for answer in answers if answer.finish_reason == "stop"]
    metrics = _mean_logged(answers)
    metrics["completions/clipped_ratio"] = 1 - len(ended) / len(answers)
    if names:
        metrics["frac_reward_zero_std"] = statistics.fmean(len(set(group)) < 2 for group in scored)
        metrics["frac_scored"] = len(rewards) / len(answers)
    if rewards:
        metrics["reward"] = statistics.fmean(rewards)
        metrics["reward_std"] = statistics.fmean(_deviate(group) for group in scored)
    for name in names:
        values = [v for v in (answer.rewards[name] for answer in answers) if v is not None]
        if values:
            metrics[f"rewards/{name}/mean"] = statistics.fmean(values)
            metrics[f"rewards/{name}/std"] = _deviate(values)
        metrics[f"rewards/{name}/failures"] = sum(counts[name] for counts in failures.values())
    if config.tools:
        calls = sum(answer.tool_calls for answer in answers)
        failures_of_tools = sum(answer.tool_failures for answer in answers)
        metrics["tools/call_frequency"] = calls / len(answers)
        metrics["tools/failure_frequency"] = failures_of_tools / max(1, calls)
    for kind, some in (("", lengths), ("terminated_", ended)):
        if some:
            metrics[f"completions/mean_{kind}length"] = statistics.fmean(some)
            metrics[f"completions/min_{kind}length"] = min(some)
            metrics[f"completions/max_{kind}length"] = max(some)
    return metrics


def _mean_logged(answers: Sequence[RolloutAnswer]) -> dict[str, float]:
    """Return a dict from each metric that reward functions logged to its mean over answers."""
    names = sorted({name for answer in answers for name in answer.logged_metrics})
    return {
        name: statistics.fmean(
            answer.logged_metrics[name] for answer in answers if name in answer.logged_metrics
        )
        for name in names
    }


def metric_names(names: Sequence[str]) -> list[str]:
    """Return the names of the metrics that every rollout has.

    Args:
        names: names of the reward functions.
    """
    kinds = [
        f"{end}_{kind}length" for kind in ("", "terminated_") for end in ("mean", "min", "max")
    ]
    return [
        *("reward", "reward_std", "frac_reward_zero_std", "frac_scored"),
        *("tools/call_frequency", "tools/failure_frequency"),
        *(f"rewards/{name}/{end}" for name in names for end in ("mean", "std", "failures")),
        *(f"completions/{kind}" for kind in ("clipped_ratio", *kinds)),
    ]


def _deviate(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


class CompletionLog:
    """Log of prompts, answers, rewards and advantages in ``completions.jsonl``.

    Args:
        run_dir: directory of the run.
        prompts: number of prompts per rollout whose answers are written.
        next_step: first step of the next rollout; rows from this step on, which a killed run has
            written, are removed.
    """

    def __init__(self, run_dir: Path, prompts: int, next_step: int) -> None:
        self._file, self._prompts = Path(run_dir) / FILE_NAME, prompts
        if self._file.exists():
            lines = self._file.read_bytes().split(b"\n")
            early = [line for line in lines[:-1] if json.loads(line)["step"] < next_step]
            partial = self._file.with_name(FILE_NAME + ".tmp")
            partial.write_bytes(b"".join(line + b"\n" for line in early))
            os.replace(partial, self._file)

    def write(self, step: int, answers: Sequence[RolloutAnswer], prompts: Sequence[Any]) -> None:
        """Write the answers for the first prompts of a rollout.

        Args:
            step: first step that trains on the answers.
            answers: answers of the rollout.
            prompts: content of each answer's prompt.
        """
        first = sorted({answer.prompt for answer in answers})[: self._prompts]
        rows = [
            {
                "step": step,
                "prompt": prompt,
                "completion": answer.messages or answer.text,
                "rewards": answer.rewards,
                "reward": answer.reward,
                "advantage": answer.advantage[0] if answer.advantage else 0.0,
                "finish_reason": answer.finish_reason,
                **({"logged": answer.logged} if answer.logged else {}),
            }
            for answer, prompt in zip(answers, prompts, strict=True)
            if answer.prompt in first
        ]
        text = "".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)
        with self._file.open("a", encoding="utf-8") as file:
            file.write(text)
