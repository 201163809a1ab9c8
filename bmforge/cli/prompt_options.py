"""Options of `bmforge prompt`; nothing heavy is imported here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

__all__ = ["PromptCommand"]


@dataclass(kw_only=True)
class PromptCommand:
    """Show a few examples of a task as a template renders them.

    Args:
        template: text of the template (if empty: the template of the task).
        model: preset, family or model directory for which the prompt is rendered.
        data_task: name of a published task, such as ag_news.
        data_paths: directory of the published task, or .jsonl files with your own data.
        data_labels: label names of your own data, in the order of the classes.
        split: split of the published task.
        tokenizer: directory of the tokenizer (if None: that of the model).
        verbalizer: file with the label words of each class (if None: those of the task).
        choice: index of the template among those of the task, and of the verbalizer in its file.
        join: score of a label word with several tokens: "first", "max", "mean" or "joint".
        behind: handling of template text after the mask, which a causal model does not read:
            "refuse", "leave out" or "score".
        soft_front: number of trainable soft tokens before the prompt.
        seq_len: maximum prompt length in tokens.
        cut: truncation of long examples: "tail", "head" or "balanced".
        examples: number of examples to show.
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
