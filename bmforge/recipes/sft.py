"""Supervised fine-tuning on conversations (`bmforge train conversations`).

The loss is computed on the answers. Conversations are rendered with the model's chat template. For
a decoder, several conversations are packed into one sequence; for an encoder-decoder, every answer
is a separate example.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from bmforge.data.load.example import fingerprint_of
from bmforge.data.sources.conversations import ChatExample, read_conversations
from bmforge.data.sources.text_files import read_text
from bmforge.errors import ConfigError, DataError
from bmforge.infer.processor import Processor, find_processor
from bmforge.logging import get_logger
from bmforge.models.hub import find_model
from bmforge.models.llama import LlamaConfig
from bmforge.parallel import World
from bmforge.recipes.inputs.conversation_rows import (
    EncodedRow,
    PackedConversations,
    choose_width,
    encode_turns,
    open_answers,
    render_conversation,
)
from bmforge.recipes.inputs.document_segments import find_tokenizer, open_tokenizer
from bmforge.recipes.inputs.examples import ExampleConfig, ExampleSource, open_examples
from bmforge.recipes.inputs.image_conversations import ImageConversations, check_image_layout
from bmforge.recipes.inputs.splitting import refuse_split
from bmforge.recipes.run import Launch, RunConfig, RunResult, TrainingData, run_recipe
from bmforge.recipes.start import family_of, traits_of
from bmforge.tokenizers.chat_named import NAMED_TEMPLATES
from bmforge.tokenizers.chat_template import ChatTemplate, find_template
from bmforge.tokenizers.chat_turns import AnswerChoice, AnswerText
from bmforge.train import OptimConfig, TrainConfig

__all__ = [
    "ConversationData",
    "ConversationsConfig",
    "LlamaSFTConfig",
    "read_template",
    "train_sft",
]


Render = Callable[[ChatExample], list[AnswerText]]


@dataclass(kw_only=True)
class ConversationData(ExampleConfig):
    """Options for the conversations to train on; the other fields are those of `ExampleConfig`.

    Args:
        seq_len: maximum sequence length in tokens. If there is little data, shorter sequences are
            used, so that an epoch has up to ten steps; they always fit the longest conversation.
        answers: answers to train on: "all" answers of a conversation, or only the "last".
        ignore: fields of the records to ignore; every other field that the chat template does not
            use is an error.
        validation_fraction: fraction of the conversations that is held out for evaluation, selected
            by `seed`; requires that `validation` is empty.
    """

    seq_len: int = 2048
    global_batch_size: int = 8
    micro_batch_size: int = 2
    answers: AnswerChoice = "all"
    ignore: tuple[str, ...] = ("id",)
    validation_fraction: float = 0.0

    def check(self) -> None:
        """Raise `ConfigError` for a number out of range, or if there are no paths."""
        super().check()
        refuse_split(self.split)
        if self.validation_fraction and self.validation:
            raise ConfigError(
                "data.validation_fraction has no effect with data.validation. Leave one of "
                "them out."
            )


@dataclass(kw_only=True)
class ConversationsConfig(RunConfig):
    """Config for fine-tuning on conversations; the other fields are those of `RunConfig`.

    Args:
        data: `paths` are JSON files or tables, or folders of them, with one conversation
            per record: {"messages": [{"role": "user", "content": "..."}, {"role": "assistant",
            "content": "..."}], "tools": [...]}; ShareGPT's, Alpaca's and prompt/completion forms
            are read as well. Conversations longer than `seq_len` are truncated. For a
            vision-language model, the content of a user message may be a list of parts, such as
            {"type": "image", "image": FILE} and {"type": "text", "text": "..."}.
        template: chat template, as a file or a name such as chatml or llama3; it is exported with
            the model (if None: the template of the tokenizer, or else the default template).
    """

    data: ConversationData = field(default_factory=ConversationData)
    train: TrainConfig = field(
        default_factory=lambda: TrainConfig(optim=OptimConfig(lr=2e-5, weight_decay=0.0))
    )
    template: Path | None = None


@dataclass(kw_only=True)
class LlamaSFTConfig(ConversationsConfig):
    """Config for fine-tuning a Llama on chats.

    Fields set in `model` override those of the checkpoint in `init_from`.
    """

    run_dir: Path = Path("runs/llama-sft")
    model: LlamaConfig = field(default_factory=lambda: LlamaConfig.preset("llama-3.2-1b"))


def train_sft(config: Any, launch: Launch = run_recipe) -> RunResult:
    """Run or resume fine-tuning on conversations.

    Args:
        config: a `ConversationsConfig` whose `model` is the config of a decoder or encoder-decoder.

    Raises:
        BmforgeError: see `run_recipe`.
    """
    return launch(config, _open_data, head=traits_of(config.model).generation_head)


def _open_data(config: Any, rows: World) -> TrainingData:
    """Read, render and encode the conversations of a run."""
    data = config.data
    tokenizer, folder = open_tokenizer(config), find_tokenizer(config)
    template = ChatTemplate(read_template(config, folder), tokenizer)
    has_own_form = traits_of(config.model).objective == "dialogues"

    def save(directory: Path) -> None:
        tokenizer.save_pretrained(directory)
        if not has_own_form:
            template.save(directory)

    processor = _find_processor(config)
    conversations = _read_all(data.paths, processor is not None)
    held_out = _read_all(data.validation, processor is not None)
    if data.validation_fraction:
        conversations, held_out = _hold_out(conversations, data.validation_fraction, data.seed)
    parts = [conversations, held_out] if held_out else [conversations]
    untrained: list[str] = []
    render = partial(
        render_conversation,
        template=template,
        answers=data.answers,
        ignore=data.ignore,
        untrained=untrained,
    )
    sources: list[ExampleSource]
    if traits_of(config.model).is_encoder_decoder:
        sources = [_open_answers(config, tokenizer, template, render, part) for part in parts]
    elif processor is not None and any(map(_has_images, [*conversations, *held_out])):
        check_image_layout(config)
        make = partial(
            ImageConversations,
            render=render,
            tokenizer=tokenizer,
            processor=processor,
            seq_len=data.seq_len,
        )
        sources = [make(part) for part in parts]
    else:
        encoded = [_encode(part, render, tokenizer) for part in parts]
        packs = _can_pack(config)
        data = dataclasses.replace(data, seq_len=choose_width(encoded, data, packs))
        sources = [
            PackedConversations(coded, data.seq_len, data.seed, packs, len(part))
            for coded, part in zip(encoded, parts, strict=True)
        ]
    if untrained:
        get_logger().warning(
            "%d answers at the beginning of a conversation are context and not trained on, since "
            "the chat template cannot render an empty context before them; the first: %s",
            *(len(untrained), untrained[0]),
        )
    return open_examples(
        sources[0],
        sources[1] if held_out else None,
        data,
        rows,
        save_tokenizer=save,
    )


def _find_processor(config: Any) -> Processor | None:
    """Return the image processor of the initial model; None for a model of text only."""
    is_foreign = family_of(config.model).keeps_foreign_cache
    if config.init_from is None or not is_foreign:
        return None
    return find_processor(find_model(config.init_from))


def _has_images(conversation: ChatExample) -> bool:
    return any(isinstance(message["content"], list) for message in conversation.messages)


def _can_pack(config: Any) -> bool:
    """Return True if a sequence may have several conversations; otherwise log the reason."""
    if config.adapter.kind == "soft-prompt":
        reason = "a soft prompt is prepended to sequences"
    elif not family_of(config.model).separates_documents(config.model):
        reason = "this model cannot separate the conversations of a packed sequence"
    else:
        return True
    get_logger().info("%s: every sequence has one conversation", reason)
    return False


def read_template(config: Any, folder: Path) -> str | None:
    """Return the source of the run's chat template; None for the default template."""
    if config.template is not None:
        name = str(config.template)
        if name in NAMED_TEMPLATES:
            return NAMED_TEMPLATES[name]
        if not Path(name).is_file():
            raise ConfigError(
                f"template={name!r} is neither a file nor a known name (supported: "
                f"{', '.join(NAMED_TEMPLATES)})."
            )
        return read_text(name).removesuffix("\n")
    source = find_template(folder)
    if source is None and traits_of(config.model).objective != "dialogues":
        get_logger().info(
            (
                "%s has no chat template: a plain one ('User: ...', 'Assistant: ...') is used and "
                "exported. --template chatml selects ChatML"
            ),
            folder,
        )
    return source


