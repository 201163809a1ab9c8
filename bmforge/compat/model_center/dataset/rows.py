"""Base class and prompts of the task datasets for all kinds of models.

A dataset reads a task and encodes a sample when it is indexed. Every process has all samples;
`DistributedDataLoader` splits them.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

from bmforge.data.tasks import TASKS, TaskExample, read_task
from bmforge.errors import DataError

__all__ = [
    "CHINESE_TASKS", "PROMPTS", "Prompt", "PromptRows", "TaskRows", "make_datasets", "one_hot",
    "pad_ids",
]  # fmt: skip


class TaskRows(Dataset[dict[str, Tensor]]):
    """One split of a task as a dataset.

    Args:
        path: folder of the benchmark or the task.
        split: "train", "dev" or "test". A test split without labels is empty.
        rank: accepted and ignored; every process has all samples.
        world_size: accepted and ignored; `DistributedDataLoader` splits the samples.
        tokenizer: tokenizer of the model.
        lengths: max_encoder_length and max_decoder_length, as positional or keyword arguments.

    Attributes:
        task: name of the task.
        examples: examples of the split.
        qids: question id per sample, for tasks that are scored per question.
    """

    task: ClassVar[str] = ""
    length_names: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        path: str,
        split: str,
        rank: int,
        world_size: int,
        tokenizer: Any,
        *lengths: int,
        **named: int,
    ) -> None:
        self.tokenizer, self.split = tokenizer, split
        self.lengths = {**dict(zip(self.length_names, lengths, strict=False)), **named}
        if set(self.lengths) != set(self.length_names):
            raise TypeError(
                f"{type(self).__name__} needs the lengths {', '.join(self.length_names)} after the "
                f"tokenizer (passed: {', '.join(self.lengths) or 'none'})."
            )
        self.examples = self.arrange(_read_labelled(self.task, path, split))
        self.qids = [
            "-".join(map(str, e.idx[:2])) for e in self.examples if isinstance(e.idx, tuple)
        ]

    def arrange(self, examples: list[TaskExample]) -> list[TaskExample]:
        """Rearrange the examples for training, for example by repeating some."""
        return examples

    def encode(self, example: TaskExample) -> dict[str, Tensor]:
        """Encode an example as tensors; subclasses define this method."""
        raise TypeError(f"{type(self).__name__} must implement `encode`.")

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return the tensors of one sample, on the CPU."""
        return self.encode(self.examples[index])


class PromptRows(TaskRows):
    """One split of a task with a prompt, and with an answer word for each label.

    Attributes:
        space: text inserted before a word.
        token_index: index of a word's first token in the tokenizer's output.
        needs_distinct: True if the words of two labels must not begin with the same token.
    """

    space = ""
    token_index = 0
    needs_distinct = False

    @classmethod
    def get_verbalizer(cls, tokenizer: Any) -> list[int]:
        """Return the first token id of each label's answer word.

        Raises:
            DataError: two words begin with the same token, and `needs_distinct` is set.
        """
        words = PROMPTS[cls.task].words
        firsts = [tokenizer.encode(cls.space + word)[cls.token_index] for word in words]
        if cls.needs_distinct and len(set(firsts)) < len(firsts):
            raise DataError(
                f"{cls.task}: the words {words} begin with the tokens {firsts}, so the first token "
                "does not distinguish the labels. Use another tokenizer, or your own words."
            )
        return firsts

    def arrange(self, examples: list[TaskExample]) -> list[TaskExample]:
        """Convert multiple-choice examples to examples without choices; see `unroll`."""
        return unroll(self.task, examples, self.split == "train")

    def prompt_ids(self, example: TaskExample, ending: str = "") -> list[int]:
        """Return the token ids of the prompt and of a text after it."""
        text = PROMPTS[self.task].text.format_map(example.fields)
        return list(self.tokenizer.encode(text + ending))

    def check_length(self, ids: list[int], example: TaskExample) -> list[int]:
        """Return the token ids; raise a DataError if there are too many."""
        name = self.length_names[0]
        if len(ids) > self.lengths[name]:
            raise DataError(
                f"example {example.idx} has {len(ids)} tokens, more than "
                f"{name}={self.lengths[name]}. Increase {name}, or shorten the example."
            )
        return ids


def _read_labelled(task: str, path: str, split: str) -> list[TaskExample]:
    """Return the examples of a split; a test split has only its labeled examples, if any."""
    if split != "test":
        return read_task(task, path, split)
    if "test" not in TASKS[task].files:
        return []
    try:
        examples_read = read_task(task, path, split)
    except DataError as error:
        if "no file" in str(error):
            return []
        raise
    return [example for example in examples_read if example.label is not None]


@dataclass(frozen=True)
class Prompt:
    """Prompt and answer words of a task for a language model.

    Args:
        text: template with the sample's fields in braces.
        words: answer word of each label; only its first token is used.
    """

    text: str
    words: tuple[str, ...]


_TABLES = tomllib.loads(Path(__file__).with_name("prompts.toml").read_text("utf-8"))
PROMPTS: Mapping[str, Prompt] = {
    task: Prompt(table["text"], tuple(table["words"])) for task, table in _TABLES.items()
}


# Tasks of the datasets for CPM-1 and CPM-2.
CHINESE_TASKS = ["LCQMC", "eprstmt", "ocnli", "cmnli", "afqmc", "bustm", "cluewsc2020", "cluewsc"]


def unroll(task: str, examples: list[TaskExample], is_training: bool) -> list[TaskExample]:
    """Convert examples with choices (COPA, ReCoRD) to examples without.

    A COPA example gets both choices as fields; in training, a copy with swapped choices is added. A
    ReCoRD example becomes one example per entity; all but the last number of their `idx` identify
    the question. Examples of other tasks are unchanged.
    """
    out = []
    for example in examples:
        if task == "COPA":
            first, second = example.choices
            sides = [(first, second, example.label)]
            if is_training:
                sides.append((second, first, 1 - int(example.label or 0)))
            for left, other, label in sides:
                fields = {**example.fields, "choice1": left, "choice2": other}
                out.append(TaskExample(fields, label, example.idx))
        elif task == "ReCoRD":
            # As in the GPT-3 paper, highlights are a list.
            text = example.fields["passage"].replace("@highlight\n", "- ")
            shared = {**example.fields, "passage": text, "entities": str(list(example.choices))}
            parts = example.idx if isinstance(example.idx, tuple) else (0,)
            for number, entity in enumerate(example.choices):
                fields, label = {**shared, "entity": entity}, int(entity in example.answers)
                out.append(TaskExample(fields, label, (*parts, number)))
        else:
            out.append(example)
    return out


def one_hot(position: int, width: int) -> Tensor:
    """Return a vector of zeros with a 1 at `position`."""
    return F.one_hot(torch.tensor(position), width)


def pad_ids(ids: list[int], width: int, filling: int = 0) -> Tensor:
    """Pad token ids at the end.

    Shape:
        returns (width,)
    """
    return torch.tensor(ids + [filling] * (width - len(ids)))


def make_datasets(kind: type[TaskRows], tasks: Mapping[str, Any]) -> dict[str, type[TaskRows]]:
    """Create a subclass of `kind` for each task, under its old name (such as `BoolQ_Dataset`)."""
    return {
        name: type(f"{name}_Dataset", (kind,), {"task": name, "__doc__": f"{name}.", **values})
        for name, values in tasks.items()
    }
