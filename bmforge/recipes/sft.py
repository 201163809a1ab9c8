"""Fine-tune on conversations: written by a chat template, learned where the assistant answers.

For a decoder conversations lie whole in rows, as many as fit, each with positions of its own and
blind to the others; which go together is drawn once, from the seed. For an encoder-decoder every
answer is a row: what was said before in, the answer out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bmforge.batch import IGNORE_INDEX
from bmforge.data.load.example import Example, fingerprint_of
from bmforge.data.load.order import derive_key, permute
from bmforge.data.load.packing import reset_positions
from bmforge.data.sources.conversations import read_conversations
from bmforge.data.sources.text_files import read_text
from bmforge.data.tasks.rows import AnswerRows, Pair, encode_answers, fill_prompt
from bmforge.errors import DataError
from bmforge.files import replace_file
from bmforge.infer.openbmb.chat import join_history
from bmforge.logging import get_logger
from bmforge.models.llama import LlamaConfig
from bmforge.parallel import World
from bmforge.recipes.inputs.examples import ExampleConfig, ExampleSource, open_examples
from bmforge.recipes.inputs.pieces import find_tokenizer, open_tokenizer
from bmforge.recipes.inputs.splitting import refuse_split
from bmforge.recipes.run import RunConfig, RunResult, TrainingData, run_recipe
from bmforge.recipes.start import check_length, traits_of
from bmforge.tokenizers import Tokenizer
from bmforge.tokenizers.chat_template import (
    TEMPLATE_FILE,
    ChatTemplate,
    Message,
    find_template,
    split_answers,
)
from bmforge.train import OptimConfig, TrainConfig

__all__ = [
    "ConversationsConfig",
    "LlamaSFTConfig",
    "encode_conversation",
    "pack_rows",
    "train_sft",
]

_OPEN_ROWS = 64
Encoded = tuple[list[int], list[int]]


@dataclass(kw_only=True)
class ConversationsConfig(RunConfig):
    """Fine-tune on conversations; the fields not named here are `RunConfig`'s.

    Args:
        data: `paths` are .jsonl files, a conversation a line: {"messages": [{"role": "user",
            "content": "..."}, {"role": "assistant", "content": "..."}]}, or in the form of Alpaca
            or ShareGPT; longer ones than `seq_len` are cut behind.
        template: file of a chat template; None takes the tokenizer's own, or a plain one. It is
            exported with the model.
    """

    data: ExampleConfig = field(default_factory=lambda: ExampleConfig(seq_len=2048))
    train: TrainConfig = field(
        default_factory=lambda: TrainConfig(optim=OptimConfig(lr=2e-5, weight_decay=0.0))
    )
    template: Path | None = None


@dataclass(kw_only=True)
class LlamaSFTConfig(ConversationsConfig):
    """Fine-tune a Llama on conversations; `model` is its size, with `init_from` that model's."""

    run_dir: Path = Path("runs/llama-sft")
    model: LlamaConfig = field(default_factory=lambda: LlamaConfig.preset("llama-3.2-1b"))


def train_sft(config: Any) -> RunResult:
    """Run, or go on with, fine-tuning on conversations.

    Args:
        config: a `ConversationsConfig` with the `model` of a decoder or encoder-decoder.

    Raises:
        BmforgeError: see `run_recipe`.
    """
    return run_recipe(config, _open_data, head=traits_of(config.model).writing_head)


def encode_conversation(
    messages: Sequence[Message], template: ChatTemplate, tokenizer: Tokenizer
) -> Encoded:
    """Return ids and labels; only what the assistant writes is learned."""
    text, ids, labels = "", list[int](), list[int]()
    for piece, is_answer in split_answers(template, messages):
        text += piece
        joined = tokenizer.encode(text)
        # Where the tokenizer joins pieces, an answer is what it would be after this prompt.
        fits = joined[: len(ids)] == ids
        new = joined[len(ids) :] if fits else tokenizer.encode(piece)
        ids += new
        labels += new if is_answer else [IGNORE_INDEX] * len(new)
    return ids, [IGNORE_INDEX, *labels[1:]]


def pack_rows(sizes: Sequence[int], width: int, seed: int) -> list[list[int]]:
    """Return which texts lie in each row: in a drawn order, each in the first row with room.

    Args:
        sizes: tokens of each, at most `width`.
        width: tokens of a row.
        seed: of the order.
    """
    order = permute(np.arange(len(sizes)), max(len(sizes), 1), derive_key("pack", seed)).tolist()
    rows: list[list[int]] = []
    open_rows: list[tuple[int, list[int]]] = []
    for number in order:
        place = next((i for i, (room, _) in enumerate(open_rows) if room >= sizes[number]), None)
        if place is None:
            rows.append([])
            open_rows = [*open_rows, (width, rows[-1])][-_OPEN_ROWS:]
            place = len(open_rows) - 1
        room, row = open_rows[place]
        row.append(number)
        open_rows[place] = (room - sizes[number], row)
    return rows