def _read_all(paths: Sequence[str], images: bool) -> list[ChatExample]:
    """Read all conversations, with images if the model supports them; warn of empty answers."""
    conversations = [c for path in paths for c in read_conversations(path, images)]
    empty = [c.place for c in conversations if any(map(_is_empty_answer, c.messages))]
    if empty:
        get_logger().warning(
            (
                "%d conversations have an empty answer, which the model learns to give; the first: "
                '%s. A message with "weight": 0 is not trained on'
            ),
            *(len(empty), empty[0]),
        )
    return conversations


def _is_empty_answer(message: Mapping[str, Any]) -> bool:
    """Return True for an empty assistant message (no text, reasoning or tool calls) with a loss."""
    if message["role"] != "assistant" or message.get("weight") == 0:
        return False
    fields = ("content", "tool_calls", "reasoning_content", "reasoning", "thinking")
    return not any(str(message.get(name) or "").strip() for name in fields)


def _hold_out(
    conversations: Sequence[ChatExample], fraction: float, seed: int
) -> tuple[list[ChatExample], list[ChatExample]]:
    """Split conversations by a hash into training and evaluation data.

    Equal conversations are in the same split, and adding data moves no conversation to the other
    split.
    """

    def is_held_out(conversation: ChatExample) -> bool:
        digest = fingerprint_of(seed, [dict(m) for m in conversation.messages])
        return int(digest[:12], 16) < fraction * 16**12

    held_out = [c for c in conversations if is_held_out(c)]
    training = [c for c in conversations if not is_held_out(c)]
    if not held_out or not training:
        raise DataError(
            f"data.validation_fraction={fraction} leaves {len(training)} conversations for "
            f"training and {len(held_out)} for evaluation. Use another fraction or data.seed."
        )
    return training, held_out


def _open_answers(
    config: Any,
    tokenizer: Any,
    template: ChatTemplate,
    render: Render,
    conversations: Sequence[ChatExample],
) -> ExampleSource:
    """Encode conversations for an encoder-decoder, one example per answer."""
    traits = traits_of(config.model)
    return open_answers(conversations, render, template.end_mark(), tokenizer, traits, config)


def _encode(
    conversations: Sequence[ChatExample], render: Render, tokenizer: Any
) -> list[EncodedRow]:
    """Encode conversations for a decoder, before several are packed into one sequence."""
    return [row for c in conversations for row in encode_turns(render(c), tokenizer)]
