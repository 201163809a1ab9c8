"""Conversations with images as training data of vision-language models.

The processor of the model encodes the conversation up to the first answer, with all images, as in
generation; the later tokens have no images. Sequences are padded to the longest one of a
micro-batch.

All processes must run the same modules, because their collectives would not match otherwise. If
some conversations have images, a micro-batch without images therefore gets a sequence with images
and without labels. This also holds for one process, so that the optimizer treats the image encoder
in the same way on every layout: without a gradient it would skip the encoder's weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bmforge.batch import IGNORE_INDEX, Batch
from bmforge.data.load.example import fingerprint_of
from bmforge.data.sources.conversations import ChatExample
from bmforge.errors import ConfigError, DataError
from bmforge.infer.images import check_image, read_data_uri, read_image_file
from bmforge.infer.processor import Processor
from bmforge.logging import get_logger
from bmforge.recipes.inputs.conversation_rows import encode_turns
from bmforge.tokenizers import Tokenizer
from bmforge.tokenizers.chat_messages import Message
from bmforge.tokenizers.chat_turns import AnswerText

__all__ = ["ImageConversations", "check_image_layout"]


@dataclass(frozen=True)
class ImageRow:
    """A training sequence with images.

    Args:
        location: file and line of the conversation.
        text: text up to the first answer.
        images: files or data URIs of the images in the text.
        ids: tokens after the text.
        labels: labels of these tokens.
    """

    location: str
    text: str
    images: tuple[str, ...]
    ids: list[int]
    labels: list[int]


class ImageConversations:
    """`ExampleSource` of conversations with images, one conversation per sequence.

    Answers with different numbers of images before them are in separate sequences.

    Args:
        conversations: conversations in the order of the sequences.
        render: function that renders the answers of a conversation with the chat template.
        tokenizer: the model's tokenizer.
        processor: the model's processor.
        seq_len: maximum sequence length in tokens; longer sequences are truncated at the end.
    """

    def __init__(
        self,
        conversations: Sequence[ChatExample],
        render: Callable[[ChatExample], Sequence[AnswerText]],
        tokenizer: Tokenizer,
        processor: Processor,
        seq_len: int,
    ) -> None:
        self._rows = [row for c in conversations for row in _encode(c, render, tokenizer)]
        self._processor, self._seq_len = processor, seq_len
        _check_tails(self._rows, processor)
        _check_images(self._rows)
        self._filler = _find_filler(self._rows)
        self.columns: Mapping[str, tuple[int, int]] = {"labels": (seq_len, IGNORE_INDEX)}
        contents = [
            (row.text, row.ids, row.labels, [(name, _size(name)) for name in row.images])
            for row in self._rows
        ]
        self.fingerprint = fingerprint_of(contents)
        images = sum(len(row.images) for row in self._rows)
        get_logger().info("%d examples with %d images", len(self._rows), images)

    def __len__(self) -> int:
        return len(self._rows)

    def make(self, index: int, seed: tuple[int | str, ...]) -> Any:
        """Return the index of a sequence and the labels of its tokens after the images."""
        return {"row": [index], "labels": self._rows[index].labels}

    def collate(self, examples: Sequence[Any]) -> Batch:
        """Encode sequences with their images as one batch.

        Raises:
            DataError: an image was changed after the start, or the images of a sequence leave no
                tokens for an answer.
        """
        rows = [self._rows[example["row"][0]] for example in examples]
        if self._filler is not None and not any(row.images for row in rows):
            rows, examples = [*rows, self._filler], [*examples, {"labels": []}]
        images = [[_open(name, row.location) for name in row.images] for row in rows]
        batch = self._processor.encode_batch([row.text for row in rows], images, "right")
        lengths = batch.pop("attention_mask").sum(1).tolist()
        labels = [
            torch.tensor([*[IGNORE_INDEX] * length, *example["labels"]])
            for length, example in zip(lengths, examples, strict=True)
        ]
        tails = [torch.tensor(row.ids) for row in rows]
        shape = batch["input_ids"].shape
        for name, value in batch.items():
            if name != "input_ids" and value.shape[:2] == shape:  # a value per token
                batch[name] = _append(value, lengths, tails, self._seq_len)
        batch["input_ids"] = _append(batch["input_ids"], lengths, tails, self._seq_len, is_ids=True)
        for row, length in zip(rows, lengths, strict=True):
            if length >= self._seq_len:
                raise DataError(
                    f"{row.location} has {length} tokens of text and images before the first "
                    f"answer, so the answer does not fit into data.seq_len={self._seq_len}. "
                    "Raise data.seq_len, or leave the conversation out."
                )
        width = batch["input_ids"].shape[1]
        joined = [F.pad(row[:width], (0, max(0, width - len(row))), value=IGNORE_INDEX)
                  for row in labels]  # fmt: skip
        counts = torch.tensor([n + len(tail) for n, tail in zip(lengths, tails, strict=True)])
        mask = (torch.arange(width) < counts[:, None]).long()
        return {**batch, "attention_mask": mask, "labels": torch.stack(joined)}


def _check_tails(rows: Sequence[ImageRow], processor: Processor) -> None:
    """Raise `DataError` if a text after the first answer contains an image token.

    The text before it is checked by the processor.
    """
    media = processor.media_ids
    wrong = [row.location for row in rows if media.intersection(row.ids)]
    if wrong:
        raise DataError(
            f"{wrong[0]} contains an image token, such as <image>, in an answer or after one "
            f"({len(wrong)} conversations have this problem). Remove the token from the text."
        )


def _check_images(rows: Sequence[ImageRow]) -> None:
    """Raise `DataError` if an image is damaged, before training begins."""
    places = {name: row.location for row in rows for name in row.images}
    problems = []
    for name, location in places.items():
        try:
            check_image(name)
        except DataError as error:
            problems.append(f"{location}: {error}")
    if len(problems) > 1:
        raise DataError(
            f"{problems[0]} In total, {len(problems)} of {len(places)} images cannot be used."
        )
    if problems:
        raise DataError(problems[0])


def _find_filler(rows: Sequence[ImageRow]) -> ImageRow | None:
    """Return a short sequence with images and no answer; None if none or all have images."""
    with_images = [row for row in rows if row.images]
    if not with_images or len(with_images) == len(rows):
        return None
    shortest = min(with_images, key=lambda row: (len(row.images), len(row.text)))
    return dataclasses.replace(shortest, ids=[], labels=[])


def _append(
    table: Tensor,
    lengths: Sequence[int],
    tails: Sequence[Tensor],
    width: int,
    is_ids: bool = False,
) -> Tensor:
    """Replace the padding of each sequence with the tokens after its images, and pad again.

    Args:
        table: one of the processor's tensors, for the text up to the first answer.
        lengths: length of each sequence without padding.
        tails: tokens after the images of each sequence.
        width: length to which sequences are truncated.
        is_ids: True for token ids; in other tensors, the last value is repeated instead, as in
            generation.
    """
    rows = []
    for row, length, tail in zip(table, lengths, tails, strict=True):
        more = tail if is_ids else row[length - 1 : length].expand(len(tail), *row.shape[1:])
        rows.append(torch.cat((row[:length], more))[:width])
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def _encode(
    conversation: ChatExample,
    render: Callable[[ChatExample], Sequence[AnswerText]],
    tokenizer: Tokenizer,
) -> Iterator[ImageRow]:
    """Yield a conversation's sequences: answers after equally many images share a sequence."""
    sources = [list(_sources(message)) for message in conversation.messages]
    groups: dict[int, list[AnswerText]] = {}
    for turn in render(conversation):
        groups.setdefault(sum(map(len, sources[: turn.number])), []).append(turn)
    names = tuple(name for row in sources for name in row)
    for count, turns in groups.items():
        prompts = {tuple(tokenizer.encode(turn.prompt)): turn.prompt for turn in turns}
        for row in encode_turns(turns, tokenizer):
            learned = (n for n, label in enumerate(row.labels) if label != IGNORE_INDEX)
            start = next(learned, None)
            if start is None:  # an empty answer
                continue
            text = prompts.get(tuple(row.ids[:start]))
            if text is None:
                raise DataError(
                    f"{conversation.place} begins with an answer. Add a message of the user "
                    "before it."
                )
            yield ImageRow(
                conversation.place, text, names[:count], row.ids[start:], row.labels[start:]
            )


def _sources(message: Message) -> Iterator[str]:
    """Yield the files and data URIs of a message's images."""
    content = message["content"]
    for part in content if isinstance(content, list) else ():
        if part["type"] == "image":
            yield part["image"]


def _size(name: str) -> int:
    return len(name) if name.startswith("data:") else Path(name).stat().st_size


def _open(name: str, location: str) -> Any:
    try:
        is_uri = name.startswith("data:")
        return read_data_uri(name, "an image") if is_uri else read_image_file(name)
    except DataError as error:
        raise DataError(f"{location}: {error}") from error


def check_image_layout(config: Any) -> None:
    """Raise `ConfigError` for a layout or option that training with images does not support."""
    if split := config.layout.splits_stages_or_tokens:
        raise ConfigError(
            f"{split} is not supported for conversations with images, because it divides tokens "
            "or blocks over processes, but not images. Use data parallelism (layout.zero)."
        )
    if config.adapter.kind == "soft-prompt":
        raise ConfigError(
            "adapter.kind='soft-prompt' is not supported for a vision-language model, because it "
            "moves the positions of the images. Use adapter.kind=lora."
        )
