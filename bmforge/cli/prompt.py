"""`bmforge prompt TEMPLATE`: shows examples as a template renders them, in color."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from bmforge.cli.prompt_options import PromptCommand
from bmforge.recipes.inputs.prompt_parts import open_template, open_words
from bmforge.recipes.inputs.task_data import TaskDataConfig, read_examples
from bmforge.recipes.prompt import PromptTuneConfig
from bmforge.recipes.start import find_start
from bmforge.tokenizers import AutoTokenizer
from bmforge.tune.prompt import Template
from bmforge.tune.prompt.questions import encode_question

__all__ = ["run_prompt"]

_COLOURS = {"text": "", "mask": "bold red", "special": "magenta", "soft": "bold blue"}


def run_prompt(command: PromptCommand) -> None:
    """Print the text, token ids, truncation and label words of a few rendered examples."""
    data = TaskDataConfig(
        task=command.data_task, labels=command.data_labels, paths=command.data_paths,
        train_split=command.split, dev_split=None,
    )  # fmt: skip
    task, examples, _ = read_examples(data)
    start = find_start(command.model)
    tokenizer = AutoTokenizer.from_pretrained(command.tokenizer or str(start.init_from))
    config: Any = dataclasses.replace(
        PromptTuneConfig(), verbalizer=command.verbalizer, choice=command.choice, join=command.join
    )
    text = command.template or open_template(config, task, examples[0])
    head = "masked_lm" if "masked_lm" in start.config.heads else start.config.head
    model = start.family.from_config(start.config.replace(head=head), device="meta")
    template = Template(text, tokenizer, model, front=command.soft_front, behind=command.behind)
    words = open_words(config, task, examples[0], tokenizer, template.num_masks)
    console = Console(highlight=False)
    console.print(Text.assemble(("template  ", "dim"), text))
    console.print(Text.assemble(("asked as  ", "dim"), template.prompt_format.kind, ": ",
                                template.prompt_format.about))  # fmt: skip
    for number, example in enumerate(examples[: command.examples]):
        _show(console, template, words, example, number, command)
    _show_words(console, words, tokenizer, examples[0])


def _show(
    console: Console, template: Template, words: Any, example: Any, number: int, command: Any
) -> None:
    """Print one rendered example."""
    console.print(Text(f"\nexample {number}", style="bold"))
    legend = Text("pieces    ", style="dim")
    for piece in template.wrap(example):
        shown = piece.text or f"<soft {piece.soft}>"
        style = _COLOURS[piece.kind] or ("green" if piece.shortenable else "default")
        legend.append(shown, style=f"not dim {style}")
    console.print(legend)
    question = encode_question(template, words, example, command.seq_len, command.cut)
    for prompt in question.prompts:
        ids = Text("ids       ", style="dim")
        for position, id in enumerate(prompt.input_ids):
            is_mask = position in prompt.mask_at and not prompt.decoder_input_ids
            soft = bool(template.rows) and id >= template.vocab_size
            style = "bold red" if is_mask else "bold blue" if soft else "default"
            ids.append(f"{id} ", style=f"not dim {style}")
        console.print(ids)
        if prompt.decoder_input_ids:
            console.print(Text.assemble(("decoder   ", "dim"),
                                        " ".join(map(str, prompt.decoder_input_ids))))  # fmt: skip
        answers = " ".join(map(str, prompt.mask_at))
        console.print(
            Text.assemble(
                ("tokens    ", "dim"),
                f"{len(prompt)}, {prompt.num_cut} truncated; answered at {answers}")
        )  # fmt: skip


def _show_words(console: Console, words: Any, tokenizer: Any, example: Any) -> None:
    """Print the label words of every class, and their tokens."""
    console.print(Text("\nwords", style="bold"))
    tokens: Sequence[Any] = getattr(words, "tokens", None) or [[ids] for ids in
                                                              words.answers(example)]  # fmt: skip
    for name, row, spelled in zip(words.classes, words.words, tokens, strict=True):
        line = Text(f"{name}  ", style="green")
        for word, ids in zip(row, spelled, strict=True):
            pieces = " | ".join(tokenizer.decode([id]) for id in ids)
            line.append(f"{word} = {' '.join(map(str, ids))} ({pieces})  ", style="default")
        console.print(line)
