"""Example sources and objectives for training on prompts; examples are tokenized lazily.

`PromptRows` and `TargetRows` are sources of examples for `recipes/inputs/examples.py`; their
objectives work on every layout. The first label of each sequence is ignored, as for a causal
language model that shifts its labels, so that all models have the same number of labels per
sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bmforge.batch import IGNORE_INDEX, Batch
from bmforge.data.load.example import fingerprint_of
from bmforge.errors import ConfigError
from bmforge.tune.prompt.call import run_at_answers
from bmforge.tune.prompt.classifier import check_masks, class_loss, score_batch
from bmforge.tune.prompt.generator import encode_target, target_loss
from bmforge.tune.prompt.questions import Question, collate_questions, encode_question
from bmforge.tune.prompt.template import Template
from bmforge.tune.prompt.truncate import Cut

__all__ = ["PromptRows", "TargetRows", "prompt_objective", "target_objective"]

# Sequence lengths of batches are multiples of this number, for few shapes and little padding.
_WIDTH_STEP = 64


class _Rows:
    """Base class of the two example sources in this module.

    Args:
        template: template that encodes the examples.
        examples: any indexable sequence.
        seq_len: maximum length of a prompt in tokens.
        cut: truncation of long prompts, as in `cut_parts`.
        settings: further values on which the encoded examples depend, for the fingerprint.

    Attributes:
        columns: label columns; `collate` adds all other columns.
        fingerprint: hash of the template, the settings, the number of examples, and the first and
            last example, so that not all examples must be read.

    Raises:
        ConfigError: there are no examples.
    """

    columns: Mapping[str, tuple[int, int]] = {"labels": (2, IGNORE_INDEX)}

    def __init__(
        self, template: Template, examples: Sequence[Any], seq_len: int, cut: Cut, *settings: Any
    ) -> None:
        if not len(examples):
            raise ConfigError("the training data has no examples. Pass at least one example.")
        self._template, self._examples, self._cut = template, examples, cut
        self._seq_len, self._pad = seq_len, template.tokenizer.pad_id or 0
        ends = (str(examples[0]), str(examples[len(examples) - 1]))
        self.fingerprint = fingerprint_of(
            template.text, len(examples), *ends, seq_len, cut, *settings
        )

    def __len__(self) -> int:
        return len(self._examples)

    def _lay(self, questions: Sequence[Question]) -> Batch:
        columns = collate_questions(questions, self._pad)
        batch = {name: torch.tensor(values) for name, values in columns.items()}
        width = batch["input_ids"].shape[1]
        spare = min(-(-width // _WIDTH_STEP) * _WIDTH_STEP, self._seq_len) - width
        padding = {"input_ids": self._pad, "attention_mask": 0}
        padding |= dict.fromkeys(questions[0].prompts[0].columns, 0)
        for name, filling in padding.items():
            if spare > 0:
                batch[name] = nn.functional.pad(batch[name], (0, spare), value=filling)
        return batch


class PromptRows(_Rows):
    """Example source for classification: prompts with class labels.

    Args:
        template, examples, seq_len, cut: arguments of `_Rows`.
        verbalizer: verbalizer; label words of different lengths get separate prompts.
        labels: class index of each example; -100 for an unlabeled example.

    Raises:
        ConfigError: there are no examples, or template and verbalizer are incompatible.
    """

    def __init__(
        self,
        template: Template,
        verbalizer: Any,
        examples: Sequence[Any],
        labels: Sequence[int],
        seq_len: int = 512,
        cut: Cut = "tail",
    ) -> None:
        check_masks(template, verbalizer)
        if len(examples) != len(labels):
            raise ConfigError(
                f"there are {len(examples)} examples, but {len(labels)} labels. Pass one label per "
                "example."
            )
        self._verbalizer, self._labels = verbalizer, labels
        super().__init__(template, examples, seq_len, cut, getattr(verbalizer, "words", None))

    def make(self, index: int, seed: tuple[int | str, ...]) -> Any:
        """Return the example at `index`; the seed is ignored."""
        name = f"example {index}"
        question = encode_question(
            self._template, self._verbalizer, self._examples[index], self._seq_len, self._cut, name
        )
        return {"question": question, "labels": [IGNORE_INDEX, self._labels[index]]}

    def collate(self, rows: Sequence[Any]) -> Batch:
        """Collate examples into a batch."""
        labels = torch.tensor([row["labels"] for row in rows])
        return {**self._lay([row["question"] for row in rows]), "labels": labels}


class TargetRows(_Rows):
    """Example source for generation: prompts with target texts.

    Args:
        template, examples, seq_len, cut: arguments of `_Rows`.
        targets: target text of each example.
    """

    def __init__(
        self,
        template: Template,
        examples: Sequence[Any],
        targets: Sequence[str],
        seq_len: int = 512,
        cut: Cut = "tail",
    ) -> None:
        if len(examples) != len(targets):
            raise ConfigError(
                f"there are {len(examples)} examples, but {len(targets)} targets. Pass one target "
                "per example."
            )
        self._targets = targets
        super().__init__(template, examples, seq_len, cut, targets[0] if len(targets) else "")

    def make(self, index: int, seed: tuple[int | str, ...]) -> Any:
        """Return the example at `index`; the seed is ignored."""
        prompt = encode_target(
            self._template, self._examples[index], self._targets[index],
            max_seq_len=self._seq_len, cut=self._cut, name=f"example {index}",
        )  # fmt: skip
        return {"prompt": prompt, "labels": [IGNORE_INDEX, *prompt.predicted]}

    def collate(self, rows: Sequence[Any]) -> Batch:
        """Collate examples into a batch."""
        width = max(len(row["labels"]) for row in rows)
        labels = [[*row["labels"], *[IGNORE_INDEX] * (width - len(row["labels"]))] for row in rows]
        batch = self._lay([Question([row["prompt"]], [], []) for row in rows])
        return {**batch, "labels": torch.tensor(labels)}


def prompt_objective(verbalizer: Any) -> Callable[[nn.Module, Batch, float], Tensor]:
    """Return the training objective for `PromptRows`: the cross-entropy of the classes.

    On pipeline stages before the last, the objective returns a placeholder.
    """

    def objective(model: nn.Module, batch: Batch, num_items: float) -> Tensor:
        inputs = dict(batch)
        labels = inputs.pop("labels")[:, 1]
        outputs = score_batch(model, verbalizer, inputs)
        if outputs is None:
            return torch.zeros(())
        return class_loss(outputs[0], labels, verbalizer).sum() / num_items

    return objective


def target_objective(model: nn.Module, batch: Batch, num_items: float) -> Tensor:
    """Training objective for `TargetRows`: the cross-entropy of the target tokens."""
    inputs = dict(batch)
    labels, places = inputs.pop("labels")[:, 1:], inputs.pop("mask_at")
    outputs = run_at_answers(model, inputs, places)
    if outputs is None:
        return torch.zeros(())
    return target_loss(outputs.logits, labels).sum() / num_items