class _Conversations:
    """Packed conversations; an `ExampleSource`."""

    def __init__(
        self,
        paths: Sequence[str],
        config: Any,
        tokenizer: Tokenizer,
        template: ChatTemplate,
    ) -> None:
        width = config.data.seq_len
        self._texts: list[Encoded] = []
        left_out = cut = 0
        for place, messages in (c for path in paths for c in read_conversations(path)):
            try:
                ids, labels = encode_conversation(messages, template, tokenizer)
            except DataError as error:
                raise DataError(f"{place}: {error}") from error
            cut += len(ids) > width
            ids, labels = ids[:width], labels[:width]
            if any(label != IGNORE_INDEX for label in labels):
                self._texts.append((ids, labels))
            else:
                left_out += 1
        if cut:
            get_logger().warning(
                "%d conversations are longer than data.seq_len=%d and were cut; %d of them had no "
                "answer left and were left out",
                cut,
                width,
                left_out,
            )
        self._rows = pack_rows([len(ids) for ids, _ in self._texts], width, config.data.seed)
        self._width = width
        names = ("input_ids", "position_ids", "document_ids")
        self.columns: Mapping[str, tuple[int, int]] = {
            **dict.fromkeys(names, (width, 0)),
            "labels": (width, IGNORE_INDEX),
        }
        self.fingerprint = fingerprint_of(self._texts, self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def make(self, index: int, seed: tuple[int | str, ...]) -> Example:
        """Return row `index`; nothing is drawn. What fills it up is a document of its own."""
        texts = [self._texts[number] for number in self._rows[index]]
        ids = [id for one, _ in texts for id in one]
        starts = np.zeros((1, self._width), dtype=np.bool_)
        for end in np.cumsum([len(one) for one, _ in texts]).tolist():
            starts[0, end : end + 1] = True
        positions, documents = reset_positions(starts)
        return {
            "input_ids": ids,
            "position_ids": positions[0].tolist(),
            "document_ids": documents[0].tolist(),
            "labels": [label for _, labels in texts for label in labels],
        }


def _encode_answers(
    messages: Sequence[Message], template: ChatTemplate, tokenizer: Any, config: Any
) -> list[Pair]:
    """Return every answer of a conversation, with what an encoder reads before it."""
    traits, width = traits_of(config.model), config.data.seq_len
    if traits.objective == "dialogues":
        spoken = [tokenizer.encode(message["content"]) for message in messages]
        end, blank = tokenizer.sep_id, tokenizer.sentinel_id(0)
        return [
            Pair(join_history(spoken[:number], end, blank, width), [*spoken[number], end])
            for number, message in enumerate(messages)
            if number and message["role"] == "assistant"
        ]
    said = [message["content"] for message in messages if message["role"] == "assistant"]
    answers = iter(encode_answers(said, tokenizer, traits.answer_sentinel))
    text, pairs = "", []
    for piece, is_answer in split_answers(template, messages):
        if is_answer:  # its end is the decoder's end, not the template's
            prompt = fill_prompt(text, "", tokenizer, width, traits.sentinel)
            pairs.append(Pair(prompt, next(answers)))
        text += piece
    return pairs


def _open_answers(
    paths: Sequence[str], config: Any, tokenizer: Tokenizer, template: ChatTemplate
) -> AnswerRows:
    """Open conversations for an encoder-decoder, every answer as a row."""
    pairs: list[Pair] = []
    for place, messages in (c for path in paths for c in read_conversations(path)):
        try:
            pairs += _encode_answers(messages, template, tokenizer, config)
        except DataError as error:
            raise DataError(f"{place}: {error}") from error
    longest = config.data.seq_len
    cut = sum(len(pair.answer) > longest for pair in pairs)
    if cut:
        get_logger().warning("%d answers are longer than data.seq_len=%d: cut", cut, longest)
    return AnswerRows([Pair(p, a[:longest]) for p, a in pairs], config, reads_apart=True)


def _open_data(config: Any, rows: World) -> TrainingData:
    data = config.data
    data.check()
    refuse_split(data.split)
    check_length(config)
    tokenizer, folder = open_tokenizer(config), find_tokenizer(config)
    source = find_template(folder)
    if config.template is not None:
        source = read_text(config.template).removesuffix("\n")
    template = ChatTemplate(source, tokenizer)
    has_own_form = traits_of(config.model).objective == "dialogues"
    if source is None and not has_own_form:
        get_logger().info("%s has no chat template: a plain one is used and exported", folder)

    def save(directory: Path) -> None:
        tokenizer.save_pretrained(directory)
        if not has_own_form:
            replace_file(directory / TEMPLATE_FILE, template.source)

    def open_part(paths: Sequence[str]) -> ExampleSource:
        if traits_of(config.model).reads == "apart":
            return _open_answers(paths, config, tokenizer, template)
        return _Conversations(paths, config, tokenizer, template)

    return open_examples(
        open_part(data.paths),
        open_part(data.validation) if data.validation else None,
        data,
        rows,
        save_tokenizer=save,
    )
