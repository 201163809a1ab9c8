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
        model: preset, family or model directory; determines the tokenizer and the form of the
            prompt.
        data_task: name of a published task, such as ag_news (if None: custom data from data.paths).
        data_paths: directory of the published task, or .jsonl files with custom data.
        data_labels: labels of the custom data, in the order of the classes.
        split: dataset split of the published task.
        tokenizer: directory of the tokenizer (if None: that of the model).
        verbalizer: file with the label words of each class (if None: the verbalizers of the task).
        choice: index of the template among the task's templates, and of the verbalizer in its file;
            0 is the first.
        join: score of a label word with several tokens: "first" (logit of the first token), "max"
            or "mean" (over the logits of all tokens at one mask), or "joint" (log-probability of
            the whole word).
        behind: handling of template text after the mask, which a causal model does not read:
            "refuse" (error), "leave out" (drop the text) or "score" (score the text after each
            label word).
        soft_front: number of trainable soft tokens at the beginning of the prompt.
        seq_len: maximum prompt length in tokens.
        cut: truncation of long examples: "tail" removes tokens from the end, "head" from the
            beginning, and "balanced" from the end of every field in proportion to its length.
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
