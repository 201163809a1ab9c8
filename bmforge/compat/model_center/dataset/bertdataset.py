"""Classification tasks for encoders, with one text or a pair of texts."""

from __future__ import annotations

from collections import Counter
from typing import Any, ClassVar

import torch
from torch import Tensor

from bmforge.compat.model_center.dataset.rows import TaskRows, make_datasets
from bmforge.data.tasks import TaskExample

__all__ = ["DATASET", "BertRows"]


class BertRows(TaskRows):
    """One split of a task, encoded for an encoder.

    A sample has `input_ids`, `attention_mask`, `labels`, and `token_type_ids` if the tokenizer
    returns them; in tasks with choices, the first three have a row per choice. If a pair is too
    long, its first text is truncated, so that the second text, the question, stays complete.

    Attributes:
        fields: names of the one or two texts; with "{...}" they are templates.
        balances: True to oversample rare classes in training.
    """

    length_names = ("max_encoder_length",)
    fields: ClassVar[tuple[str, ...]] = ()
    balances: ClassVar[bool] = False

    def arrange(self, examples: list[TaskExample]) -> list[TaskExample]:
        """Oversample rare classes in training, if `balances` is set.

        Each example is repeated (size of the largest class) // (size of its class) times.
        """
        if not self.balances or self.split != "train":
            return examples
        counts = Counter(example.label for example in examples)
        most = max(counts.values(), default=0)
        return [e for e in examples for _ in range(most // counts[e.label])]

    def encode(self, example: TaskExample) -> dict[str, Tensor]:
        """Encode an example as tensors.

        Shape:
            input_ids, attention_mask, token_type_ids: (max_encoder_length,); labels: scalar
        """
        out = {"labels": torch.tensor(example.label)}
        if not example.choices:
            return {**self._tokens(example.fields), **out}
        for number, choice in enumerate(example.choices):
            tokens = self._tokens({**example.fields, "choice": choice})
            out |= {f"{name}{number}": value for name, value in tokens.items()}
        return out

    def _tokens(self, fields: Any) -> dict[str, Tensor]:
        texts = [
            template.format_map(fields) if "{" in template else fields[template]
            for template in self.fields
        ]
        encoded = self.tokenizer(
            *texts,
            max_length=self.lengths["max_encoder_length"],
            padding="max_length",
            truncation="only_first" if len(texts) == 2 else True,
        )
        names = ("input_ids", "attention_mask", "token_type_ids")
        return {name: torch.tensor(encoded[name]) for name in names if name in encoded}


_PAIR = {"fields": ("sentence1", "sentence2")}
_WHO = "“{span2_text}”指的是“{span1_text}”"
DATASET = make_datasets(
    BertRows,
    {
        "BoolQ": {"fields": ("passage", "question")},
        "CB": {"fields": ("premise", "hypothesis"), "balances": True},
        "COPA": {"fields": ("{choice}", 'The {question} of "{premise}"')},
        "RTE": {"fields": ("premise", "hypothesis")},
        "WiC": _PAIR,
        "WSC": {"fields": ("{text} Does {span2_text} refers to {span1_text}?",)},
        "MultiRC": {"fields": ("passage", "{question} {answer}")},
        "LCQMC": {"fields": ("text_a", "text_b")},
        "eprstmt": {"fields": ("sentence",)},
        "csl": {"fields": ("abst", "keyword")},
        "ocnli": _PAIR,
        "cmnli": _PAIR,
        "afqmc": _PAIR,
        "bustm": _PAIR,
        "tnews": {"fields": ("sentence",)},
        "iflytek": {"fields": ("sentence",)},
        "cluewsc2020": {"fields": ("text", _WHO)},
        "cluewsc": {"fields": ("text", _WHO)},
        "chid": {"fields": ("content", "{choice}")},
        "ag_news": {"fields": ("{title} {text}",)},
    },
)
