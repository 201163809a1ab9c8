"""Loads a model directory's processor, which converts texts with images to model inputs.

`find_processor` returns None for a text-only model. The processor is that of transformers, so
that image sizes, patches and image tokens are those that the model was trained with.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from bmforge.errors import ConfigError, DataError
from bmforge.models.config_file import read_config_file
from bmforge.models.transformers.library import load_library

__all__ = ["ProcessedPrompt", "Processor", "find_processor", "load_processor", "without_videos"]

_FILES = ("processor_config.json", "preprocessor_config.json")


@dataclass(frozen=True)
class ProcessedPrompt:
    """A prompt as token ids, and the model's inputs for its images.

    Args:
        ids: token ids, with several image tokens per image.
        inputs: further inputs, such as `pixel_values`, for a batch of this prompt alone.
    """

    ids: list[int]
    inputs: dict[str, Tensor]


class Processor:
    """Converts texts with images to model inputs.

    Args:
        processor: processor of transformers that has an image processor.
    """

    def __init__(self, processor: Any) -> None:
        self._processor = processor
        # A tokenizer of transformers raises an error if two threads change its padding.
        self._lock = threading.Lock()

    @property
    def media_ids(self) -> frozenset[int]:
        """Ids of the tokens that the features of images, videos and audio replace."""
        owners = (self._processor, self._processor.tokenizer)
        names = ("image_token_id", "video_token_id", "audio_token_id")
        values = [getattr(owner, name, None) for owner in owners for name in names]
        return frozenset(value for value in values if isinstance(value, int))

    def encode(self, text: str, images: Sequence[Any]) -> ProcessedPrompt:
        """Encode one text with its images.

        Args:
            text: text that a chat template rendered, with one image token per image.
            images: Pillow images in the order of the text.

        Raises:
            DataError: the numbers of image tokens and images differ, or an image is unsuitable.
        """
        batch = self.encode_batch([text], [images])
        del batch["attention_mask"]
        return ProcessedPrompt(batch.pop("input_ids")[0].tolist(), batch)

    def encode_batch(
        self, texts: Sequence[str], images: Sequence[Sequence[Any]], padding_side: str = "left"
    ) -> dict[str, Tensor]:
        """Encode several texts with their images as one batch of model inputs.

        Args:
            texts, images: as in `encode`, one entry per sequence of the batch.
            padding_side: side of the padding, "left" or "right".

        Raises:
            DataError: see `encode`.
        """
        # As in transformers' apply_chat_template, the tokenizer adds the BOS token only if the
        # template did not write it.
        bos = self._processor.tokenizer.bos_token
        has_bos = bos is not None and texts[0].startswith(bos)
        options = {"add_special_tokens": False} if has_bos else {}
        try:
            with self._lock:
                batch = self._processor(
                    text=list(texts),
                    images=[list(row) for row in images] if any(images) else None,
                    padding=len(texts) > 1,
                    padding_side=padding_side,
                    return_tensors="pt",
                    **options,
                )
        except (ValueError, TypeError, IndexError, KeyError, RuntimeError, StopIteration) as error:
            raise DataError(
                f"the processor of the model does not accept the texts and images ({error}). Check "
                "that the chat template writes an image token for every image."
            ) from error
        return {name: value for name, value in batch.items() if isinstance(value, Tensor)}


def find_processor(directory: Path) -> Processor | None:
    """Return the image processor of a model directory; None if the directory has none."""
    if not any((directory / name).is_file() for name in _FILES):
        return None
    processor = load_processor(directory)
    has_images = getattr(processor, "image_processor", None) is not None
    has_texts = getattr(processor, "tokenizer", None) is not None
    return Processor(processor) if has_images and has_texts else None


def load_processor(directory: Path) -> Any:
    """Load the processor of transformers in a model or adapter directory.

    Raises:
        ConfigError: its files are damaged, or it needs code from the directory or a package that
            is not installed.
    """
    library = load_library("A processor of images or audio")
    try:
        kind = _find_class(directory)
        if kind is None:
            return library.AutoProcessor.from_pretrained(directory, trust_remote_code=False)
        if not library.utils.is_torchvision_available():
            return _load_without_videos(kind, directory)
        return kind.from_pretrained(directory)
    except ImportError as error:
        raise ConfigError(
            f"the processor in {str(directory)!r} needs a package that is not installed "
            f"({error}). Install the package with pip."
        ) from error
    except (ValueError, OSError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"transformers cannot load the processor in {str(directory)!r} ({error}). Copy all "
            "files of the published model into the directory."
        ) from error


def _find_class(directory: Path) -> Any:
    """Return the class of transformers that processes a model's inputs; None if unknown.

    The class is named in the processor's or tokenizer's config file, or follows from `model_type`
    in config.json, which an adapter directory lacks.
    """
    library = load_library()
    for name in (*_FILES, "tokenizer_config.json"):
        if (directory / name).is_file():
            values = json.loads((directory / name).read_text(encoding="utf-8"))
            kind = getattr(library, str(values.get("processor_class")), None)
            if kind is not None:
                return kind
    if not (directory / "config.json").is_file():
        return None
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    config_class = CONFIG_MAPPING[str(read_config_file(directory).get("model_type"))]
    return PROCESSOR_MAPPING.get(config_class, None)


def _load_without_videos(kind: Any, directory: Path) -> Any:
    """Load a processor without its video processor, if it has one.

    Raises:
        ConfigError: the class cannot be created without the video processor.
    """
    smaller = without_videos(kind)
    try:
        return smaller.from_pretrained(directory)
    except (TypeError, AttributeError) as error:
        if smaller is kind:
            raise
        raise ConfigError(
            f"a {kind.__name__} needs the package torchvision, which is not installed. Install "
            "the torchvision that fits your torch."
        ) from error


def without_videos(kind: Any) -> Any:
    """Return a processor class without its video processor, which needs torchvision."""
    if "video_processor" not in kind.get_attributes():
        return kind

    class ImageProcessor(kind):  # type: ignore[misc]
        """Combines a tokenizer and an image processor."""

        @classmethod
        def get_attributes(cls) -> list[str]:
            """Return the names of the components, without the video processor."""
            return [name for name in kind.get_attributes() if name != "video_processor"]

    ImageProcessor.__name__ = kind.__name__
    return ImageProcessor
