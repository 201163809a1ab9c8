"""Tasks for T5: classification by filling in a sentinel token, and SQuAD."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from bmforge.compat.model_center.dataset import rows
from bmforge.data.tasks import TaskExample, read_task

__all__ = ["DATASET", "SQuAD_Dataset", "T5Rows"]

_BLANK = "<extra_id_0>"


class T5Rows(rows.PromptRows):
    """One split of a task, encoded for T5.

    A sample has `enc_input` with `enc_length`, `dec_input` (start and sentinel tokens) with
    `dec_length`, `index` (1 where the answer is predicted) and the label `targets`. Texts that are
    too long are truncated at the beginning.
    """

    length_names = ("max_encoder_length", "max_decoder_length")

    def tokens(self, example: TaskExample) -> tuple[list[int], list[int]]:
        """Return the token ids of the encoder, and the decoder's first tokens."""
        ids = self.prompt_ids(example, f" {_BLANK}.")[-self.lengths["max_encoder_length"] :]
        return ids, [self.tokenizer.pad_token_id, self.tokenizer.convert_tokens_to_ids(_BLANK)]

    def encode(self, example: TaskExample) -> dict[str, Tensor]:
        """Encode an example as tensors.

        Shape:
            enc_input: (max_encoder_length,); dec_input, index: (max_decoder_length,); enc_length,
            dec_length, targets: scalars
        """
        longest, width = (self.lengths[name] for name in self.length_names)
        ids, start = self.tokens(example)
        return {
            "enc_input": rows.pad_ids(ids, longest),
            "enc_length": torch.tensor(len(ids)),
            "dec_input": rows.pad_ids(start, width),
            "dec_length": torch.tensor(len(start)),
            "targets": torch.tensor(int(example.label or 0)),
            "index": rows.one_hot(len(start) - 1, width),
        }


class SQuAD_Dataset(Dataset[dict[str, Any]]):  # noqa: N801
    """SQuAD 1.1 for T5.

    In training a sample has the tensors `input_ids`, `attention_mask`, `decoder_input_ids`,
    `decoder_attention_mask` and `targets` (one accepted answer). In evaluation it has the text
    `inputs` and the set `targets` of accepted answers.

    Args:
        path: folder with `train-v1.1.json` and `dev-v1.1.json`.
        split: "train" or "dev"; "test" is empty.
        tokenizer: tokenizer of the model.
        max_encoder_length: maximum length of question and text in tokens.
        max_decoder_length: maximum length of an answer in tokens.
    """

    def __init__(
        self,
        path: str,
        split: str,
        tokenizer: Any,
        max_encoder_length: int,
        max_decoder_length: int,
    ) -> None:
        self.split, self.tokenizer = split, tokenizer
        self.widths = max_encoder_length, max_decoder_length
        self.examples = [] if split == "test" else read_task("SQuAD", path, split)
        # A fixed seed selects the same answers on every process and in every run.
        draw = random.Random(0)
        self.chosen = [draw.choice(e.answers or ("no answer",)) for e in self.examples]

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return one sample; the fields are described in the class."""
        example = self.examples[index]
        question, context = (example.fields[n].lstrip() for n in ("question", "context"))
        text = f"Question: {question} Answer: {_BLANK} Context: {context}"
        if self.split != "train":
            return {"inputs": text, "targets": set(example.answers or ("no answer",))}
        return self._tensors(text, f"{_BLANK} {self.chosen[index]} <extra_id_1>")

    def _tensors(self, text: str, answer: str) -> dict[str, Tensor]:
        longest, width = self.widths
        source = self._tokens(text, longest)
        target = self._tokens(answer, width)
        labels, shown = target["input_ids"], target["attention_mask"]
        padding = self.tokenizer.pad_token_id
        return {
            **source,
            "decoder_input_ids": torch.cat((labels.new_tensor([padding]), labels[:-1])),
            "targets": labels.masked_fill(labels == padding, -100),
            # Decoder inputs are the targets shifted right by one, and so is their mask.
            "decoder_attention_mask": torch.cat((shown.new_ones(1), shown[:-1])),
        }

    def _tokens(self, text: str, width: int) -> dict[str, Tensor]:
        encoded = self.tokenizer(text, max_length=width, padding="max_length", truncation=True)
        return {name: torch.tensor(encoded[name]) for name in ("input_ids", "attention_mask")}


DATASET: dict[str, Any] = {
    **rows.make_datasets(T5Rows, {name: {} for name in rows.PROMPTS}),
    "SQuAD": SQuAD_Dataset,
}
