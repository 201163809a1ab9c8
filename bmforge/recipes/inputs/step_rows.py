"""Converts answers with labeled steps to token sequences, for process reward models.

A step is followed by a separator, and the separator's last token has the label of the step, as in
TRL. Prompt, steps and separators are tokenized separately, so that a step has the same ids in
training and when `ProcessRewardModel` scores it.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from bmforge.batch import IGNORE_INDEX, Batch
from bmforge.data.load.example import Example, fingerprint_of
from bmforge.data.sources.step_labels import StepExample
from bmforge.errors import ConfigError, DataError
from bmforge.recipes.inputs.conversation_rows import EncodedRow, drop_fields
from bmforge.recipes.inputs.padded_rows import (
    PaddedRows,
    has_labels,
    is_real_row,
    report_rows,
    truncate_row,
)
from bmforge.recipes.inputs.preference_rows import encode_start
from bmforge.tokenizers import Tokenizer
from bmforge.tokenizers.chat_template import ChatTemplate
from bmforge.tokenizers.chat_turns import check_fields

__all__ = ["LabeledSteps", "encode_steps", "split_steps"]


def split_steps(text: str, separator: str) -> list[str]:
    """Split an answer into its non-empty steps; an empty answer is one step.

    Args:
        text: the answer.
        separator: text between two steps.
    """
    return [step for step in text.split(separator) if step.strip()] or [text]


def encode_steps(
    example: StepExample,
    template: ChatTemplate | None,
    tokenizer: Tokenizer,
    separator: str,
    ignore: Sequence[str] = (),
) -> EncodedRow:
    """Encode a prompt and its steps; the label of a step is 1 (correct) or 0 (wrong).

    Args:
        example: prompt, steps and labels.
        template: the model's chat template, for prompts of messages.
        tokenizer: the model's tokenizer.
        separator: text after each step.
        ignore: names of fields to ignore.

    Raises:
        ConfigError: the separator has no tokens.
        DataError: a field is neither read by the template nor in `ignore`.
    """
    mark = tokenizer.encode(separator)
    if not mark:
        raise ConfigError(f"step_separator={separator!r} has no tokens. Choose another separator.")
    ids = _encode_prompt(example, template, tokenizer, ignore)
    labels = [IGNORE_INDEX] * len(ids)
    for step, label in zip(example.steps, example.labels, strict=True):
        ids = [*ids, *tokenizer.encode(step), *mark]
        labels += [IGNORE_INDEX] * (len(ids) - len(labels))
        labels[-1] = IGNORE_INDEX if label is None else int(label)
    return EncodedRow(ids, labels)


def _encode_prompt(
    example: StepExample,
    template: ChatTemplate | None,
    tokenizer: Tokenizer,
    ignore: Sequence[str],
) -> list[int]:
    fields = {name: value for name, value in example.fields.items() if name not in ignore}
    tools = None if "tools" in ignore else example.tools
    is_text = isinstance(example.prompt, str)
    variables = {} if is_text else {**fields.pop("chat_template_kwargs", {}), **fields}
    known = frozenset() if is_text or template is None else template.variables
    unknown = [name for name in (fields if is_text else variables) if name not in known]
    unknown += ["tools"] if tools and "tools" not in known else []
    if unknown:
        raise DataError(
            f"{example.location} has the fields {', '.join(unknown)}, which have no effect on the "
            f"prompt. Ignore them with --data.ignore {' '.join(unknown)}."
        )
    if isinstance(example.prompt, str):
        return encode_start(example.prompt, tokenizer)
    assert template is not None
    messages = drop_fields(example.prompt, ignore)
    try:
        check_fields(template, messages, tools, variables)
    except DataError as error:
        raise DataError(f"{example.location}: {error}") from error
    return template.encode(messages, tools, **variables)[1]


class LabeledSteps(PaddedRows):
    """Answers with labeled steps as an `ExampleSource`.

    An answer without a label within `seq_len` tokens is skipped; `dropped` counts these answers.

    Args:
        rows: encoded answers with their prompts.
        seq_len: maximum length of a sequence in tokens; longer ones are truncated at the end.
    """

    def __init__(self, rows: Sequence[EncodedRow], seq_len: int) -> None:
        truncated = [truncate_row(row, seq_len) for row in rows]
        self._rows = [row for row in truncated if has_labels(row)]
        self.dropped = len(rows) - len(self._rows)
        self.set_width(self._rows, seq_len)
        self.fingerprint = fingerprint_of([tuple(map(tuple, row)) for row in self._rows])
        cut = sum(len(row.ids) > seq_len for row in rows)
        report_rows(len(rows), self.dropped, cut, seq_len, "answers with labeled steps")

    def __len__(self) -> int:
        return len(self._rows)

    def make(self, index: int, seed: tuple[int | str, ...]) -> Example:
        """Return the answer at `index`; `seed` has no effect."""
        return {"labels": [1], "index": [index]}

    def collate(self, rows: Sequence[Example]) -> Batch:
        """Return a batch with one sequence per answer."""
        answers = [self._rows[row["index"][0]] for row in rows]
        batch: dict[str, Tensor] = self.stack(answers, [is_real_row(row) for row in rows])
        return batch
