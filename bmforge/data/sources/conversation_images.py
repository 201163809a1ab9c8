"""Finds the images of conversations: parts of messages, or a list of images in the record.

Forms: OpenAI's ``image_url`` and transformers' ``image`` parts with their source; TRL's ``images``
list for ``image`` parts without a source; LLaVA's ``image`` field, or a list ``images``, for
``<image>`` in the texts.
Sources: huggingface.co/docs/trl/dataset_formats, github.com/haotian-liu/LLaVA
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from bmforge.errors import DataError
from bmforge.tokenizers.chat_messages import Message

__all__ = ["IMAGE_FIELDS", "find_images"]

IMAGE_FIELDS = frozenset({"image", "images"})
_MARK = "<image>"


def find_images(
    record: Mapping[str, Any], messages: Sequence[Message], location: str, folder: Path
) -> list[Message]:
    """Return messages whose image parts have a data URI or a file as ``image``.

    Args:
        record: the record, whose fields `IMAGE_FIELDS` may have the images in order.
        messages: normalized messages of the record.
        location: file and line, for error messages.
        folder: folder of the data file, to which files are relative.

    Raises:
        DataError: an image has no source, is in an answer, or is not a data URI or an existing
            file; or the numbers of images in the record and in its messages differ.
    """
    listed = record.get("images") or record.get("image") or []
    sources = listed if isinstance(listed, list) else [listed]
    remaining = iter(sources)
    placed = [_place(message, remaining, bool(sources), location, folder) for message in messages]
    if left := len(list(remaining)):
        raise DataError(
            f"{location} has {len(sources)} images, but its messages use {len(sources) - left} of "
            f"them. Mark the place of each image with {_MARK} in a message of the user."
        )
    return placed


def _place(
    message: Message, sources: Iterator[Any], is_marked: bool, location: str, folder: Path
) -> Message:
    """Return a message whose image parts have a source; ``<image>`` in a text becomes a part."""
    content = message["content"]
    if isinstance(content, str):
        if not is_marked or message["role"] != "user" or _MARK not in content:
            return message
        content = _split(content)
    parts = []
    for part in content:
        if part["type"] == "image":
            source = part.get("image") or next(sources, None)
            if isinstance(source, dict):
                source = source.get("path") or source.get("url")
            part = {"type": "image", "image": _locate(source, message["role"], location, folder)}
        parts.append(part)
    return {**message, "content": parts}


def _split(text: str) -> list[dict[str, Any]]:
    """Split a text at its image marks into parts."""
    parts: list[dict[str, Any]] = []
    for number, between in enumerate(text.split(_MARK)):
        parts += [{"type": "image"}] if number else []
        parts += [{"type": "text", "text": between}] if between else []
    return parts


def _locate(source: Any, role: str, location: str, folder: Path) -> str:
    """Return a data URI, or the path of an existing file."""
    if not isinstance(source, str) or not source or role != "user":
        raise DataError(
            f"{location} has an image in a message of the role {role!r}, or without a source. Use "
            "images in user messages, as {'type': 'image', 'image': FILE}."
        )
    if source.startswith("data:"):
        return source
    if source.startswith("file:///"):
        source = url2pathname(urlsplit(source).path)
    if not (folder / source).is_file():
        raise DataError(
            f"{location}: the image file {str(folder / source)!r} does not exist. Use data URIs, "
            "or paths relative to the data file. URLs are not fetched."
        )
    return str(folder / source)
