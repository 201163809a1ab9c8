"""The options of `bmforge prompt`; nothing heavy is imported here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

__all__ = ["PromptCommand"]


@dataclass(kw_only=True)
class PromptCommand:
    """Show what a template makes of a few examples.

    Args:
        template: its text; left out, the task's own is shown.
        model: a preset, a family or a directory, which says how it is asked.
        data_task: a published task, such as ag_news.
        data_paths: its folder; or .jsonl files of a task of one's own.
        data_labels: of a task of one's own.
        split: of a published task, which examples.
        tokenizer: directory of the tokenizer; left out, the model's.
        verbalizer: file with the classes' words; left out, the task's own.
        choice: which of the task's own templates, and which verbalizer of a file.
        join: how words of several tokens score: first, max, mean or joint.
        behind: text behind a causal model's mask: refuse, leave out or score.
        soft_front: trained rows in front of everything.
        seq_len: longest prompt in tokens.
        cut: tail, head or balanced.
        examples: so many.
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
