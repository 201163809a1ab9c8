"""Answers a message that contains images, with a vision-language model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bmforge.errors import ConfigError
from bmforge.infer.chat import find_ends
from bmforge.infer.openbmb.texts import continue_ids
from bmforge.infer.options import GenerationConfig
from bmforge.infer.processor import Processor, find_processor
from bmforge.tokenizers.chat_template import ChatTemplate, find_template

__all__ = ["ImageChat"]


class ImageChat:
    """Answers single messages with images.

    Args:
        directory: model directory with a chat template and an image processor.
        tokenizer: the model's tokenizer.

    Attributes:
        processor: the image processor.
        template: the chat template.

    Raises:
        ConfigError: the directory has no image processor or no chat template.
    """

    def __init__(self, directory: Path, tokenizer: Any) -> None:
        processor, source = find_processor(directory), find_template(directory)
        if processor is None or source is None:
            what = "image processor" if processor is None else "chat template"
            raise ConfigError(
                f"{str(directory)!r} has no {what}, so images cannot be used. Use a "
                "vision-language model, with all files of the published model in its "
                "directory."
            )
        self.processor: Processor = processor
        self.template = ChatTemplate(source, tokenizer)
        self._tokenizer = tokenizer

    def answer(self, model: Any, text: str, images: Sequence[Any], **options: Any) -> list[str]:
        """Return the answers to a user message that contains images, followed by a text.

        Args:
            model: vision-language model.
            text: text of the message.
            images: Pillow images; see `images.read_image_file`.
            options: fields of `GenerationConfig`; `num_return_sequences` answers are returned.

        Raises:
            ConfigError: the text is empty, the model does not support images, or an option does not
                apply.
            DataError: the processor does not accept the images.
        """
        if not text.strip():
            raise ConfigError("the prompt is empty. Pass --prompt TEXT, or pipe a text.")
        parts = [*({"type": "image"} for _ in images), {"type": "text", "text": text}]
        prompt, _ = self.template.encode([{"role": "user", "content": parts}])
        encoded = self.processor.encode(prompt, images)
        config = GenerationConfig(**options)
        if config.eos_token_id is None:
            mark = self.template.end_mark().strip()
            ends = find_ends(model, self._tokenizer, mark)
            config = config.replace(eos_token_id=tuple(ends) or None)
        texts = continue_ids(model, self._tokenizer, encoded.ids, config, inputs=encoded.inputs)
        return [text.strip() for text in texts]
