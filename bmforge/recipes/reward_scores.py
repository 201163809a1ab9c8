"""Scores answers with outcome reward models (whole answers) or process reward models (steps)."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from bmforge.align.reward_names import read_weight
from bmforge.align.rewards import TEMPLATE_OPTIONS, RewardSet, open_rewards
from bmforge.align.verifiers import COLUMN_KINDS, missing_column
from bmforge.batch import IGNORE_INDEX
from bmforge.data.sources.preferences import PreferenceExample
from bmforge.data.sources.step_labels import StepExample
from bmforge.errors import ConfigError
from bmforge.files import find_export
from bmforge.logging import get_logger
from bmforge.models import AutoModel
from bmforge.models.adapter_dirs import head_of_adapter, is_adapter
from bmforge.models.hub import find_model
from bmforge.recipes.inputs.conversation_rows import EncodedRow
from bmforge.recipes.inputs.preference_rows import encode_preference
from bmforge.recipes.inputs.step_rows import encode_steps, split_steps
from bmforge.tokenizers import AutoTokenizer
from bmforge.tokenizers.chat_messages import THOUGHT_FIELDS
from bmforge.tokenizers.chat_template import ChatTemplate, find_template

__all__ = [
    "PROCESS_HEAD",
    "STEP_FILE",
    "STEP_SEPARATOR",
    "ProcessRewardModel",
    "RewardModel",
    "StepAggregation",
    "check_columns",
    "open_reward_model",
    "open_reward_sources",
]

# Fields of messages that are not checked, or that all templates read.
_FIELDS = frozenset(("role", "content", "tool_calls", "tool_call_id", "weight", *THOUGHT_FIELDS))
# Number of answers per forward pass.
_ROWS = 8
_HEAD, PROCESS_HEAD = "sequence_classification", "token_classification"
# File that contains the separator of a process reward model, and the default without this file.
STEP_FILE, STEP_SEPARATOR = "process_reward.json", "\n"

StepAggregation = Literal["min", "product", "mean", "last"]


def open_reward_sources(
    rewards: Sequence[str | Callable[..., Any]],
    timeout_s: float,
    aggregation: StepAggregation | None,
    device: torch.device | str,
) -> RewardSet:
    """Load the reward functions and reward models of a run.

    Args:
        rewards, timeout_s: see `open_rewards`.
        aggregation: how process reward models combine the rewards of the steps (default: min).
        device: device of reward models.

    Raises:
        ConfigError: see `open_rewards`, or `aggregation` has no effect.
    """
    models: list[_Scorer] = []

    def open_model(name: str) -> _Scorer:
        models.append(open_reward_model(name, aggregation, device))
        return models[-1]

    sources = open_rewards(rewards, timeout_s, open_model)
    if aggregation is not None and not any(isinstance(m, ProcessRewardModel) for m in models):
        sources.close()
        raise ConfigError(
            f"step_aggregation={aggregation!r} has no effect: no reward is a process reward model. "
            "Leave it out."
        )
    return sources


def check_columns(rewards: Sequence[str | Callable[..., Any]], columns: Collection[str]) -> None:
    """Raise `ConfigError` if a verifier compares with a column that no prompt has.

    Args:
        rewards: see `open_rewards`.
        columns: names of the prompts' columns.
    """
    for reward in rewards:
        if isinstance(reward, str):
            kind, _, column = read_weight(reward)[0].partition(":")
            if kind in COLUMN_KINDS and column and column not in columns:
                raise missing_column(column, columns)


def open_reward_model(
    name: str, aggregation: StepAggregation | None = None, device: torch.device | str = "cpu"
) -> _Scorer:
    """Open a reward model as a source of rewards; its weights are loaded for the first answers.

    Args:
        name: directory, hub id or short name of the reward model.
        aggregation: how a process reward model combines the rewards of the steps (default: min).
        device: device of the model.

    Raises:
        ConfigError: the model is neither a sequence classifier with one output nor a token
            classifier with two classes.
    """
    directory = Path(find_export(find_model(name)))
    if is_adapter(directory):
        head, labels = head_of_adapter(directory) or (None, None)
    else:
        sizes = AutoModel.describe_pretrained(directory)[0].config
        head, labels = sizes.head, getattr(sizes, "num_labels", None)
    if (head, labels) == (PROCESS_HEAD, 2):
        return ProcessRewardModel(directory, device, aggregation or "min")
    if (head, labels) != (_HEAD, 1):
        raise ConfigError(
            f"--reward dir:{name}: the model has the head {head!r} with num_labels={labels} "
            "(needed: a sequence classification model with num_labels=1, or a token "
            "classification model with num_labels=2, as exported by `bmforge train reward`)."
        )
    return RewardModel(directory, device)


class _Scorer:
    """Base class of reward models: loads the tokenizer, and runs batches of encoded answers."""

    renders_prompts = True

    def __init__(self, directory: Path, device: torch.device | str) -> None:
        self._directory, self._device = directory, device
        self._tokenizer = AutoTokenizer.from_pretrained(directory)
        self._template = ChatTemplate(find_template(directory), self._tokenizer)
        self._name, self._unread_options = directory.name, set[str]()

    @cached_property
    def _model(self) -> Any:
        return AutoModel.from_pretrained(self._directory, device=self._device).eval()

    @torch.no_grad()
    def score(self, batch: Mapping[str, Any], timeout_s: float) -> list[float]:
        """Return the reward of each answer; the time limit does not apply to a forward pass."""
        prompts, completions = batch["prompts"], batch["completions"]
        options = batch.get(TEMPLATE_OPTIONS) or [{}] * len(prompts)
        parts = zip(prompts, completions, map(self._read_options, options), strict=True)
        rows = [self._encode(*part) for part in parts]
        rewards: list[float] = []
        for start in range(0, len(rows), _ROWS):
            chunk = rows[start : start + _ROWS]
            rewards += self._read(self._run([row.ids for row in chunk]), chunk)
        return rewards

    def close(self) -> None:
        """Do nothing, since the model has no processes to end."""

    def _read_options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return a prompt's tools, and the variables that the reward model's template reads.

        A template of a reward model may not read all options of the policy's template; the log
        names each of them once.
        """
        values = {name: value for name, value in options.items() if value is not None}
        unread = values.keys() - self._template.variables
        for name in sorted(unread - self._unread_options):
            get_logger().warning(
                "reward model %s: its chat template does not use %s, so the answers are scored "
                "without it.",
                *(self._name, name),
            )
        self._unread_options |= unread
        values = {name: value for name, value in values.items() if name not in unread}
        return {"tools": values.pop("tools", None), "fields": values}

    def _encode(self, prompt: Any, completion: Any, options: Mapping[str, Any]) -> EncodedRow:
        raise NotImplementedError(f"{type(self).__name__} must implement _encode.")

    def _read(self, logits: Tensor, rows: Sequence[EncodedRow]) -> list[float]:
        raise NotImplementedError(f"{type(self).__name__} must implement _read.")

    def _run(self, rows: Sequence[Sequence[int]]) -> Tensor:
        width = max(len(row) for row in rows)
        ids = torch.zeros(len(rows), width, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for number, row in enumerate(rows):
            ids[number, : len(row)] = torch.tensor(row)
            mask[number, : len(row)] = 1
        inputs = {"input_ids": ids.to(self._device), "attention_mask": mask.to(self._device)}
        logits: Tensor = self._model(**inputs).logits.float()
        return logits


class RewardModel(_Scorer):
    """Outcome reward model, which scores answers at the last token of prompt and answer.

    Prompts and answers are encoded as `train reward` encodes pairs, with the tokenizer and the chat
    template of the reward model.

    Args:
        directory: directory of a sequence classifier with one output.
        device: device of the model.
    """

    def _encode(self, prompt: Any, completion: Any, options: Mapping[str, Any]) -> EncodedRow:
        example = PreferenceExample("a completion", prompt, completion, None, **options)
        ignore = _find_unread(prompt, self._template)
        row = encode_preference(example, self._template, self._tokenizer, ignore).chosen
        assert row is not None
        return row

    def _read(self, logits: Tensor, rows: Sequence[EncodedRow]) -> list[float]:
        return logits[:, 0].tolist()


class ProcessRewardModel(_Scorer):
    """Process reward model, which scores the steps of answers.

    The reward of a step is the probability of the class "correct" at the last token of the step's
    separator; the steps of an answer are the texts between separators, encoded as in `train
    reward`.

    Args:
        directory: directory of a token classifier with the classes wrong (0) and correct (1), and
            the separator.
        device: device of the model.
        aggregation: reward of an answer: the minimum, product or mean of its steps' rewards, or
            the reward of the last step.
    """

    def __init__(
        self, directory: Path, device: torch.device | str, aggregation: StepAggregation = "min"
    ) -> None:
        super().__init__(directory, device)
        file = directory / STEP_FILE
        settings = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        self._separator: str = settings.get("step_separator", STEP_SEPARATOR)
        self._aggregation = aggregation

    def _encode(self, prompt: Any, completion: Any, options: Mapping[str, Any]) -> EncodedRow:
        steps = split_steps(_text_of(completion), self._separator)
        # Labels only mark the ends of the steps; their values are not used.
        example = StepExample("a completion", prompt, tuple(steps), (True,) * len(steps), **options)
        ignore = _find_unread(prompt, self._template)
        return encode_steps(example, self._template, self._tokenizer, self._separator, ignore)

    def _read(self, logits: Tensor, rows: Sequence[EncodedRow]) -> list[float]:
        width = max(len(row.ids) for row in rows)  # without the positions of a soft prompt
        table = logits[:, -width:].softmax(-1)[..., 1].tolist()
        return [
            _aggregate(
                [p for p, label in zip(line, row.labels, strict=False) if label != IGNORE_INDEX],
                self._aggregation,
            )
            for line, row in zip(table, rows, strict=True)
        ]


def _find_unread(prompt: Any, template: ChatTemplate) -> list[str]:
    """Return the fields of a prompt's messages that a reward model's template does not read.

    The policy has another template, and its run may ignore fields (`data.ignore`).
    """
    names = {name for message in prompt for name in message} if isinstance(prompt, list) else set()
    return [
        n
        for n in names - _FIELDS
        if n == "name" or not re.search(rf"\b{re.escape(n)}\b", template.source)
    ]


def _text_of(completion: Any) -> str:
    """Return the text of an answer, a string or the assistant's messages, joined in order."""
    if isinstance(completion, str):
        return completion
    contents = [m.get("content") for m in completion if m.get("role") == "assistant"]
    return "".join(text for text in contents if isinstance(text, str))


def _aggregate(rewards: Sequence[float], aggregation: StepAggregation) -> float:
    """Combine the rewards of an answer's steps."""
    if aggregation == "min":
        return min(rewards)
    if aggregation == "product":
        return math.prod(rewards)
    return rewards[-1] if aggregation == "last" else sum(rewards) / len(rewards)
