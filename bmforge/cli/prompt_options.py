"""Options of `bmforge prompt`; nothing heavy is imported here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

__all__ = ["PromptCommand"]


@dataclass(kw_only=True)
class PromptCommand:
    """Show a few examples as a template renders them.

    Args:
        template: text of the template (default: the task's own).
        model: preset, family or model directory, which determines the form of the prompt.
        data_task: published task, such as ag_news.
        data_paths: folder of the task, or .jsonl files of user data.
        data_labels: labels of user data.
        split: split of a published task.
        tokenizer: directory of the tokenizer (default: the model's).
        verbalizer: file with the classes' words (default: the task's own).
        choice: index of the task's template, and of the verbalizer in its file.
        join: score of a word of several tokens: first, max, mean or joint.
        behind: treatment of text after a causal model's mask: refuse, leave out or score.
        soft_front: number of trained soft tokens at the beginning.
        seq_len: maximum prompt length in tokens.
        cut: truncation of long examples: tail, head or balanced.
        examples: number of examples.
    """

    template: Annotated[str, tyro.conf.Positional] = ""
    model: str
    data_task: Annotated[str | None, tyro.conf.arg(name="data.task")] = None
    data_paths: Annotated[tuple[str, ...], tyro.conf.arg(name="data.paths")] = ()
    data_labels: Annotated[tuple[str, ...], tyro.conf.arg(name="data.labels")] = ()
    split: str = "train"
    tokenizer: str | None = None
    verbalizer: Path | None = None
    choice: int = 0
    join: str = "first"
    behind: str = "refuse"
    soft_front: int = 0
    seq_len: int = 256
    cut: Literal["tail", "head", "balanced"] = "tail"
    examples: int = 3
