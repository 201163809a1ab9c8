"""Converts conversations to token sequences with labels on the answers, and packs them.

`encode_turns` encodes a conversation; `pack_rows` packs several of them into one sequence;
`PackedConversations` and `open_answers` are the data of the `conversations` task.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from bmforge.batch import IGNORE_INDEX
from bmforge.data.load.example import Example, fingerprint_of
from bmforge.data.load.order import derive_key, permute
from bmforge.data.load.packing import reset_positions
from bmforge.data.sources.conversations import ChatExample
from bmforge.data.tasks.rows import AnswerRows, Pair
from bmforge.errors import DataError
from bmforge.infer.openbmb.chat import join_history
from bmforge.logging import get_logger
from bmforge.models.traits import Traits
from bmforge.tokenizers import Tokenizer
from bmforge.tokenizers.chat_messages import TOOL_ROLES, Message
from bmforge.tokenizers.chat_template import ChatTemplate
from bmforge.tokenizers.chat_turns import AnswerChoice, AnswerText, check_fields, render_answers
from bmforge.tokenizers.sentinels import encode_answers, fill_prompt

__all__ = [
    "EncodedRow",
    "PackedConversations",
    "choose_width",
    "drop_fields",
    "encode_turns",
    "open_answers",
    "pack_rows",
    "render_conversation",
]

_WIDTH_MULTIPLE = 64  # tokens; aligns matrix products and context-parallel shards
_STEPS_PER_EPOCH = 10


class EncodedRow(NamedTuple):
    """Token ids and labels of a training sequence; tokens without a loss have the label -100."""

    ids: list[int]
    labels: list[int]


def render_conversation(
    conversation: ChatExample,
    template: ChatTemplate,
    answers: AnswerChoice = "all",
    ignore: Sequence[str] = (),
    untrained: list[str] | None = None,
) -> list[AnswerText]:
    """Render the answers of a conversation with the chat template, as (prompt, answer) texts.

    Args:
        conversation: messages, tools and further fields, which must be variables of the template.
        template: the model's chat template.
        answers: "all" for every answer, or "last" for only the last one.
        ignore: names of fields to ignore, except the `name` of tool messages.
        untrained: list to which the file and line of the conversation are appended for each answer
            that is context only (see `render_answers`).

    Raises:
        DataError: a field is neither read by the template nor listed in `ignore`; also for the
            reasons given in `render_answers`.
    """
    fields = {k: v for k, v in conversation.fields.items() if k not in ignore}
    # TRL's data sets put template variables such as enable_thinking into this field.
    variables = dict(fields.pop("chat_template_kwargs", {})) | fields
    unknown = [name for name in variables if name not in template.variables]
    tools = None if "tools" in ignore else conversation.tools
    if tools and "tools" not in template.variables:
        unknown.append("tools")
    if unknown:
        raise DataError(
            f"{conversation.place} has the fields {', '.join(unknown)}, which the chat template "
            f"does not use (it uses {', '.join(sorted(template.variables))}). Ignore them with "
            f"--data.ignore {' '.join(unknown)}."
        )
    messages = drop_fields(conversation.messages, ignore)
    numbers: list[int] = []
    try:
        check_fields(template, messages, tools, variables)
        turns = render_answers(template, messages, tools, variables, answers, numbers)
    except DataError as error:
        raise DataError(f"{conversation.place}: {error}") from error
    if untrained is not None:
        untrained += [conversation.place] * len(numbers)
    return turns


def drop_fields(messages: Sequence[Message], ignore: Sequence[str]) -> list[Message]:
    """Return the messages without the fields to ignore; tool messages keep their `name`."""
    return [
        {k: v for k, v in message.items() if k not in ignore or _is_tool_name(message, k)}
        for message in messages
    ]


def _is_tool_name(message: Message, key: str) -> bool:
    return key == "name" and message["role"] in TOOL_ROLES


def encode_turns(turns: Sequence[AnswerText], tokenizer: Tokenizer) -> list[EncodedRow]:
    """Encode rendered answers; a sequence contains all answers that continue the same text.

    The ids of a sequence are those that ``apply_chat_template`` returns for its text. If the
    tokenizer merges tokens across the boundary between prompt and answer, the prompt has the same
    ids as in generation, and the answer is encoded separately.

    Args:
        turns: (prompt, answer) texts of one conversation, in order.
        tokenizer: the model's tokenizer.
    """
    rows: list[EncodedRow] = []
    for turn in turns:
        prompt = tokenizer.encode(turn.prompt)
        ids = tokenizer.encode(turn.prompt + turn.answer)
        if ids[: len(prompt)] != prompt:
            ids = prompt + tokenizer.encode(turn.answer)
        labels = [IGNORE_INDEX] * len(prompt) + ids[len(prompt) :]
        labels[:1] = [IGNORE_INDEX]  # the first token is not predicted
        previous = rows[-1] if rows else None
        if previous is not None and ids[: len(previous.ids)] == previous.ids:
            rows[-1] = EncodedRow(ids, previous.labels + labels[len(previous.ids) :])
        else:
            rows.append(EncodedRow(ids, labels))
    return rows


def choose_width(parts: Sequence[Sequence[EncodedRow]], data: Any, packs: bool = True) -> int:
    """Return the length of a packed sequence: `data.seq_len`, or less for a small data set.

    With sequences of the full length, a file of a few hundred chats would not even fill one
    optimizer step: an epoch would be a single step, which repeats the data and learns almost
    nothing.

    Args:
        parts: encoded conversations for training, then those for evaluation.
        data: config with `seq_len` and `global_batch_size`.
        packs: whether a sequence has several conversations.

    Returns:
        The smallest multiple of 64 that is not shorter than the longest conversation and, with
        `packs`, leads to at most ten optimizer steps per epoch; `data.seq_len` if that is smaller.
    """
    longest = max((len(row.ids) for part in parts for row in part), default=0)
    tokens = sum(len(row.ids) for row in parts[0]) if packs else 0
    least_width = max(longest, -(-tokens // (_STEPS_PER_EPOCH * data.global_batch_size)), 1)
    return min(data.seq_len, -(-least_width // _WIDTH_MULTIPLE) * _WIDTH_MULTIPLE)


def pack_rows(lengths: Sequence[int], width: int, seed: int) -> list[list[int]]:
    """Assign texts to packed sequences by best-fit decreasing bin packing.

    Texts are assigned in order of decreasing length, each to the fullest sequence with enough
    space. For typical chats, less than 1 % of the tokens are padding, compared with up to 5 % for
    first-fit in random order.

    Args:
        lengths: length of each text in tokens, at most `width`.
        width: length of a packed sequence in tokens.
        seed: random seed of the order of texts with equal lengths.

    Returns:
        for each packed sequence, the indices of its texts.
    """
    count = len(lengths)
    order = permute(np.arange(count), max(count, 1), derive_key("pack", seed)).tolist()
    rows: list[list[int]] = []
    # Number of free tokens -> rows, and the sorted keys of this dict. There are at most `width`
    # keys, but there may be many more rows.
    open_rows: dict[int, list[list[int]]] = {}
    spaces: list[int] = []
    for number in sorted(order, key=lambda n: -lengths[n]):
        index = bisect_left(spaces, lengths[number])
        if index < len(spaces):
            space = spaces[index]
            row = open_rows[space].pop()
            if not open_rows[space]:
                del open_rows[space], spaces[index]
        else:
            space, row = width, []
            rows.append(row)
        row.append(number)
        space_left = space - lengths[number]
        if space_left not in open_rows:
            open_rows[space_left] = []
            insort(spaces, space_left)
        open_rows[space_left].append(row)
    return rows


class PackedConversations:
    """`ExampleSource` of conversations packed into sequences of equal length, for decoders.

    Positions restart at each conversation of a sequence, and tokens attend only to tokens of the
    same conversation.

    Args:
        rows: encoded conversations; those longer than `width` are truncated at the end.
        width: length of a packed sequence in tokens.
        seed: random seed of the packing.
        packs: pack several conversations into a sequence; False for models that cannot separate
            them.
        conversations: number of conversations, for the log (default: number of `rows`).
    """

    def __init__(
        self,
        rows: Sequence[EncodedRow],
        width: int,
        seed: int,
        packs: bool = True,
        conversations: int | None = None,
    ) -> None:
        cut = [EncodedRow(row.ids[:width], row.labels[:width]) for row in rows]
        self._texts = [row for row in cut if any(label != IGNORE_INDEX for label in row.labels)]
        self._width = width
        self._packs = packs
        self._rows = (
            pack_rows([len(row.ids) for row in self._texts], width, seed)
            if packs
            else [[number] for number in range(len(self._texts))]
        )
        names = ("input_ids", *(("position_ids", "document_ids") if packs else ()))
        self.columns: Mapping[str, tuple[int, int]] = {
            **dict.fromkeys(names, (width, 0)),
            "labels": (width, IGNORE_INDEX),
        }
        plain = [tuple(row) for row in self._texts]
        self.fingerprint = fingerprint_of(plain, self._rows)
        count = len(rows) if conversations is None else conversations
        self._report([len(row.ids) > width for row in rows], len(rows) - len(self._texts), count)

    def _report(self, is_cut: Sequence[bool], without_answer: int, conversations: int) -> None:
        log = get_logger()
        if any(is_cut):
            log.warning(
                "%d of %d examples are longer than data.seq_len=%d and were truncated. Raise "
                "data.seq_len to use them in full.",
                sum(is_cut),
                len(is_cut),
                self._width,
            )
        if without_answer:
            log.warning("%d examples have no answer to train on and were left out", without_answer)
        tokens = sum(len(row.ids) for row in self._texts)
        learned = sum(label != IGNORE_INDEX for row in self._texts for label in row.labels)
        log.info(
            "%d conversations with %d answers to train on, in %d sequences of %d tokens: "
            "%d tokens, %d of them trained, %.1f%% padding",
            conversations,
            sum(_count_answers(row.labels) for row in self._texts),
            len(self._rows),
            self._width,
            tokens,
            learned,
            100 * (1 - tokens / max(1, len(self._rows) * self._width)),
        )

    def __len__(self) -> int:
        return len(self._rows)

    def make(self, index: int, seed: tuple[int | str, ...]) -> Example:
        """Return the packed sequence at `index`; the padding counts as one more document."""
        texts = [self._texts[number] for number in self._rows[index]]
        row = {
            "input_ids": [id for text in texts for id in text.ids],
            "labels": [label for text in texts for label in text.labels],
        }
        if not self._packs:
            return row
        starts = np.zeros((1, self._width), dtype=np.bool_)
        for end in np.cumsum([len(text.ids) for text in texts]).tolist():
            starts[0, end : end + 1] = True
        positions, documents = reset_positions(starts)
        documents_of_row = {
            "position_ids": positions[0].tolist(),
            "document_ids": documents[0].tolist(),
        }
        return row | documents_of_row


def _count_answers(labels: Sequence[int]) -> int:
    """Return the number of contiguous runs of labels with a loss."""
    is_trained = [label != IGNORE_INDEX for label in labels]
    return sum(now and not before for before, now in pairwise([False, *is_trained]))


def open_answers(
    conversations: Sequence[ChatExample],
    render: Callable[[ChatExample], Sequence[AnswerText]],
    end: str,
    tokenizer: Any,
    traits: Traits,
    config: Any,
) -> AnswerRows:
    """Convert conversations to examples for an encoder-decoder, one example per answer.

    Args:
        conversations: data of the run.
        render: function that renders the answers of a conversation with the chat template.
        end: end-of-turn mark of the template, which is replaced by the decoder's end token.
        tokenizer: the model's tokenizer.
        traits: properties of the model family.
        config: the run's config.
    """
    longest = config.data.seq_len
    pairs: list[Pair] = []
    for conversation in conversations:
        if traits.objective == "dialogues":
            pairs += _encode_dialogue(conversation, tokenizer, longest)
            continue
        turns = render(conversation)
        texts = [turn.answer.removesuffix(end).strip() for turn in turns]
        answers = encode_answers(texts, tokenizer, traits.answer_sentinel)
        for turn, answer in zip(turns, answers, strict=True):
            prompt = fill_prompt(turn.prompt, "", tokenizer, longest, traits.sentinel)
            pairs.append(Pair(prompt, answer))
    cut = sum(len(pair.answer) > longest for pair in pairs)
    if cut:
        get_logger().warning(
            "%d of %d answers are longer than data.seq_len=%d and were truncated. Raise "
            "data.seq_len to use them in full.",
            cut,
            len(pairs),
            longest,
        )
    get_logger().info("%d examples, one per answer", len(pairs))
    return AnswerRows([Pair(p, a[:longest]) for p, a in pairs], config, reads_apart=True)


def _encode_dialogue(conversation: ChatExample, tokenizer: Any, width: int) -> Iterator[Pair]:
    """Yield (history, answer) pairs of a conversation for EVA, which has no chat template."""
    texts = [tokenizer.encode(message["content"]) for message in conversation.messages]
    end, blank = tokenizer.sep_id, tokenizer.sentinel_id(0)
    for number, message in enumerate(conversation.messages):
        if number and message["role"] == "assistant":
            history = join_history(texts[:number], end, blank, width)
            yield Pair(history, [*texts[number], end])
