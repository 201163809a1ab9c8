"""Base class and prompts of the task datasets for all kinds of models.

A dataset reads a task and encodes a sample when it is indexed. Every process has all samples;
`DistributedDataLoader` splits them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils.data import Dataset

from bmforge.data.tasks import TASKS, TaskExample, read_task
from bmforge.errors import DataError

__all__ = ["PROMPTS", "Prompt", "TaskRows", "make_datasets", "pad_ids", "unroll"]


class TaskRows(Dataset[dict[str, Tensor]]):
    """One split of a task as a dataset.

    Args:
        path: folder of the benchmark or the task.
        split: "train", "dev" or "test". A test split without labels is empty.
        rank: accepted and ignored; every process has all samples.
        world_size: accepted and ignored; `DistributedDataLoader` splits the samples.
        tokenizer: tokenizer of the model.
        lengths: max_encoder_length and max_decoder_length, by position or name.

    Attributes:
        task: name of the task.
        examples: the samples that were read.
        qids: question id per sample, for tasks that score whole questions.
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
                f"{type(self).__name__} takes {', '.join(self.length_names)} after the tokenizer, "
                f"not {', '.join(self.lengths) or 'nothing'}"
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
        raise TypeError(f"{type(self).__name__} does not say how an example is encoded")

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return the tensors of one sample, on the CPU."""
        return self.encode(self.examples[index])


def _read_labelled(task: str, path: str, split: str) -> list[TaskExample]:
    """Read a split; of a test split, only the labeled samples, possibly none."""
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
        words: word of each label, whose first token is used.
    """

    text: str
    words: tuple[str, ...]


_TRUTH = ("No", "Yes")
_ENTAILS = "Sentence 1: {0} Sentence 2: {1} Does sentence 1 entails sentence 2?"
_ENTAILMENT = _ENTAILS.format("{premise}", "{hypothesis}")
_WAHR = ("否", "是")
_RELATION = Prompt("“{sentence1}”和“{sentence2}”的关系是", ("矛盾", "蕴含", "中立"))
_ALIKE = Prompt("“{sentence1}”与“{sentence2}”的意思相同吗？", _WAHR)
_TOPICS = "故事 文化 娱乐 体育 财经 房产 汽车 教育 科技 军事 旅游 国际 股票 农业 游戏"
_REFERS = Prompt("{text} “{span2_text}”指的是“{span1_text}”吗？", _WAHR)
_SAME_WORD = (
    "Sentence 1: {sentence1} Sentence 2: {sentence2} Does the word {word} in sentence 1 express "
    "the same meaning as in sentence 2?"
)
# The English prompts are ModelCenter's.
PROMPTS: Mapping[str, Prompt] = {
    "BoolQ": Prompt("{passage}. {question}?", _TRUTH),
    "CB": Prompt(_ENTAILMENT, ("No", "Yes", "Maybe")),
    "COPA": Prompt(
        'Choice 1: {choice1} Choice 2: {choice2} The {question} of "{premise}" was choice',
        ("1", "2"),
    ),
    "RTE": Prompt(_ENTAILMENT, _TRUTH),
    "WiC": Prompt(_SAME_WORD, _TRUTH),
    "WSC": Prompt("{text} Does {span2_text} refers to {span1_text}?", _TRUTH),
    "MultiRC": Prompt(
        '{passage} Is answer "{answer}" the answer to the question "{question}"?', _TRUTH
    ),
    "ReCoRD": Prompt(
        "{passage} Question: {query} Entities: {entities} Can {entity} be filled in the "
        "placeholder?",
        _TRUTH,
    ),
    "eprstmt": Prompt("{sentence}。总之很", ("差", "好")),
    "csl": Prompt("{abst} 这些关键词对吗：{keyword}？", _WAHR),
    "ocnli": _RELATION,
    "cmnli": _RELATION,
    "afqmc": _ALIKE,
    "bustm": _ALIKE,
    "tnews": Prompt("{sentence} 这条新闻的主题是", tuple(_TOPICS.split())),
    "cluewsc2020": _REFERS,
    "cluewsc": _REFERS,
    "LCQMC": Prompt("“{text_a}”与“{text_b}”是否有关？", ("无关", "有关")),
}


def unroll(task: str, examples: list[TaskExample], is_training: bool) -> list[TaskExample]:
    """Convert the examples of tasks with choices (COPA, ReCoRD) to separate examples.

    COPA keeps one example, with both choices as fields; in training, a copy with swapped choices is
    added. ReCoRD gets one example per entity; all but the last number of `idx` identify the
    question. Examples of other tasks are unchanged.
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


def pad_ids(ids: list[int], width: int, filling: int = 0) -> Tensor:
    """Pad token ids at the end.

    Shape:
        returns (width,)
    """
    return torch.tensor(ids + [filling] * (width - len(ids)))


def make_datasets(kind: type[TaskRows], tasks: Mapping[str, Any]) -> dict[str, type[TaskRows]]:
    """Create one dataset class per task, under its old name (such as `BoolQ_Dataset`)."""
    return {
        name: type(f"{name}_Dataset", (kind,), {"task": name, "__doc__": f"{name}.", **values})
        for name, values in tasks.items()
    }
