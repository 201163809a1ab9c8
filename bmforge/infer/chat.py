"""Conversations with text-generating models, with prompts rendered by a chat template.

A decoder continues the prompt. An encoder-decoder and GLM read the prompt with a sentinel or mask
token at its end, and generate the text for this token. EVA and CPM-Bee have their own formats, in
`openbmb/`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bmforge.errors import ConfigError
from bmforge.infer.end_tokens import find_end_tokens
from bmforge.infer.generation import generate
from bmforge.infer.openbmb.texts import continue_ids
from bmforge.infer.options import GenerationConfig
from bmforge.logging import get_logger
from bmforge.models.base import Model
from bmforge.tokenizers import Tokenizer
from bmforge.tokenizers.chat_template import ChatTemplate, Message
from bmforge.tokenizers.sentinels import decode_answer

if TYPE_CHECKING:
    from bmforge.infer.processor import Processor

__all__ = ["Conversation", "encode_messages", "find_ends"]

_MAX_NEW_TOKENS = 128


class Conversation:
    """Conversation with a model: keeps the history and generates the answers.

    Args:
        model: model that generates text, except EVA and CPM-Bee.
        tokenizer: the model's tokenizer.
        template: chat template that renders the messages; None means the default template (``Role:
            text`` lines).
        options: generation options of the answers; EOS tokens are taken from the tokenizer and
            the template. Answers are cut at the model's maximum length.
        system: system message.
        limit: maximum length of the conversation in tokens, including the answer; None means the
            model's maximum length.
        directory: model directory with the image processor; None if there are no images.

    Attributes:
        history: user and assistant messages, oldest first; an image is a part of a message with
            the path of its file.

    Raises:
        ConfigError: the model does not generate text, or needs another conversation format.
    """

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer,
        template: ChatTemplate | None = None,
        options: GenerationConfig | None = None,
        system: str | None = None,
        limit: int | None = None,
        directory: Path | None = None,
    ) -> None:
        traits = model.traits
        if not traits.can_generate or traits.objective in ("documents", "dialogues"):
            raise ConfigError(
                f"a {type(model).__name__} with the head {model.config.head!r} cannot be used "
                "with a chat template (needed: a causal or encoder-decoder model that "
                "generates text). For EVA and CPM-Bee, use bmforge.infer.openbmb."
            )
        self.model, self.tokenizer = model, tokenizer
        self.template = template or ChatTemplate(None, tokenizer)
        self.options = options or GenerationConfig(max_new_tokens=_MAX_NEW_TOKENS)
        is_apart = traits.is_encoder_decoder
        own = None if is_apart else traits.row_limit(model.config)
        self._limit = limit if own is None else min(own, limit or own)
        self._mark = self.template.end_mark().strip() or self.template.end_mark()
        self._system: list[Message] = []
        if system is not None:
            self._system = [{"role": "system", "content": system}]
        self.history: list[Message] = []
        self._directory = directory
        self._processor: Processor | None = None  # loaded with the first image
        self._images: dict[str, Any] = {}  # path -> Pillow image
        self._attached: list[str] = []  # images of the next message
        self._num_dropped = 0  # messages that the last prompt left out

    def reply(self, text: str, on_text: Callable[[str], None] | None = None) -> str:
        """Send a user message and return the answer; both are appended to the history.

        Args:
            text: user message; it must not be empty.
            on_text: called with each chunk of the answer while it is generated; not called with a
                beam search or an encoder-decoder, whose answers are complete only at the end.

        Raises:
            ConfigError: the message is empty, or longer than the model's maximum length.
        """
        if not text.strip():
            raise ConfigError(f"the message is empty: text={text!r}. Pass a non-empty string.")
        content: str | list[dict[str, str]] = text
        if self._attached:
            images = [{"type": "image", "image": path} for path in self._attached]
            content = [*images, {"type": "text", "text": text}]
        turns: list[Message] = [*self.history, {"role": "user", "content": content}]
        answer = self._write(*self._read(turns), on_text)
        self.history = [*turns, {"role": "assistant", "content": answer}]
        self._attached = []
        return answer

    def clear(self) -> None:
        """Clear the history and the images of the next message."""
        self.history, self._attached = [], []

    def attach_image(self, file: str | Path) -> None:
        """Attach an image file to the next message, before its text.

        Raises:
            ConfigError: the model supports only text.
            DataError: the file cannot be read as an image.
        """
        path = str(Path(file).absolute())
        self.read_image(path)
        self._attached.append(path)

    def read_image(self, path: str) -> None:
        """Read an image file that `history` contains; see `attach_image`."""
        from bmforge.infer.images import read_image_file
        from bmforge.infer.processor import find_processor

        if self._processor is None and self._directory is not None and self.model.takes_images:
            self._processor = find_processor(self._directory)
        if self._processor is None:
            raise ConfigError(
                f"the image {path!r} cannot be used, because this model supports only text. Use a "
                "vision-language model whose directory contains its image processor."
            )
        self._images[path] = read_image_file(path)

    def set_system(self, text: str | None) -> None:
        """Replace the system message; None removes it."""
        self._system = [] if text is None else [{"role": "system", "content": text}]

    @property
    def streams(self) -> bool:
        """Whether answers are generated token by token from left to right."""
        return not self.model.traits.is_encoder_decoder and self.options.num_beams == 1

    def prompt_opens(self, mark: str) -> bool:
        """Return True if rendered prompts end with the text `mark`, such as <think>."""
        example = [{"role": "user", "content": "hi"}]
        return self.template.render(example, add_generation_prompt=True).rstrip().endswith(mark)

    @property
    def messages(self) -> list[Message]:
        """Messages so far, including the system message."""
        return [*self._system, *self.history]

    def _read(self, turns: Sequence[Message]) -> tuple[list[int], Mapping[str, Tensor] | None]:
        """Encode the prompt, without the oldest turns if the answer would not fit.

        Returns:
            the token ids, and the model's inputs for the images.
        """
        limit, new_tokens = self._limit, self.options.max_new_tokens
        for first in range(0, len(turns), 2):  # drop a question together with its answer
            messages = [*self._system, *turns[first:]]
            ids, inputs = self._encode(messages)
            if limit is None or len(ids) + new_tokens <= limit:
                break
        if limit is None or len(ids) < limit:
            self._warn_dropped(first, len(turns))
            return ids, inputs
        raise ConfigError(
            f"the last message has {len(ids)} tokens with the chat template, but prompt and "
            f"answer together may have at most {limit}. Send a shorter message."
        )

    def _encode(self, messages: Sequence[Message]) -> tuple[list[int], Mapping[str, Tensor] | None]:
        contents = [m["content"] for m in messages if not isinstance(m["content"], str)]
        paths = [part["image"] for parts in contents for part in parts if part["type"] == "image"]
        if not paths or self._processor is None:
            return encode_messages(self.template, messages, self.model, self.tokenizer), None
        text, _ = self.template.encode([_without_paths(message) for message in messages])
        encoded = self._processor.encode(text, [self._images[path] for path in paths])
        return encoded.ids, encoded.inputs

    def _warn_dropped(self, count: int, total: int) -> None:
        """Log a warning if the context is full and more of the oldest messages are left out."""
        if count > self._num_dropped:
            get_logger().warning(
                "the context of %d tokens is full: the oldest %d of %d messages are left out. "
                "Reduce max_new_tokens=%d to keep more of them.",
                self._limit, count, total, self.options.max_new_tokens,
            )  # fmt: skip
        self._num_dropped = count

    def _write(
        self,
        ids: list[int],
        inputs: Mapping[str, Tensor] | None = None,
        on_text: Callable[[str], None] | None = None,
    ) -> str:
        """Generate the answer to a prompt, passing chunks of its text to `on_text`."""
        model, tokenizer = self.model, self.tokenizer
        traits, ends = model.traits, find_ends(model, tokenizer, self._mark)
        stops: dict[str, Any] = {"eos_token_id": tuple(ends)} if ends else {}
        if self._limit is not None:
            most = min(self.options.max_new_tokens, self._limit - len(ids))
            stops |= {
                "max_new_tokens": most,
                "min_new_tokens": min(self.options.min_new_tokens, most),
            }
        options = self.options.replace(**stops)
        if options.num_return_sequences > 1:
            raise ConfigError(
                f"num_return_sequences={options.num_return_sequences} must be 1, because a "
                "conversation continues with exactly one answer. Leave it out."
            )
        if traits.is_encoder_decoder:
            prompt = torch.tensor([ids], device=next(model.parameters()).device)
            out = generate(model, prompt, torch.ones_like(prompt), options)[0].tolist()  # type: ignore[arg-type]
            return decode_answer(out[1:], tokenizer, traits.answer_sentinel)
        if self._mark and options.num_beams == 1:
            options = options.replace(stop_strings=(*options.stop_strings, self._mark))
        shown = on_text if self.streams else None
        (text,) = continue_ids(model, tokenizer, ids, options, shown, inputs)
        return (text.partition(self._mark)[0] if self._mark else text).strip()


def _without_paths(message: Message) -> Message:
    """Return a message whose images have no paths, which a template might render."""
    if isinstance(message["content"], str):
        return message
    parts = [{"type": "image"} if p["type"] == "image" else p for p in message["content"]]
    return {**message, "content": parts}


def encode_messages(
    template: ChatTemplate,
    messages: Sequence[Message],
    model: Model,
    tokenizer: Tokenizer,
    tools: Sequence[Mapping[str, Any]] | None = None,
    begin: str = "",
    **variables: Any,
) -> list[int]:
    """Return the token ids of a conversation, as the prompt of the next answer.

    Args:
        template: chat template of the model.
        messages: the conversation so far.
        model: model that generates text, except EVA and CPM-Bee.
        tokenizer: the model's tokenizer.
        tools: functions that the assistant may call, as JSON schemas.
        begin: fixed beginning of the answer.
        variables: further variables of the template, such as `enable_thinking`.

    Raises:
        DataError: the template rejects the conversation.
    """
    traits = model.traits
    _, ids = template.encode(messages, tools, begin, **variables)
    before: list[int | None] = []
    behind: list[int | None] = []
    if traits.is_encoder_decoder:
        behind = [tokenizer.token_to_id(traits.sentinel.format(0)), tokenizer.eos_id]
    elif traits.objective == "blanks":
        roles = {name: tokenizer.role_id(name) for name in ("cls", "gmask", "eos", "sop")}
        blank = getattr(model.config, "mask_token_id", None) or roles["gmask"]
        before, behind = [roles["cls"]], [blank, roles["eos"], roles["sop"]]
    elif traits.objective == "hidden tokens":
        before = [tokenizer.bos_id]
    return [id for id in (*before, *ids, *behind) if id is not None]


def find_ends(model: Model, tokenizer: Tokenizer, mark: str) -> list[int]:
    """Return the tokens that end an answer: the model's EOS tokens and the template's end mark.

    Args:
        model: model that generates text, except EVA and CPM-Bee.
        tokenizer: the model's tokenizer.
        mark: text that the template renders after an answer.
    """
    traits = model.traits
    ids: list[int | None] = [*find_end_tokens(model.config, tokenizer)]
    if traits.is_encoder_decoder:
        ids.append(tokenizer.token_to_id(traits.answer_sentinel.format(1) or " "))
    else:
        marks = tokenizer.encode(mark) if mark else []
        ids += [tokenizer.role_id("eop"), *(marks if len(marks) == 1 else ())]
    return list(dict.fromkeys(id for id in ids if id is not None))
