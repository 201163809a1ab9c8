"""Scores answers with a reward model: a sequence classifier with one output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from bmforge.data.sources.preferences import PreferenceExample
from bmforge.errors import ConfigError
from bmforge.models import AutoModel
from bmforge.models.hub import find_model
from bmforge.recipes.inputs.preference_rows import encode_preference
from bmforge.tokenizers import AutoTokenizer
from bmforge.tokenizers.chat_template import ChatTemplate, find_template

__all__ = ["RewardModel"]

# Answers per forward pass.
_ROWS = 8


class RewardModel:
    """Reward model that scores answers at the last token of prompt and answer.

    Prompts and answers are encoded as `train reward` encodes pairs, with the tokenizer and the chat
    template of the reward model.

    Args:
        name: directory, hub id or short name of the reward model.
        device: device of the model.

    Raises:
        ConfigError: the model has not exactly one output.
    """

    def __init__(self, name: str, device: torch.device | str = "cpu") -> None:
        directory = Path(find_model(name))
        self._model = AutoModel.from_pretrained(directory, device=device).eval()
        config: Any = self._model.config
        if config.head != "sequence_classification" or config.num_labels != 1:
            raise ConfigError(
                f"--reward dir:{name}: the model has the head {config.head!r} with "
                f"num_labels={getattr(config, 'num_labels', None)} (needed: a sequence "
                "classification model with num_labels=1, as exported by `bmforge train "
                "reward`)."
            )
        self._tokenizer = AutoTokenizer.from_pretrained(directory)
        self._template = ChatTemplate(find_template(directory), self._tokenizer)
        self._device = device

    @torch.no_grad()
    def score(self, batch: Mapping[str, Any], timeout_s: float) -> list[float]:
        """Return the reward of each answer; the time limit does not apply to a forward pass."""
        pairs = zip(batch["prompts"], batch["completions"], strict=True)
        rows = [self._encode(prompt, completion) for prompt, completion in pairs]
        rewards: list[float] = []
        for start in range(0, len(rows), _ROWS):
            rewards += self._run(rows[start : start + _ROWS])
        return rewards

    def close(self) -> None:
        """Do nothing: the model has no processes to end."""

    def _encode(self, prompt: Any, completion: Any) -> list[int]:
        example = PreferenceExample("a completion", prompt, completion, None)
        row = encode_preference(example, self._template, self._tokenizer).chosen
        assert row is not None
        return row.ids

    def _run(self, rows: Sequence[Sequence[int]]) -> list[float]:
        width = max(len(row) for row in rows)
        ids = torch.zeros(len(rows), width, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for number, row in enumerate(rows):
            ids[number, : len(row)] = torch.tensor(row)
            mask[number, : len(row)] = 1
        inputs = {"input_ids": ids.to(self._device), "attention_mask": mask.to(self._device)}
        return self._model(**inputs).logits[:, 0].float().tolist()
