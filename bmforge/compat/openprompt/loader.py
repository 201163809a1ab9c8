"""Data loader of prompts; examples are tokenized when their batch is built."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader

from bmforge.batch import IGNORE_INDEX
from bmforge.compat.openprompt.examples import InputFeatures
from bmforge.compat.openprompt.wrappers import TokenizerWrapper
from bmforge.errors import ConfigError
from bmforge.tune.prompt.generator import encode_target
from bmforge.tune.prompt.questions import Question, collate_questions, encode_question

__all__ = ["PromptDataLoader"]

_NO_LIMIT = 1 << 30


class PromptDataLoader:
    """Iterates over a dataset in batches of prompts.

    Args:
        dataset: examples.
        template: template of the prompts.
        tokenizer_wrapper: wrapper for the kind of model.
        tokenizer: tokenizer of the model, with `tokenizer_wrapper_class` instead of a wrapper.
        tokenizer_wrapper_class: class of the wrapper.
        verbalizer: verbalizer; if it scores whole words, it adds inputs to each example.
        max_seq_length: maximum prompt length in tokens.
        batch_size, shuffle, drop_last: as in torch's DataLoader.
        teacher_forcing: include the target texts.
        decoder_max_length: maximum target length in tokens; -1 for no limit.
        predict_eos_token: append the EOS token to targets.
        truncate_method: "tail" (removes the end), "head" (the beginning) or "balanced".
        options: further arguments of OpenPrompt's loader; accepted and ignored.
    """

    def __init__(
        self,
        dataset: Sequence[Any],
        template: Any,
        tokenizer_wrapper: TokenizerWrapper | None = None,
        tokenizer: Any = None,
        tokenizer_wrapper_class: type[TokenizerWrapper] | None = None,
        verbalizer: Any = None,
        max_seq_length: int = 512,
        batch_size: int = 1,
        **options: Any,
    ) -> None:
        kind = tokenizer_wrapper or tokenizer_wrapper_class
        if kind is None:
            raise ConfigError(
                "tokenizer_wrapper_class is required. Pass the class that load_plm returns."
            )
        self.dataset, self.template, self.verbalizer = dataset, template, verbalizer
        self.max_seq_length, self.batch_size = max_seq_length, batch_size
        shuffle, drop_last = (bool(options.pop(n, False)) for n in ("shuffle", "drop_last"))
        # A public attribute of the original, which programs pass to `accelerate`.
        self.dataloader: DataLoader[Any] = DataLoader(
            list(dataset),  # type: ignore[arg-type]
            batch_size,
            shuffle=shuffle,
            drop_last=drop_last,
            collate_fn=self._collate,
        )
        self.teacher_forcing = bool(options.pop("teacher_forcing", False))
        self.decoder_max_length = int(options.pop("decoder_max_length", -1))
        self.cut = options.pop("truncate_method", "tail")
        if isinstance(kind, type):
            kind = kind(max_seq_length, tokenizer or template.tokenizer, self.cut)
        self.tokenizer_wrapper = kind
        self._core = template.bind_wrapper(kind)
        kind.count_truncated = self._count_truncated

    def __len__(self) -> int:
        return len(self.dataloader)

    def __iter__(self) -> Iterator[InputFeatures]:
        return iter(self.dataloader)

    def _count_truncated(self) -> tuple[int, int]:
        """Return the number of examples with truncated prompts and the total number of examples."""
        lengths = [len(self._core.encode(self._fill(e), _NO_LIMIT)) for e in self.dataset]
        return sum(length > self.max_seq_length for length in lengths), len(lengths)

    def _collate(self, examples: Sequence[Any]) -> InputFeatures:
        """Tokenize a batch of examples."""
        examples = [self._fill(example) for example in examples]
        options: dict[str, Any] = {"max_seq_len": self.max_seq_length, "cut": self.cut}
        asks = getattr(getattr(self.verbalizer, "core", None), "takes", "") == "words"
        questions = []
        for example in examples:
            if self.teacher_forcing:
                prompt = encode_target(self._core, example, self._target(example), **options)
                questions.append(Question([prompt], [], []))
            elif asks:
                questions.append(
                    encode_question(self._core, self.verbalizer.core, example, **options)
                )
            else:
                questions.append(Question([self._core.encode(example, **options)], [], []))
        pad = self._core.tokenizer.pad_id or 0
        columns = collate_questions(questions, pad)
        features = InputFeatures({n: torch.tensor(values) for n, values in columns.items()})
        if self.teacher_forcing:
            width = features["mask_at"].shape[1]
            rows = [question.prompts[0].predicted for question in questions]
            filled = [[*row, *[IGNORE_INDEX] * (width - len(row))] for row in rows]
            features["targets"] = torch.tensor(filled)
        if all(example.label is not None for example in examples):
            features["label"] = torch.tensor([example.label for example in examples])
        features["guid"] = [example.guid for example in examples]
        if any(example.tgt_text is not None for example in examples):
            features["tgt_text"] = [example.tgt_text for example in examples]
        features["examples"] = list(examples)
        features["max_seq_len"] = self.max_seq_length
        return features

    def _fill(self, example: Any) -> Any:
        """Add the template's and the verbalizer's fields to an example; return the example."""
        example = self.template.fill(example)
        if hasattr(self.verbalizer, "wrap_one_example"):
            example = self.verbalizer.wrap_one_example(example)
        return example

    def _target(self, example: Any) -> str:
        """Return the target text, truncated to the maximum length."""
        text = example.tgt_text or ""
        if self.decoder_max_length > 0:
            tokenizer = self._core.tokenizer
            ids = tokenizer.encode_plain([text])[0]
            if len(ids) >= self.decoder_max_length:
                text = tokenizer.decode(ids[: self.decoder_max_length - 1]).strip()
        return text
